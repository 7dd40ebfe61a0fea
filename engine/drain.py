"""How fast a queue drains, and how long whoever is refused by it should stay away."""

from __future__ import annotations

import math
from typing import Final

_WINDOW_S: Final = 10.0
_LEAST_WAIT_S: Final = 0.1
_MOST_WAIT_S: Final = 60.0
_UNKNOWN_WAIT_S: Final = 1.0


class DrainRate:
    """Who left a queue by its front, of late; `now` is in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._left = 0.0
        self._at = 0.0

    def left(self, count: int, now: float) -> None:
        """Count those who have left."""
        self._left = self._left * self._fade(now) + count
        self._at = now

    def per_s(self, now: float) -> float:
        """Return how many leave in a second."""
        return self._left * self._fade(now) / _WINDOW_S

    def _fade(self, now: float) -> float:
        return math.exp((self._at - now) / _WINDOW_S)


def wait_s(places: int, per_s: float) -> float:
    """Return how long it takes until so many places are free: never nothing, never for ever."""
    seconds = places / per_s if per_s > 0 else _UNKNOWN_WAIT_S
    return min(max(seconds, _LEAST_WAIT_S), _MOST_WAIT_S)
