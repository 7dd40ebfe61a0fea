"""One engine of a host, from its start to its end."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from seedance.engine.adapter import EngineAdapter, EngineState, Output
from seedance.engine.ledger import Ledger
from seedance.engine.request import ModelInfo
from seedance.engine.settings import EngineSettings


class Role(enum.StrEnum):
    """What an engine is for."""

    STARTING = "starting"
    TRIAL = "trial"
    STANDBY = "standby"
    ACTIVE = "active"
    LEAVING = "leaving"
    GONE = "gone"


class EngineOwner(Protocol):
    """Who is told what an engine does."""

    def step_completed(self, outputs: Sequence[Output], singles: bytes = b"") -> None:
        """Take what one of its steps brought; see `EngineEvents`."""

    def starts(self, engine: Engine, detail: str) -> None:
        """Take what an engine says of its start."""

    def engine_died(self, engine: Engine, detail: str) -> None:
        """Take an engine's death."""


class Engine:
    """One engine from its start to its end; its adapter's `EngineEvents`.

    `row` is its place in the ledger. `is_fallback` says that it is the one on the processor, `was_left` that it had
    another host before.
    """

    def __init__(
        self,
        settings: EngineSettings,
        adapter: EngineAdapter,
        ledger: Ledger,
        owner: EngineOwner,
        *,
        is_fallback: bool,
        was_left: bool,
    ) -> None:
        self.settings = settings
        self.adapter = adapter
        self.ledger = ledger
        self.is_fallback = is_fallback
        self.was_left = was_left
        self.role = Role.STARTING
        self.model: ModelInfo | None = None
        self.figures = ""
        self.ready_s = 0.0
        self._owner = owner
        self.step_completed: Callable[..., None] = owner.step_completed  # not a method: this is the way of every token

    @property
    def row(self) -> int:
        """Its place in the ledger."""
        return self.ledger.engine_row

    @contextlib.contextmanager
    def probed(self, take: Callable[..., None]) -> Iterator[None]:
        """Give the outputs of its steps to somebody else for a while, as long as nothing else runs on it."""
        assert self.role in {Role.TRIAL, Role.ACTIVE}, "cannot take the outputs of an engine that is to have none"
        self.step_completed = take
        try:
            yield
        finally:
            self.step_completed = self._owner.step_completed

    def state_changed(self, state: EngineState, detail: str) -> None:
        """Take the adapter's news; an end during its start is told by that."""
        if state is EngineState.READY:
            self.figures = detail
        elif state is EngineState.STARTING:
            self._owner.starts(self, detail)
        elif state is EngineState.DEAD and self.role is not Role.STARTING:
            self._owner.engine_died(self, detail)
