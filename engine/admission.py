"""When a step takes in new requests, and how many: the admission window.

A step that reads prompts is dearer than one that only decodes, by a fixed extra that all decoding streams wait for. To
gather arrivals for a while spreads that extra over several of them; but those that are gathered wait. With arrivals at
rate r, an extra of h and d decoding streams, gathering for w costs d x h / w stream seconds a second for the extra
and r x w / 2 for the wait: least at w = sqrt(2 x d x h / r). So the window is shut when nobody decodes, when prompts
are read in this step anyway, and when h is nothing; and a backlog as large as one step may take ends it.

The static window, for comparison, waits for a fixed number of requests or a fixed time.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

MAX_TAKE: Final = 32
"""More at once would only have the first of them wait for the reading of the last."""
_RATE_WINDOW_S: Final = 1.0
# The n-th arrival after a wait may be due at exactly the time a timer was set to.
_ROUNDING_S: Final = 1e-6


class WindowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How arrivals are gathered: adaptively, or by `static_batch` requests or `static_wait_s`, whichever comes first.

    `max_wait_s` bounds the adaptive window; `max_take` is the most that one step admits, 1 to 64.
    """

    max_wait_s: float = 0.02
    max_take: int = MAX_TAKE
    static_batch: int | None = None
    static_wait_s: float = 0.1


class AdmissionWindow:
    """Gathers arrivals; `now_s` is in seconds of any monotonic clock."""

    def __init__(self, settings: WindowSettings, now_s: float) -> None:
        self._settings = settings
        self._since_s: float | None = None
        self._arrivals = 0.0
        self._at_s = now_s

    def request_arrived(self, now_s: float) -> None:
        """Count an arrival; the first one after all were taken begins to wait."""
        self._arrivals = self._arrivals * self._fade(now_s) + 1
        self._at_s = now_s
        if self._since_s is None:
            self._since_s = now_s

    def requests_taken(self, left: int, now_s: float) -> None:
        """Note that a step took some in; those who are left begin to wait anew."""
        self._since_s = now_s if left else None

    def rate_per_s(self, now_s: float) -> float:
        """Return the arrivals a second of late."""
        return self._arrivals * self._fade(now_s) / _RATE_WINDOW_S

    def opens_s(self, waiting: int, decoders: int, mixed_s: float, *, is_reading: bool, now_s: float) -> float:
        """Return when a step may take in requests; `now_s` or earlier means at once, infinity never.

        `waiting` requests could be admitted, `decoders` would wait for an extra of `mixed_s`, and `is_reading` says
        that prompts are read in the coming step anyway.
        """
        if not waiting:
            return math.inf
        settings = self._settings
        # Those of a tenant that was held may wait though all were taken that could be.
        since_s = self._since_s = now_s if self._since_s is None else self._since_s
        if settings.static_batch is not None:
            return since_s if waiting >= settings.static_batch else since_s + settings.static_wait_s - _ROUNDING_S
        if not decoders or is_reading or waiting >= settings.max_take:
            return since_s
        rate = max(self.rate_per_s(now_s), 1 / _RATE_WINDOW_S)
        return since_s + min(settings.max_wait_s, math.sqrt(2 * decoders * mixed_s / rate)) - _ROUNDING_S

    def most(self) -> int:
        """Return how many requests a step may take in once the window is open."""
        return self._settings.static_batch or self._settings.max_take

    def _fade(self, now_s: float) -> float:
        return math.exp(min(0.0, self._at_s - now_s) / _RATE_WINDOW_S)
