"""Rounds over many connections, a few at a time, so that nobody's tokens wait until all of them have been looked at."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Generic, TypeVar

SHORTEST_TURN_S: Final = 0.005
_ROUNDING_S: Final = 1e-6

M = TypeVar("M")


class Rounds(Generic[M]):
    """Says who is visited when, so that each member is once in `period_s`, evenly spread; `now` is any clock's.

    `at_once` are visited in one turn, or more where turns would come too soon after each other. Who comes in the middle
    of a round is visited in the next one. `members` stays its owner's, and changes as it likes.
    """

    __slots__ = ("_at_once", "_begun_s", "_left", "_members", "_period_s", "_total")

    def __init__(self, members: Collection[M], period_s: float, at_once: int, now: float) -> None:
        self._members = members
        self._period_s = period_s
        self._at_once = at_once
        self._begun_s = now
        self._left: list[M] = []
        self._total = 0

    def due(self, now: float) -> list[M]:
        """Return whom to visit now; who has left meanwhile is not among them."""
        part = (now - self._begun_s) / self._period_s
        if part >= 1.0:
            due = self._take(0)
            self._left = [*self._members]
            self._left.reverse()
            self._total, self._begun_s = len(self._left), now
            return due
        return self._take(self._total - int(self._total * part))

    def next_s(self, now: float) -> float:
        """Return in how many seconds the next turn is due."""
        end_s = max(self._begun_s + self._period_s - now, _ROUNDING_S)
        return min(max(self._period_s * self._at_once / self._total, SHORTEST_TURN_S), end_s) if self._left else end_s

    def _take(self, left: int) -> list[M]:
        due, self._left[left:] = self._left[left:], []
        due.reverse()
        return [member for member in due if member in self._members]
