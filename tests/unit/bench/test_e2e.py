from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from bench.e2e import INPUT_TOKENS, Setting, settings_of, summary, write_prompts
from bench.serve_report import Sample


def sample(rate: float, itl_ms: float = 10.0, ttft_ms: float = 50.0) -> Sample:
    return Sample(
        tokens_per_s=rate,
        itl_p50_ms=itl_ms / 2,
        itl_p99_ms=itl_ms,
        ttft_median_ms=ttft_ms,
        ttft_p99_ms=ttft_ms * 2,
        tokens_per_event=1.0,
    )


def test_every_tenant_has_the_same_part_of_the_concurrency() -> None:
    assert settings_of([1, 64], [1, 8]) == [Setting(1, 1), Setting(1, 64), Setting(8, 64)]


def test_ratios_are_formed_within_rounds_by_peer_and_concurrency() -> None:
    rounds = {
        "seedance": [sample(300.0, 5.0, 100.0), sample(200.0, 20.0, 25.0), sample(100.0)],
        "vllm-rust": [sample(100.0), sample(100.0), sample(100.0)],
    }
    result = summary([{"setting": Setting(1, 64), "rounds": rounds}])
    assert result["throughput_ratio"] == {"vllm-rust": {"64": 2.0}}
    assert result["throughput_ratio_quartiles"] == {"vllm-rust": {"64": [1.5, 2.5]}}
    assert result["itl_p99_ratio"] == {"vllm-rust": {"64": 1.0}}
    assert result["ttft_median_ratio"] == {"vllm-rust": {"64": 1.0}}
    assert result["by_server"]["seedance"]["64"]["tokens_per_s"] == 200.0


def test_several_tenants_have_keys_of_their_own() -> None:
    rounds = {"seedance": [sample(100.0)], "vllm-python": [sample(50.0)]}
    result = summary([{"setting": Setting(8, 256), "rounds": rounds}])
    assert result["throughput_ratio_8_tenants"] == {"vllm-python": {"256": 2.0}}
    assert "throughput_ratio" not in result


def test_without_ours_there_is_no_ratio() -> None:
    result = summary([{"setting": Setting(1, 1), "rounds": {"vllm-python": [sample(50.0)]}}])
    assert "throughput_ratio" not in result
    assert result["by_server"]["vllm-python"]["1"]["tokens_per_s"] == 50.0


def test_prompts_have_so_many_tokens_and_differ(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name in ("a", "b"):
        write_prompts(tmp_path / name, tokenizer, 20, seed=1)
    texts = [json.loads(line)["prompt"] for line in (tmp_path / "a").read_text().splitlines()]
    assert len(set(texts)) == 20
    assert {len(tokenizer.encode(text).ids) for text in texts} == {INPUT_TOKENS}
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
