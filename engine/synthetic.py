"""An engine without a model: a deterministic stream of tokens at a set pace, for development and load tests.

The next token depends on the seed and on all tokens before it and on nothing else: neither on time, nor on what else is
running, nor on where the prompt ends. So a test can predict a stream (`expected_token_ids`), and a generation that is
continued from its prompt and the tokens already emitted goes on exactly as it would have.

Who is in a step is decided by the policy that decides it in a real engine. A step is one token of each stream in it,
and takes as long as the pace says, whatever it has to do; where the engine is stepped less often than that, it makes
up for the steps in between, and their tokens come together.

`SyntheticEngine` decides, with time as an argument; `SyntheticAdapter` waits for the next step in an event loop. No
stream has a timer of its own.
"""

from __future__ import annotations

import array
import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from seedance.engine.adapter import EngineEvents, EngineState, EngineStatistics, Output
from seedance.engine.admission import WindowSettings
from seedance.engine.ledger import Ledger
from seedance.engine.request import NOT_URGENT, FinishReason, ModelInfo, Sampling, TenantContext, Urgency
from seedance.engine.scheduling import PolicySettings, Step
from seedance.engine.settings import EngineSettings
from seedance.engine.synthetic_model import playing, vocab_size_of
from seedance.engine.synthetic_stream import Stream
from seedance.engine.synthetic_vocabulary import EOS_ID, VOCAB_SIZE
from seedance.engine.token_scheduler import TokenScheduler
from seedance.errors import EngineDead, EngineError

DEFAULT_MAX_MODEL_LEN: Final = 32_768
BLOCK_TOKENS: Final = 16

# An engine that was not stepped for longer than this has lost the time, as a real one would; otherwise it catches up.
_CATCH_UP_S: Final = 0.25
# Prompts are read at a pace of their own, so a step takes any number of their tokens.
_STEP_TOKENS: Final = 1 << 24
# So soon it looks for news of the ledger when nobody may run.
_LOOK_S: Final = 1.0
# How often an engine without anything to run gives a sign of life.
_BEAT_S: Final = 1.0
# What a step costs where there is no pace: a pause between two of them was none.
_LONGEST_STEP_S: Final = 0.05


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class SyntheticEngine:
    """The engine's side of a policy; `now` is in seconds of any monotonic clock. `settings.max_model_len` must be set.

    `vocab_size` bounds the ids of prompts. The ledger stays its owner's.
    """

    def __init__(self, settings: EngineSettings, ledger: Ledger, vocab_size: int = VOCAB_SIZE) -> None:
        self._settings = settings
        self._vocab_size = vocab_size
        synthetic = settings.synthetic
        self._tick_s = 1 / synthetic.tokens_per_s if synthetic.tokens_per_s > 0 else 0.0
        self._step_s = max(self._tick_s, synthetic.step_s)
        policy = PolicySettings(
            slots=settings.max_streams,
            kv_blocks=synthetic.kv_blocks,
            block_tokens=BLOCK_TOKENS,
            step_tokens=_STEP_TOKENS,
            step_target_s=settings.step_target_s,
            window=WindowSettings(max_wait_s=0.0, max_take=settings.max_streams),
        )
        self._scheduler = TokenScheduler(policy, ledger, 0.0)
        self._streams: dict[int, Stream] = {}
        self._running: dict[int, Stream] = {}
        self._decoding: dict[int, Stream] = {}
        self._blocks_free = synthetic.kv_blocks
        self._last_step: float | None = None
        self._last_tick = 0.0
        self._now = 0.0
        self._readable = 0.0
        self.steps = 0
        self.tokens = 0

    def submit(
        self,
        key: int,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        now: float,
        row: int = 0,
        urgency: Urgency = NOT_URGENT,
        emitted_token_ids: Sequence[int] = (),
    ) -> None:
        """Queue a generation. Raises EngineError when it does not fit into the context or the KV blocks."""
        limit = self._settings.max_model_len
        length = len(prompt_token_ids) + len(emitted_token_ids)
        if not 0 < length < limit:
            raise EngineError(
                "context_too_long" if prompt_token_ids else "invalid_request",
                f"cannot take a prompt of {length} tokens: it needs 1 to {limit - 1}",
            )
        token_ids = array.array("I", prompt_token_ids) + array.array("I", emitted_token_ids)
        if int(np.frombuffer(token_ids, np.uint32).max()) >= self._vocab_size:  # others' streams wait for this
            text = f"cannot take the prompt: its token ids must be 0 to {self._vocab_size - 1}"
            raise EngineError("invalid_request", text)
        stream = Stream(key, token_ids, len(emitted_token_ids), sampling, self._settings)
        self._now = max(self._now, now)
        self._scheduler.submitted(key, row, key, stream.length, stream.remaining, self._now, urgency)
        if self._last_step is None:
            self._last_step = self._last_tick = now
        self._streams[key] = stream

    def abort(self, keys: Iterable[int]) -> None:
        """End generations; unknown keys are ignored."""
        for key in keys:
            if key in self._streams:
                self._end(self._streams[key])
        self._rest()

    def next_step_at(self) -> float | None:
        """Return when `step` is due, None when there is nothing to run."""
        if self._last_step is None:
            return None
        wake_s = self._scheduler.wake_at(self._now)
        return max(self._last_tick + self._step_s, self._now + _LOOK_S if wake_s is None else wake_s)

    def step(self, now: float) -> list[Output]:
        """Run the steps that are due, and emit what they brought, one output a stream."""
        if self._last_step is None:
            return []
        elapsed_s, self._last_step = min(now - self._last_step, self._step_s + _CATCH_UP_S), now
        tick_s = self._tick_s or min(elapsed_s, _LONGEST_STEP_S)
        count = self._ticks(now)
        rate = self._settings.synthetic.prompt_tokens_per_s
        outputs: list[Output] = []
        counts: dict[int, int] = {}
        for number in range(count):
            self._now = max(self._now, now - (count - 1 - number) * self._tick_s)
            self._readable = self._readable + elapsed_s / count * rate if rate > 0 else float(_STEP_TOKENS)
            self._tick(tick_s, counts, outputs)
        self.steps += 1
        for key, tokens in counts.items():
            stream = self._streams.get(key)
            if stream is None:
                continue
            output = stream.advance(tokens)
            self.tokens += len(output.token_ids)
            outputs.append(output)
            if output.finish_reason is not None:
                self._end(stream)
        self._rest()
        return outputs

    def beat(self, now: float) -> None:
        """Give a sign of life in the ledger, as steps do by themselves."""
        self._scheduler.tell(max(self._now, now))

    def statistics(self, state: EngineState) -> EngineStatistics:
        """Return a snapshot; the engine itself does not know its state."""
        return EngineStatistics(
            state=state,
            running=len(self._running),
            waiting=len(self._streams) - len(self._running),
            kv_blocks_total=self._settings.synthetic.kv_blocks,
            kv_blocks_used=self._settings.synthetic.kv_blocks - self._blocks_free,
            steps=self.steps,
            tokens=self.tokens,
        )

    def _ticks(self, now: float) -> int:
        """Return how many tokens every running stream may emit now."""
        if self._tick_s == 0.0:
            self._last_tick = now
            return 1
        if now - self._last_tick > _CATCH_UP_S + self._step_s:
            self._last_tick = now - self._step_s
        # A timer may fire a little early by its clock's rounding; that is no reason to lose a step.
        count = int((now - self._last_tick) / self._tick_s + 1e-6)
        self._last_tick += count * self._tick_s
        return count

    def _tick(self, tick_s: float, counts: dict[int, int], outputs: list[Output]) -> None:
        """Make one step of the policy, and count the tokens that it brings to each stream."""
        scheduler = self._scheduler
        step = scheduler.step_begins(self._now, self._blocks_free, self._settings.max_streams - len(self._running))
        self._apply(step, counts, outputs)
        scheduled = self._decode(counts)
        self._read(step, scheduled, counts)
        scheduler.step_scheduled(scheduled, self._now)
        scheduler.step_ended(self._now, tick_s)

    def _apply(self, step: Step, counts: dict[int, int], outputs: list[Output]) -> None:
        for key in step.preempt:
            stream = self._streams[key]
            self._release(stream)
            stream.target = stream.length + counts.get(key, 0)
            stream.computed = 0
            stream.is_held = False
        for key in step.end:
            stream = self._streams[key]
            output = stream.advance(counts.pop(key, 0))
            output.finish_reason = output.finish_reason or FinishReason.QUOTA_EXCEEDED
            outputs.append(output)
            self._end(stream)
        for key in step.hold:
            self._streams[key].is_held = True
            self._decoding.pop(key, None)
        for key in step.release:
            stream = self._streams[key]
            stream.is_held = False
            if stream.computed >= stream.target:
                self._decoding[key] = stream

    def _decode(self, counts: dict[int, int]) -> dict[int, int]:
        """Give a token to each stream that decodes; returns them."""
        scheduled: dict[int, int] = {}
        for key, stream in self._decoding.items():
            count = counts.get(key, 0)
            if count >= stream.remaining or (not stream.computed % BLOCK_TOKENS and not self._grow(stream, 1)):
                continue
            stream.computed += 1
            scheduled[key] = 1
            counts[key] = count + 1
        return scheduled

    def _read(self, step: Step, scheduled: dict[int, int], counts: dict[int, int]) -> None:
        """Read prompts, as far as the policy wants and the pace allows; a token comes out at the end of each."""
        if not step.prefill:
            self._readable = 0.0
        for key, most in step.prefill.items():
            stream = self._streams[key]
            tokens = min(most, int(self._readable + 1e-6), stream.target - stream.computed)
            if tokens <= 0 or not self._grow(stream, _blocks(stream.computed + tokens) - stream.blocks):
                continue
            self._running[key] = stream
            self._readable -= tokens
            scheduled[key] = tokens
            stream.computed += tokens
            if stream.computed >= stream.target:
                counts[key] = counts.get(key, 0) + 1
                if not stream.is_held:
                    self._decoding[key] = stream

    def _grow(self, stream: Stream, blocks: int) -> bool:
        if blocks > self._blocks_free:
            return False
        self._blocks_free -= blocks
        stream.blocks += blocks
        return True

    def _release(self, stream: Stream) -> None:
        self._running.pop(stream.key, None)
        self._decoding.pop(stream.key, None)
        self._blocks_free += stream.blocks
        stream.blocks = 0

    def _end(self, stream: Stream) -> None:
        self._release(stream)
        del self._streams[stream.key]
        self._scheduler.finished(stream.key, self._now)

    def _rest(self) -> None:
        if not self._streams and self._last_step is not None:
            self._last_step = None
            self._scheduler.tell(self._now)


class SyntheticAdapter:
    """The synthetic engine in an event loop; an `engine.adapter.EngineAdapter`. The ledger stays its owner's."""

    def __init__(self, settings: EngineSettings, ledger: Ledger, loop: asyncio.AbstractEventLoop) -> None:
        limit = settings.max_model_len or DEFAULT_MAX_MODEL_LEN
        self._settings = msgspec.structs.replace(settings, max_model_len=limit)
        self._ledger = ledger
        self._loop = loop
        self._engine = SyntheticEngine(self._settings, ledger)
        self._events: EngineEvents | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._beat_timer: asyncio.TimerHandle | None = None
        self._state = EngineState.STOPPED
        self.core_pid: int | None = None

    async def start(self, events: EngineEvents) -> ModelInfo:
        """Begin anew with an empty engine, at once. Raises EngineDead when its model or tokenizer cannot be read."""
        self._events = events
        model = self._play(playing(self._settings) if self._settings.model else self._settings)
        self._state = EngineState.READY
        self._beat()
        return model

    async def reload(self, name: str, model: str) -> ModelInfo:
        """Play another model from now on."""
        try:
            return self._play(playing(msgspec.structs.replace(self._settings, name=name, model=model)))
        except EngineDead as exc:
            raise EngineError("engine_unavailable", str(exc)) from exc

    def _play(self, settings: EngineSettings) -> ModelInfo:
        """Begin anew with an empty engine."""
        tokenizer_dir = settings.synthetic.tokenizer_dir
        vocab_size = vocab_size_of(tokenizer_dir)
        self._settings = settings
        self._engine = SyntheticEngine(self._settings, self._ledger, vocab_size)
        return ModelInfo(
            name=self._settings.name,
            tokenizer_dir=tokenizer_dir,
            max_model_len=self._settings.max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=(EOS_ID,),
            created=int(time.time()),
            engine="synthetic",
            tokens=f"synthetic {tokenizer_dir}".rstrip(),
        )

    def remember(self, model: ModelInfo) -> None:
        """It ends with its host."""

    def submit(
        self,
        key: int,
        tenant: TenantContext,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        urgency: Urgency = NOT_URGENT,
        emitted_token_ids: Sequence[int] = (),
        claim: str = "",
    ) -> None:
        """Begin a generation, or go on with one exactly as it would have gone on."""
        self._ledger.set_paused(key, False)
        now = self._loop.time()
        self._engine.submit(key, prompt_token_ids, sampling, now, tenant.row, urgency, emitted_token_ids)
        self._arm()

    @property
    def unclaimed(self) -> Collection[int]:
        """Nothing: it ends with its host."""
        return ()

    def claim(self, claim: str, emitted_token_ids: Sequence[int]) -> Output | None:
        """Return nothing: it ends with its host."""
        return None

    def abort(self, keys: Sequence[int]) -> None:
        """End generations at once."""
        self._engine.abort(keys)

    def set_paused(self, keys: Sequence[int], is_paused: bool) -> None:
        """Leave generations out of the steps, or take them in again."""
        for key in keys:
            self._ledger.set_paused(key, is_paused)
        self._arm()

    def give_up(self, reason: str) -> None:
        """Drop every generation."""
        if self._state is EngineState.READY:
            assert self._events is not None, "an engine is given up that was never started"
            self._end(EngineState.DEAD)
            self._events.state_changed(EngineState.DEAD, f"cannot go on: {reason}")

    def shrink(self) -> None:
        """It holds none."""

    async def statistics(self) -> EngineStatistics:
        """Return a snapshot."""
        return self._engine.statistics(self._state)

    async def stop(self) -> None:
        """Drop every generation."""
        self._end(EngineState.STOPPED)

    def _end(self, state: EngineState) -> None:
        self._disarm()
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._state = state
        self._engine = SyntheticEngine(self._settings, self._ledger)

    def _beat(self) -> None:
        self._engine.beat(self._loop.time())
        self._beat_timer = self._loop.call_later(_BEAT_S, self._beat)

    def _arm(self) -> None:
        """Set the timer to the next step; one that is due no later is left alone."""
        due = self._engine.next_step_at()
        if due is not None and (self._timer is None or due < self._timer.when()):
            self._disarm()
            self._timer = self._loop.call_at(due, self._step)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self) -> None:
        assert self._events is not None, "a generation was submitted before start"
        self._timer = None
        outputs = self._engine.step(self._loop.time())
        if outputs:
            self._events.step_completed(outputs)
        steps = self._settings.synthetic.die_after_steps
        if steps and self._engine.steps >= steps:
            self.give_up(f"rehearsed death after {steps} steps")
        else:
            self._arm()
