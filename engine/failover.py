"""What becomes of generations when their engine dies, and how soon it is started again: pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

from seedance.engine.request import Urgency

RESTART_MAX_S: Final = 30.0
RESTARTING: Final = "engine restarting"
CONTINUED: Final = "continued"
ON_CPU: Final = "continued on cpu"
REPLACED: Final = "continued with another model"
"""What clients are told: the streams wait, go on, go on slowly, and go on with what another model makes of them."""
STABLE_S: Final = 15.0
"""An engine that served for so long was no failed start: the next restart is at once again."""
SETTLE_S: Final = 3.0
"""So long an engine that has just become active has the machine to itself, before one is started to stand by."""
DEATHS: Final = 3
"""A generation that has seen so many engines die is not given to another one: it may be what they die of."""


class Waiting(Protocol):
    """A generation as far as the order of those that wait for an engine depends on it."""

    urgency: Urgency


W = TypeVar("W", bound=Waiting)


def in_order(waiting: Iterable[W]) -> list[W]:
    """Return generations as the next engine is to get them: by deadline, the others as they came."""

    def deadline_s(generation: W) -> float:
        deadline_s = generation.urgency.deadline_s
        return math.inf if deadline_s is None else deadline_s

    return sorted(waiting, key=deadline_s)


class Restarts:
    """How long to wait before the next start, and whether too many in a row have failed.

    The first restart is at once. From then on the wait doubles, from `first_s` to RESTART_MAX_S, until an engine has
    been up for STABLE_S.
    """

    def __init__(self, first_s: float, attempts: int) -> None:
        self._first_s = first_s
        self._attempts = attempts
        self._is_calm = True
        self.failures = 0
        self.wait_s = 0.0

    @property
    def exhausted(self) -> bool:
        """Whether as many starts in a row have failed as may."""
        return self.failures >= self._attempts

    def succeeded(self) -> None:
        """Take note that an engine is up."""
        self.failures = 0

    def failed(self) -> None:
        """Take note of a start that failed."""
        self.failures += 1
        self._is_calm = False
        self._wait_longer()

    def died(self, served_s: float) -> None:
        """Take note of an engine that died after it had been up for so long; failures count anew."""
        self.failures = 0
        if self._is_calm or served_s >= STABLE_S:
            self.wait_s = 0.0
        else:
            self._wait_longer()
        self._is_calm = False

    def _wait_longer(self) -> None:
        self.wait_s = min(max(self._first_s, 2 * self.wait_s), RESTART_MAX_S)
