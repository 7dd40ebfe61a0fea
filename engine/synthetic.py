"""An engine without a model: a deterministic stream of tokens at a set pace, for development and load tests.

The next token depends on the seed and on all tokens before it and on nothing else: neither on time, nor on what else is
running, nor on where the prompt ends. So a test can predict a stream (`expected_token_ids`), and a generation that is
continued from its prompt and the tokens already emitted goes on exactly as it would have.

`SyntheticEngine` decides, with time as an argument; `SyntheticAdapter` waits for the next step in an event loop. Work
per step is one short function call for each running stream, and no stream has a timer of its own.
"""

from __future__ import annotations

import array
import asyncio
import itertools
import math
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from seedance.engine.adapter import EngineEvents, EngineState, EngineStatistics, Output
from seedance.engine.request import FinishReason, ModelInfo, Sampling, TenantContext, TokenLogprobs
from seedance.engine.settings import EngineSettings
from seedance.engine.synthetic_vocabulary import EOS_ID, FOLLOWERS, STARTERS, VOCAB_SIZE
from seedance.errors import EngineError

DEFAULT_MAX_MODEL_LEN: Final = 32_768
BLOCK_TOKENS: Final = 16

# An engine that was not stepped for longer than this has lost the time, as a real one would; otherwise it catches up.
_CATCH_UP_S: Final = 0.25
_TOKEN_BYTES: Final = [token_id.to_bytes(4, "little") for token_id in range(VOCAB_SIZE)]
_MIX: Final = 0x9E3779B1  # 2³² / golden ratio: spreads the checksum's bits before the high ones are used
_STARTERS: Final = len(STARTERS)


def _generate(seed: int, prompt_token_ids: Sequence[int], eos_below: int = 0, eos_from: int = 0) -> Iterator[int]:
    """Yield the tokens after a prompt for ever.

    `eos_below` is the chance, of 65,536, of the end-of-text token at each place; none comes before place `eos_from`.
    """
    seed_bytes = (seed & (2**64 - 1)).to_bytes(8, "little")
    # The checksum stands for the seed and all tokens so far.
    state = zlib.crc32(array.array("I", prompt_token_ids).tobytes(), zlib.crc32(seed_bytes))
    follower = FOLLOWERS.get(prompt_token_ids[-1]) if prompt_token_ids else None
    for position in itertools.count():
        mixed = state * _MIX & 0xFFFFFFFF
        if follower is not None:
            token_id = follower
        elif mixed & 0xFFFF < eos_below and position >= eos_from:
            token_id = EOS_ID
        else:
            token_id = STARTERS[(mixed >> 8) * _STARTERS >> 24]
        yield token_id
        state = zlib.crc32(_TOKEN_BYTES[token_id], state)
        follower = FOLLOWERS.get(token_id)


def expected_token_ids(
    seed: int, prompt_token_ids: Sequence[int], count: int, eos_probability: float = 0.0
) -> list[int]:
    """Return the first `count` tokens after a prompt, as if no limit or stop token ended them."""
    return list(itertools.islice(_generate(seed, prompt_token_ids, _eos_below(eos_probability)), count))


def _eos_below(probability: float) -> int:
    return round(probability * 65_536)


def _blocks(length: int) -> int:
    return -(-length // BLOCK_TOKENS)


class _Stream:
    """One generation inside the engine; `length` counts its prompt and what it has emitted."""

    __slots__ = (
        "blocks",
        "ends",
        "key",
        "length",
        "logprobs",
        "min_length",
        "remaining",
        "token_ids",
        "unread_prompt",
    )

    def __init__(self, key: int, prompt_token_ids: Sequence[int], sampling: Sampling, settings: EngineSettings) -> None:
        seed = settings.synthetic.seed if sampling.seed is None else sampling.seed
        eos_below = _eos_below(settings.synthetic.eos_probability)
        self.key = key
        self.length = len(prompt_token_ids)
        # An ignored end-of-text is a token like others, at any place.
        eos_from = 0 if sampling.ignore_eos else sampling.min_tokens
        self.token_ids = _generate(seed, prompt_token_ids, eos_below, eos_from)
        self.min_length = self.length + sampling.min_tokens
        self.remaining = min(sampling.max_tokens, settings.max_model_len - self.length)
        self.ends = frozenset(sampling.stop_token_ids)
        if eos_below and not sampling.ignore_eos:
            self.ends |= {EOS_ID}
        self.logprobs = sampling.logprobs
        self.unread_prompt = float(self.length)
        self.blocks = 0

    def advance(self, count: int) -> Output:
        """Emit up to `count` tokens."""
        count = min(count, self.remaining)
        token_ids = list(itertools.islice(self.token_ids, count))
        finish_reason = FinishReason.LENGTH if count == self.remaining else None
        if self.ends:
            # `place` counts this token in.
            for place, token_id in enumerate(token_ids, start=1):
                if token_id in self.ends and self.length + place > self.min_length:
                    del token_ids[place:]
                    finish_reason = FinishReason.STOP
                    break
        self.length += len(token_ids)
        self.remaining -= len(token_ids)
        logprobs = None if self.logprobs is None else [_logprobs(token_id, self.logprobs) for token_id in token_ids]
        return Output(self.key, token_ids, finish_reason, logprobs)


def _logprobs(token_id: int, alternatives: int) -> TokenLogprobs:
    """Return probabilities for a token and its alternatives; the chosen one is always the likeliest."""
    best = -(token_id % 100) / 100
    others = [(token_id + i) % VOCAB_SIZE for i in range(alternatives)]
    return TokenLogprobs([token_id, *others], [best, *(best - i for i in range(alternatives))], 1)


class SyntheticEngine:
    """The engine's decisions; `now` is in seconds of any monotonic clock. `settings.max_model_len` must be set."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        synthetic = settings.synthetic
        self._tick_s = 1 / synthetic.tokens_per_s if synthetic.tokens_per_s > 0 else 0.0
        self._step_s = max(self._tick_s, synthetic.step_s)
        self._waiting: dict[int, _Stream] = {}
        self._running: dict[int, _Stream] = {}
        self._blocks_free = synthetic.kv_blocks
        self._last_step: float | None = None
        self._last_tick = 0.0
        self.steps = 0
        self.tokens = 0

    def submit(self, key: int, prompt_token_ids: Sequence[int], sampling: Sampling, now: float) -> None:
        """Queue a generation. Raises EngineError when it does not fit into the context or the KV blocks."""
        limit = self._settings.max_model_len
        if not 0 < len(prompt_token_ids) < limit:
            raise EngineError(
                "context_too_long" if prompt_token_ids else "invalid_request",
                f"cannot take a prompt of {len(prompt_token_ids)} tokens: it needs 1 to {limit - 1}",
            )
        if not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < VOCAB_SIZE:
            raise EngineError("invalid_request", f"cannot take the prompt: its token ids must be 0 to {VOCAB_SIZE - 1}")
        stream = _Stream(key, prompt_token_ids, sampling, self._settings)
        if _blocks(stream.length + stream.remaining) > self._settings.synthetic.kv_blocks:
            raise EngineError("context_too_long", "cannot take the request: it needs more KV blocks than there are")
        if self._last_step is None:
            self._last_step = self._last_tick = now
        self._waiting[key] = stream

    def abort(self, keys: Iterable[int]) -> None:
        """End generations; unknown keys are ignored."""
        for key in keys:
            self._waiting.pop(key, None)
            self._end(key)

    def next_step_at(self) -> float | None:
        """Return when `step` is due, None when nothing runs or waits."""
        return None if self._last_step is None else self._last_tick + self._step_s

    def step(self, now: float) -> list[Output]:
        """Run one engine step: read prompts, and emit the tokens that are due, one output a stream."""
        if self._last_step is None:
            return []
        count = self._ticks(now)
        self._read_prompts(now - self._last_step)
        self._last_step = now
        self.steps += 1
        outputs = self._advance(count) if count else []
        for output in outputs:
            self.tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._end(output.key)
        if not self._running and not self._waiting:
            self._last_step = None
        return outputs

    def statistics(self, state: EngineState) -> EngineStatistics:
        """Return a snapshot; the engine itself does not know its state."""
        return EngineStatistics(
            state=state,
            running=len(self._running),
            waiting=len(self._waiting),
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

    def _read_prompts(self, elapsed_s: float) -> None:
        """Spend the step's prompt reading on the oldest waiting streams; those that are through begin to run."""
        rate = self._settings.synthetic.prompt_tokens_per_s
        budget = elapsed_s * rate if rate > 0 else math.inf
        for stream in list(self._waiting.values()):
            blocks = _blocks(stream.length + 1)
            if len(self._running) >= self._settings.max_streams or blocks > self._blocks_free:
                return
            read = min(budget, stream.unread_prompt)
            stream.unread_prompt -= read
            budget -= read
            if stream.unread_prompt > 0:
                return
            del self._waiting[stream.key]
            self._running[stream.key] = stream
            stream.blocks = blocks
            self._blocks_free -= blocks

    def _advance(self, count: int) -> list[Output]:
        outputs = []
        for stream in list(self._running.values()):
            length = stream.length + count
            if length > stream.blocks * BLOCK_TOKENS and not self._make_room(stream, length):
                continue
            outputs.append(stream.advance(count))
        return outputs

    def _make_room(self, stream: _Stream, length: int) -> bool:
        """Give a stream the blocks for a length, if need be those of the newest streams: they begin once more.

        Returns whether the stream still runs.
        """
        while stream.key in self._running:
            wanted = _blocks(min(length, stream.length + stream.remaining)) - stream.blocks
            if wanted <= self._blocks_free:
                stream.blocks += wanted
                self._blocks_free -= wanted
                return True
            newest = next(reversed(self._running.values()))
            self._end(newest.key)
            newest.unread_prompt = float(newest.length)
            self._waiting = {newest.key: newest, **self._waiting}
        return False

    def _end(self, key: int) -> None:
        stream = self._running.pop(key, None)
        if stream is not None:
            self._blocks_free += stream.blocks
            stream.blocks = 0


class SyntheticAdapter:
    """The synthetic engine in an event loop; an `engine.adapter.EngineAdapter`."""

    def __init__(self, settings: EngineSettings, loop: asyncio.AbstractEventLoop) -> None:
        limit = settings.max_model_len or DEFAULT_MAX_MODEL_LEN
        self._settings = msgspec.structs.replace(settings, max_model_len=limit)
        self._loop = loop
        self._engine = SyntheticEngine(self._settings)
        self._events: EngineEvents | None = None
        self._timer: asyncio.Handle | None = None
        self._state = EngineState.STOPPED

    async def start(self, events: EngineEvents) -> ModelInfo:
        """Begin anew with an empty engine, at once."""
        self._events = events
        self._engine = SyntheticEngine(self._settings)
        self._state = EngineState.READY
        return ModelInfo(
            name=self._settings.name,
            tokenizer_dir="",
            max_model_len=self._settings.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS_ID,),
            created=int(time.time()),
            engine="synthetic",
        )

    def submit(self, key: int, tenant: TenantContext, prompt_token_ids: Sequence[int], sampling: Sampling) -> None:
        """Begin a generation; all tenants are alike here."""
        self._engine.submit(key, prompt_token_ids, sampling, self._loop.time())
        if self._timer is None:
            self._arm()

    def abort(self, keys: Sequence[int]) -> None:
        """End generations at once."""
        self._engine.abort(keys)

    async def statistics(self) -> EngineStatistics:
        """Return a snapshot."""
        return self._engine.statistics(self._state)

    async def stop(self) -> None:
        """Drop every generation."""
        self._disarm()
        self._state = EngineState.STOPPED
        self._engine = SyntheticEngine(self._settings)

    def _arm(self) -> None:
        due = self._engine.next_step_at()
        if due is None:
            self._timer = None
        elif self._settings.synthetic.tokens_per_s > 0:
            self._timer = self._loop.call_at(due, self._step)
        else:
            self._timer = self._loop.call_soon(self._step)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self) -> None:
        assert self._events is not None, "a generation was submitted before start"
        outputs = self._engine.step(self._loop.time())
        if outputs:
            self._events.step_completed(outputs)
        steps = self._settings.synthetic.die_after_steps
        if steps and self._engine.steps >= steps:
            self._disarm()
            self._state = EngineState.DEAD
            self._engine = SyntheticEngine(self._settings)
            self._events.state_changed(EngineState.DEAD, f"cannot go on: rehearsed death after {steps} steps")
            return
        self._arm()
