from __future__ import annotations

import pytest

from bench.processes import BenchError
from bench.wire import SEGMENT_BYTES, Sample, differing, prompts, sample_of, summary
from bench.wire_client import Answer


def sample(door: str, size: int) -> Sample:
    answer = Answer(text="né" * 50, events=80, received_bytes=size, segments=10, sent_bytes=50)
    return sample_of(door, 100, answer)


def test_bytes_are_divided_by_tokens_with_and_without_headers() -> None:
    one = sample("fm", 2500)
    assert one.per_token == 25.0
    assert one.per_token_with_headers == pytest.approx(25.0 + 10 * SEGMENT_BYTES / 100)
    assert one.text_bytes == 150


def test_the_result_has_a_median_for_each_door() -> None:
    result = summary([sample(door, size) for size in (2000, 2500, 3500) for door in ("fm", "vllm_sse")])
    assert result["fm_bytes_per_token"] == 25.0
    assert result["vllm_sse_bytes_per_token_quartiles"] == [22.5, 30.0]
    assert result["by_door"]["fm"]["tokens_per_event"] == 1.25
    assert result["by_door"]["fm"]["sent_bytes_per_token"] == 0.5
    assert (result["answers"], result["tokens"]) == (3, 100)


def test_another_servers_text_may_differ_and_ours_may_not() -> None:
    assert differing({"fm": "a", "sse": "a", "vllm_sse": "a"}) == []
    assert differing({"fm": "a", "sse": "a", "vllm_sse": "b", "vllm_rust_sse": "a"}) == ["vllm_sse"]
    with pytest.raises(BenchError, match="fm and sse gave different texts"):
        differing({"fm": "a", "sse": "b", "vllm_sse": "a"})


def test_prompts_differ_and_have_the_same_words() -> None:
    made = prompts(8)
    assert len(set(made)) == 8
    assert {tuple(sorted(prompt.split())) for prompt in made} == {tuple(sorted(made[0].split()))}
