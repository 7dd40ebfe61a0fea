"""The bound on how many requests of all tenants may wait for their first token.

A full queue is no reason to refuse who has hardly anybody in it: one tenant alone could fill it and shut the others
out. So each of the tenants that wait, and one more that may come, may have an equal part of the places, and only who
has taken that is refused. Those who were there before keep their places, so there may be more than `limit` for a while,
but never more than twice as many.

Workers refuse before any work is done for a request, by what they were last told (`news`); the engine host refuses what
slips through meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from seedance.engine.channel import QueueBound
from seedance.engine.drain import DrainRate, wait_s

_TELL_EVERY_S: Final = 0.05
_TELL_AGAIN_S: Final = 1.0


class EngineQueue:
    """Requests by key and tenant; `limit` 0 is none. `now` is in seconds of any monotonic clock."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        self._drain = DrainRate()
        self._is_full = False
        self._told = QueueBound(None, 0.0, limit)
        self._told_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def may_join(self, tenant: str) -> bool:
        """Return whether there is a place for one more request of a tenant."""
        waiting = len(self._waiting)
        if not self._limit or waiting < self._limit:
            return True
        return waiting < 2 * self._limit and self._counts.get(tenant, 0) < self._part()

    def joined(self, key: int, tenant: str) -> None:
        """Take in a request that waits for its first token from now on."""
        if self._limit:
            self._waiting[key] = tenant
            self._counts[tenant] = self._counts.get(tenant, 0) + 1

    def started(self, keys: Iterable[int], now: float) -> None:
        """Note that something came out for these requests, whether they wait or not."""
        waiting = self._waiting
        first = [key for key in keys if key in waiting]
        if first:
            self.left(first)
            self._drain.left(len(first), now)

    def left(self, keys: Iterable[int]) -> None:
        """Forget requests that have ended; others are passed over."""
        for key in keys:
            tenant = self._waiting.pop(key, None)
            if tenant is not None:
                self._counts[tenant] -= 1
                if not self._counts[tenant]:
                    del self._counts[tenant]

    def wait_s(self, now: float) -> float:
        """Return how long who is refused now should stay away."""
        return wait_s(len(self._waiting) - self._limit + 1, self._drain.per_s(now))

    def news(self, now: float) -> QueueBound | None:
        """Return what the workers should be told, None while they know."""
        waiting = len(self._waiting)
        if not self._is_full and not (self._limit and waiting >= self._limit):
            return None
        # Full until an eighth is free again: not with every request that comes and goes.
        self._is_full = waiting >= max(1, self._limit - self._limit // 8)
        most = None
        if self._is_full:
            most = self._part() if waiting < 2 * self._limit else 0
        turned = (most is None) != (self._told.most is None)
        due_s = self._told_at + (_TELL_AGAIN_S if most == self._told.most else _TELL_EVERY_S)
        if not turned and now < due_s:
            return None
        self._told = QueueBound(most, self._drain.per_s(now), self._limit)
        self._told_at = now
        return self._told

    @property
    def told(self) -> QueueBound:
        """What the workers were told last."""
        return self._told

    def _part(self) -> int:
        return max(1, self._limit // (len(self._counts) + 1))
