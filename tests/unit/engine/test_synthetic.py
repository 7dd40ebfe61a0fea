"""The synthetic engine: what it emits, when, and what it holds meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from support.virtual_time import run_in_virtual_time

from seedance.engine.adapter import EngineState, Output
from seedance.engine.ledger import Ledger
from seedance.engine.request import NOT_URGENT, FinishReason, Sampling
from seedance.engine.scheduling import TenantLimits
from seedance.engine.settings import EngineSettings, SyntheticSettings
from seedance.engine.synthetic import DEFAULT_MAX_MODEL_LEN, SyntheticAdapter, SyntheticEngine
from seedance.engine.synthetic_stream import expected_token_ids
from seedance.engine.synthetic_vocabulary import EOS_ID, VOCAB_SIZE, decode_text, encode_text
from seedance.errors import EngineError

PROMPT = encode_text("tell me of the river")
SEED = 11


def make_engine(
    *, max_streams: int = 256, max_model_len: int = 2_000, ledger: Ledger | None = None, **synthetic: Any
) -> SyntheticEngine:
    values = {"seed": SEED, "tokens_per_s": 10.0, "prompt_tokens_per_s": 0.0, **synthetic}
    return SyntheticEngine(
        EngineSettings(
            kind="synthetic",
            name="synthetic",
            max_streams=max_streams,
            max_model_len=max_model_len,
            synthetic=SyntheticSettings(**values),
        ),
        ledger or Ledger.create(),
    )


def run(engine: SyntheticEngine, until: float = 1e9) -> list[tuple[float, Output]]:
    """Step an engine whenever it asks for it; return every output with its time."""
    outputs = []
    while (due := engine.next_step_at()) is not None and due <= until:
        outputs += [(due, output) for output in engine.step(due)]
    return outputs


def token_ids_of(outputs: list[tuple[float, Output]], key: int) -> list[int]:
    return [token_id for _, output in outputs if output.key == key for token_id in output.token_ids]


def held(engine: SyntheticEngine) -> tuple[int, int, int | None]:
    statistics = engine.statistics(EngineState.READY)
    return statistics.running, statistics.waiting, statistics.kv_blocks_used


def test_stream_is_the_expected_one_whatever_runs_beside_it() -> None:
    engine = make_engine()
    engine.submit(1, PROMPT, Sampling(max_tokens=50), 0.0)
    engine.submit(2, PROMPT[:5], Sampling(max_tokens=70), 0.0)
    outputs = run(engine)
    assert token_ids_of(outputs, 1) == expected_token_ids(SEED, PROMPT, 50)
    assert token_ids_of(outputs, 2) == expected_token_ids(SEED, PROMPT[:5], 70)
    assert [output.finish_reason for _, output in outputs if output.finish_reason] == [FinishReason.LENGTH] * 2
    assert held(engine) == (0, 0, 0)


def test_generation_continued_from_its_own_tokens_goes_on_the_same() -> None:
    whole = expected_token_ids(SEED, PROMPT, 200)
    for cut in range(0, 200, 7):
        assert expected_token_ids(SEED, PROMPT + whole[:cut], 200 - cut) == whole[cut:]


@pytest.mark.parametrize("limits", [{}, {"min_tokens": 30, "stop_token_ids": (32, 101)}, {"seed": 5}])
def test_continued_generation_brings_what_is_left_of_the_whole_one(limits: dict[str, Any]) -> None:
    sampling = Sampling(max_tokens=60, **limits)
    engine = make_engine(eos_probability=0.01)
    engine.submit(1, PROMPT, sampling, 0.0)
    outputs = run(engine)
    whole, end = token_ids_of(outputs, 1), outputs[-1][1].finish_reason
    for cut in range(1, len(whole), 7):
        engine.submit(cut, PROMPT, sampling, 0.0, 0, NOT_URGENT, whole[:cut])
        outputs = run(engine)
        assert token_ids_of(outputs, cut) == whole[cut:]
        assert outputs[-1][1].finish_reason is end
    assert held(engine) == (0, 0, 0)


def test_what_was_emitted_is_read_again_and_takes_room_in_the_context() -> None:
    engine = make_engine(prompt_tokens_per_s=100.0, tokens_per_s=100.0)
    engine.submit(1, PROMPT, Sampling(max_tokens=500), 0.0, 0, NOT_URGENT, [32] * 200)
    assert run(engine)[0][0] > 2.05
    with pytest.raises(EngineError, match="cannot take a prompt of"):
        engine.submit(2, PROMPT, Sampling(max_tokens=10**6), 0.0, 0, NOT_URGENT, [32] * DEFAULT_MAX_MODEL_LEN)


def test_seed_and_prompt_each_change_the_stream() -> None:
    streams = [
        expected_token_ids(seed, prompt, 40)
        for seed in (-1, 0, 1, 2**63)
        for prompt in (PROMPT, PROMPT[1:], PROMPT[:-1])
    ]
    assert len({tuple(stream) for stream in streams}) == len(streams)


def test_request_seed_goes_before_the_engines() -> None:
    engine = make_engine()
    engine.submit(1, PROMPT, Sampling(max_tokens=20, seed=99), 0.0)
    assert token_ids_of(run(engine), 1) == expected_token_ids(99, PROMPT, 20)


def test_streams_are_varied_valid_text_with_cut_characters() -> None:
    token_ids = expected_token_ids(SEED, PROMPT, 5_000)
    assert len(set(token_ids)) > 200
    # The last character may be cut off; every other one is whole.
    assert decode_text(token_ids).rstrip("\ufffd").count("\ufffd") == 0
    assert sum("\ufffd" in decode_text([token_id]) for token_id in token_ids) > 300


def test_each_stream_gets_its_pace_in_common_steps() -> None:
    engine = make_engine(tokens_per_s=10.0)
    engine.submit(1, PROMPT, Sampling(max_tokens=5), 100.0)
    engine.submit(2, PROMPT, Sampling(max_tokens=3), 100.0)
    times = [(round(now - 100, 3), output.key, len(output.token_ids)) for now, output in run(engine)]
    assert sorted(times) == [(step / 10, key, 1) for step in range(1, 6) for key in (1, 2) if key == 1 or step <= 3]
    assert engine.steps == 5


def test_longer_step_brings_several_tokens_of_a_stream_together() -> None:
    engine = make_engine(tokens_per_s=100.0, step_s=0.05)
    engine.submit(1, PROMPT, Sampling(max_tokens=12), 0.0)
    assert [(round(now, 3), len(output.token_ids)) for now, output in run(engine)] == [(0.05, 5), (0.1, 5), (0.15, 2)]


def test_late_steps_catch_up_but_not_without_bound() -> None:
    engine = make_engine(tokens_per_s=10.0)
    engine.submit(1, PROMPT, Sampling(max_tokens=1000), 0.0)
    assert len(engine.step(0.1)[0].token_ids) == 1
    assert len(engine.step(0.3)[0].token_ids) == 2
    assert len(engine.step(60.0)[0].token_ids) == 1
    assert engine.next_step_at() == pytest.approx(60.1)


def test_unlimited_pace_is_a_token_a_step() -> None:
    engine = make_engine(tokens_per_s=0.0)
    engine.submit(1, PROMPT, Sampling(max_tokens=4), 0.0)
    assert [len(engine.step(1e-6 * i)[0].token_ids) for i in range(4)] == [1, 1, 1, 1]
    assert engine.next_step_at() is None


def test_prompts_are_read_one_after_the_other() -> None:
    engine = make_engine(tokens_per_s=100.0, prompt_tokens_per_s=1_000.0)
    engine.submit(1, [5] * 500, Sampling(max_tokens=1), 0.0)
    engine.submit(2, [6] * 500, Sampling(max_tokens=1), 0.0)
    outputs = run(engine)
    assert [output.key for _, output in outputs] == [1, 2]
    assert [now for now, _ in outputs] == pytest.approx([0.5, 1.0], abs=0.021)


def test_streams_over_the_limit_wait_in_order() -> None:
    engine = make_engine(max_streams=2)
    for key in range(4):
        engine.submit(key, PROMPT, Sampling(max_tokens=3), 0.0)
    first = engine.step(0.1)
    assert [output.key for output in first] == [0, 1]
    assert held(engine)[:2] == (2, 2)
    outputs = run(engine)
    assert token_ids_of(outputs, 3) == expected_token_ids(SEED, PROMPT, 3)
    assert held(engine) == (0, 0, 0)


def test_blocks_follow_the_length() -> None:
    engine = make_engine(tokens_per_s=10.0)
    engine.submit(1, [1] * 30, Sampling(max_tokens=4), 0.0)
    used = []
    while (due := engine.next_step_at()) is not None:
        engine.step(due)
        used.append(held(engine)[2])
    assert used == [2, 2, 2, 0]  # the token that came out last has not been read


def test_streams_wait_for_blocks() -> None:
    engine = make_engine(kv_blocks=5)
    engine.submit(1, [1] * 60, Sampling(max_tokens=5), 0.0)
    engine.submit(2, [1] * 16, Sampling(max_tokens=1), 0.09)
    assert [output.key for output in engine.step(0.1)] == [1]
    assert held(engine) == (1, 1, 4)
    engine.abort([1])
    assert [output.key for output in engine.step(0.2)] == [2]
    assert held(engine) == (0, 0, 0)


@pytest.mark.parametrize("step_s", [0.0, 0.5])
def test_newest_stream_gives_way_and_goes_on_where_it_was(step_s: float) -> None:
    engine = make_engine(kv_blocks=10, step_s=step_s)
    for key in range(4):
        engine.submit(key, [*PROMPT, key], Sampling(max_tokens=100), key / 1000)
    outputs = run(engine)
    for key in range(4):
        assert token_ids_of(outputs, key) == expected_token_ids(SEED, [*PROMPT, key], 100)
    ends = [output.key for _, output in outputs if output.finish_reason]
    assert ends == [0, 1, 2, 3]
    assert held(engine) == (0, 0, 0)
    # Four at once would have been through after 10 s.
    assert outputs[-1][0] > 15


@pytest.mark.parametrize(
    ("length", "max_tokens", "code"),
    [(0, 1, "invalid_request"), (2_000, 1, "context_too_long"), (1_000, 900, "context_too_long")],
)
def test_request_that_can_never_run_is_refused(length: int, max_tokens: int, code: str) -> None:
    engine = make_engine(kv_blocks=100)
    with pytest.raises(EngineError) as refusal:
        engine.submit(1, [1] * length, Sampling(max_tokens=max_tokens), 0.0)
    assert refusal.value.code == code
    assert held(engine) == (0, 0, 0)


def test_context_ends_a_stream() -> None:
    engine = make_engine(max_model_len=30)
    engine.submit(1, [1] * 20, Sampling(max_tokens=1_000), 0.0)
    outputs = run(engine)
    assert len(token_ids_of(outputs, 1)) == 10
    assert outputs[-1][1].finish_reason is FinishReason.LENGTH


def test_eos_ends_a_stream_unless_ignored() -> None:
    expected = expected_token_ids(SEED, PROMPT, 500, 0.02)
    end = expected.index(EOS_ID)
    engine = make_engine(eos_probability=0.02)
    engine.submit(1, PROMPT, Sampling(max_tokens=500), 0.0)
    engine.submit(2, PROMPT, Sampling(max_tokens=500, ignore_eos=True), 0.0)
    outputs = run(engine)
    assert token_ids_of(outputs, 1) == expected[: end + 1]
    assert token_ids_of(outputs, 2) == expected
    assert [o.finish_reason for _, o in outputs if o.finish_reason] == [FinishReason.STOP, FinishReason.LENGTH]


def test_min_tokens_puts_off_eos_and_stop_tokens() -> None:
    engine = make_engine(eos_probability=0.2)
    engine.submit(1, PROMPT, Sampling(max_tokens=500, min_tokens=100), 0.0)
    token_ids = token_ids_of(run(engine), 1)
    assert len(token_ids) > 100
    assert token_ids.index(EOS_ID) == len(token_ids) - 1
    plain = expected_token_ids(SEED, PROMPT, 500)
    engine = make_engine()
    engine.submit(1, PROMPT, Sampling(max_tokens=500, min_tokens=60, stop_token_ids=tuple(set(plain[:60]))), 0.0)
    token_ids = token_ids_of(run(engine), 1)
    assert len(token_ids) > 60
    assert token_ids[-1] in plain[:60]


def test_stop_token_is_the_last_one() -> None:
    plain = expected_token_ids(SEED, PROMPT, 50)
    engine = make_engine()
    engine.submit(1, PROMPT, Sampling(max_tokens=50, stop_token_ids=(plain[20],)), 0.0)
    outputs = run(engine)
    assert token_ids_of(outputs, 1) == plain[: plain.index(plain[20]) + 1]
    assert outputs[-1][1].finish_reason is FinishReason.STOP


def test_logprobs_tell_each_position() -> None:
    engine = make_engine()
    engine.submit(1, PROMPT, Sampling(max_tokens=5, logprobs=3), 0.0)
    engine.submit(2, PROMPT, Sampling(max_tokens=5, logprobs=0), 0.0)
    for _, output in run(engine):
        wanted = 3 if output.key == 1 else 0
        assert output.logprobs is not None
        for token_id, place in zip(output.token_ids, output.logprobs, strict=True):
            assert place.token_ids[0] == token_id
            assert len(place.token_ids) == len(place.logprobs) == 1 + wanted
            assert all(0 <= alternative < VOCAB_SIZE for alternative in place.token_ids)
            assert place.logprobs[1:] == sorted(place.logprobs[1:], reverse=True)
            assert max(place.logprobs) <= 0


def test_abort_ends_without_output_and_frees_all() -> None:
    engine = make_engine(max_streams=1)
    engine.submit(1, PROMPT, Sampling(max_tokens=100), 0.0)
    engine.submit(2, PROMPT, Sampling(max_tokens=100), 0.0)
    engine.step(0.1)
    engine.abort([1, 2, 77])
    assert held(engine) == (0, 0, 0)
    assert engine.step(0.2) == []
    assert engine.next_step_at() is None


def test_share_is_of_the_steps_and_pauses_take_none() -> None:
    ledger = Ledger.create()
    ledger.set_limits(1, TenantLimits(share=0.2))
    ledger.limits_changed()
    engine = make_engine(tokens_per_s=100.0, ledger=ledger)
    for key, row in ((1, 1), (2, 1), (3, 2)):
        engine.submit(key, PROMPT, Sampling(max_tokens=2_000), 0.0, row)
    ledger.set_paused(3, True)
    outputs = run(engine, until=10.0)
    held = [len(token_ids_of(outputs, key)) for key in (1, 2)]
    assert held[0] == held[1] == pytest.approx(0.2 * 1_000, abs=10)
    assert token_ids_of(outputs, 3) == []
    ledger.set_paused(3, False)
    assert len(token_ids_of(run(engine, until=20.0), 3)) > 900
    statistics = ledger.statistics(1)
    assert statistics is not None
    assert statistics.step_s == pytest.approx(0.2 * 20, abs=0.2)
    engine_record = ledger.engine()
    assert engine_record is not None
    assert engine_record.beat_s == pytest.approx(20.0, abs=0.2)
    ledger.close()


def test_who_outgrows_its_kv_share_ends_with_what_it_has() -> None:
    ledger = Ledger.create()
    ledger.set_limits(1, TenantLimits(kv_share=0.1))
    ledger.limits_changed()
    engine = make_engine(tokens_per_s=100.0, kv_blocks=100, ledger=ledger)
    engine.submit(1, PROMPT, Sampling(max_tokens=1_000), 0.0, 1)
    outputs = run(engine)
    assert outputs[-1][1].finish_reason is FinishReason.QUOTA_EXCEEDED
    assert len(PROMPT) + len(token_ids_of(outputs, 1)) == pytest.approx(10 * 16, abs=16)
    with pytest.raises(EngineError, match="cannot take the request"):
        engine.submit(2, [1] * 200, Sampling(max_tokens=1), 20.0, 1)
    assert held(engine) == (0, 0, 0)
    ledger.close()


@pytest.mark.parametrize("tokens_per_s", [0.0, 10.0])
def test_an_engine_that_may_run_nobody_looks_once_a_second(tokens_per_s: float) -> None:
    ledger = Ledger.create()
    engine = make_engine(tokens_per_s=tokens_per_s, ledger=ledger)
    engine.submit(1, PROMPT, Sampling(max_tokens=10), 5.0)
    ledger.set_paused(1, True)
    assert engine.next_step_at() == pytest.approx(6.0)
    assert engine.step(6.0) == []
    assert engine.next_step_at() == pytest.approx(7.0)
    ledger.set_paused(1, False)
    due = engine.next_step_at()
    assert due is not None
    assert due <= 6.1
    ledger.close()


class Nobody:
    """Is told of an engine, and does nothing."""

    def step_completed(self, outputs: Sequence[Output], singles: bytes = b"") -> None:
        pass

    def state_changed(self, state: EngineState, detail: str) -> None:
        pass


def test_an_idle_engine_gives_signs_of_life() -> None:
    async def main() -> None:
        ledger = Ledger.create()
        loop = asyncio.get_running_loop()
        adapter = SyntheticAdapter(EngineSettings(kind="synthetic", name="made-up"), ledger, loop)
        await adapter.start(Nobody())
        beats = []
        for _ in range(3):
            await asyncio.sleep(10.5)
            record = ledger.engine()
            assert record is not None
            beats.append(loop.time() - record.beat_s)
        await adapter.stop()
        assert max(beats) <= 1.0
        assert min(beats) >= 0.0
        await asyncio.sleep(10.5)
        record = ledger.engine()
        assert record is not None
        assert record.beat_s == 0.0, "one that was stopped lives no more"
        ledger.close()

    run_in_virtual_time(main())
