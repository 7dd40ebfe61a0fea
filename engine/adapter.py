"""The interface between the engine host and an engine: what each adapter offers, and what it calls.

An adapter lives in the host's event loop. It never blocks it, never raises through a callback, and reports the
outputs of one engine step in one call.
"""

from __future__ import annotations

import array
import enum
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import msgspec

from seedance.engine.request import (
    NOT_URGENT,
    FinishReason,
    ModelInfo,
    Sampling,
    TenantContext,
    TokenLogprobs,
    Urgency,
)


class EngineState(enum.StrEnum):
    """Where an engine is in its life, as users see it in status.

    RECOVERING is a host's: its engine died, and another one will go on with what it had.
    """

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    DEAD = "dead"
    STOPPED = "stopped"


class Output(msgspec.Struct, array_like=True):
    """What one engine step brought for one generation.

    `finish_reason` is set in the last output of a generation and nowhere else. `cached_tokens` counts the prompt
    tokens that came from the prefix cache, told once, with the first output. `error` is a text for people, with
    finish_reason ERROR.
    """

    key: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    error: str | None = None

    @property
    def is_single(self) -> bool:
        """Whether it is one token and nothing else."""
        return len(self.token_ids) == 1 and not (self.finish_reason or self.cached_tokens or self.logprobs)


def outputs_of(singles: bytes) -> Iterator[Output]:
    """Return the outputs that `singles` stand for; see `EngineEvents.step_completed`."""
    flat = iter(array.array("I", singles))
    return (Output(key, [token_id]) for key, token_id in zip(flat, flat, strict=True))


class EngineEvents(Protocol):
    """What the host does with an adapter's news; called from the event loop."""

    def step_completed(self, outputs: Sequence[Output], singles: bytes = b"") -> None:
        """Take the outputs of one engine step, in the engine's order.

        `singles` holds the generations that got one token and nothing else, as far as they are not among the outputs:
        pairs of key and token id, unsigned 32 bits in the machine's order.
        """

    def state_changed(self, state: EngineState, detail: str) -> None:
        """Take a new state; with DEAD every generation is lost and no further output comes for it."""


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine for status and tests; None where the engine cannot say."""

    state: EngineState
    running: int
    waiting: int
    kv_blocks_total: int | None = None
    kv_blocks_used: int | None = None
    kv_bytes: int | None = None
    weight_bytes: int | None = None
    steps: int = 0
    tokens: int = 0


class EngineAdapter(Protocol):
    """An engine as the host drives it.

    Limits of tenants reach it by the ledger, and its statistics leave it there. `core_pid` is the process that makes
    its steps, None while there is none, or where that is the host itself. `unclaimed` are the keys of what it runs for
    a host that has died.
    """

    core_pid: int | None

    @property
    def unclaimed(self) -> Collection[int]:
        """See above."""

    async def start(self, events: EngineEvents) -> ModelInfo:
        """Bring the engine up, warm; return once it can serve. Raises EngineDead when it cannot."""

    def remember(self, model: ModelInfo) -> None:
        """Take note of the model that it serves as the next host is to know it."""

    async def reload(self, name: str, model: str) -> ModelInfo:
        """Serve the model in another directory, of the same layout and with the same tokens, by its weights alone.

        Only while nothing runs. What was cached of prompts is forgotten. Raises EngineError when it cannot, and has the
        weights of either, or of both, then; EngineDead when it has died of it.
        """

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
        """Begin generation `key`, below `ledger.STREAMS` and unique while it lives.

        With `emitted_token_ids`, which must leave something to generate (`Sampling.end_of`), it goes on behind them:
        they count as its output in all that `sampling` says, and do not come again; `cached_tokens` are not told. By
        its claim (`survivors`) it can be asked for when this host has died.
        Raises EngineError when this request can never run.
        """

    def claim(self, claim: str, emitted_token_ids: Sequence[int]) -> Output | None:
        """Take a generation over that was begun for a host which has died; None when there is none.

        Returns its key, and what it has brought behind these tokens; the rest comes as any other's output.
        """

    def abort(self, keys: Sequence[int]) -> None:
        """End generations without any further output for them; unknown keys are ignored."""

    def set_paused(self, keys: Sequence[int], is_paused: bool) -> None:
        """Leave generations out of the engine's steps, which keep what they have, or take them in again."""

    def give_up(self, reason: str) -> None:
        """Take the engine for dead, for this reason, and end it; one that is down already stays as it is."""

    def shrink(self) -> None:
        """Have the engine give back memory that it holds and does not use."""

    async def statistics(self) -> EngineStatistics:
        """Ask the engine how full it is."""

    async def stop(self) -> None:
        """End the engine and everything that it started; idempotent."""
