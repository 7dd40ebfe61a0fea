"""The queue of a tenant's requests for the engine, as its worker sees it: those whose first token has not come.

How long a refused client is told to stay away follows from how fast the queue drains: first tokens a second, of late.
"""

from __future__ import annotations

import math
from typing import Final

from seedance.qos.limiter import Refusal

_RATE_WINDOW_S: Final = 10.0
_LEAST_WAIT_S: Final = 0.1
_MOST_WAIT_S: Final = 60.0
_UNKNOWN_WAIT_S: Final = 1.0


class StartQueue:
    """Counts first tokens; `now` is in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._starts = 0.0
        self._at = 0.0

    def started(self, count: int, now: float) -> None:
        """Count streams whose first token has come."""
        self._starts = self._starts * self._fade(now) + count
        self._at = now

    def refusal(self, waiting: int, limit: int | None, now: float) -> Refusal | None:
        """Say why no request is taken while `waiting` ones have had no token; None when one is."""
        if limit is None or waiting <= limit:
            return None
        rate = self._starts * self._fade(now) / _RATE_WINDOW_S
        wait_s = (waiting - limit) / rate if rate > 0 else _UNKNOWN_WAIT_S
        wait_s = min(max(wait_s, _LEAST_WAIT_S), _MOST_WAIT_S)
        text = (
            f"cannot take this request: {waiting} wait for the engine already, and limit 'requests.queue' is {limit};"
            f" try again in {math.ceil(wait_s)} s"
        )
        return Refusal("requests.queue", "rate_limited", text, wait_s)

    def _fade(self, now: float) -> float:
        return math.exp((self._at - now) / _RATE_WINDOW_S)
