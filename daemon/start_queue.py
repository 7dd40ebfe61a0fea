"""The queue of a tenant's requests for the engine, as its worker sees it: those whose first token has not come.

How long a refused client is told to stay away follows from how fast the queue drains: first tokens a second, of late.
"""

from __future__ import annotations

import math

from seedance.engine.channel import QueueBound
from seedance.engine.drain import DrainRate, wait_s
from seedance.qos.limiter import Refusal


class StartQueue:
    """Counts first tokens; `now` is in seconds of any monotonic clock.

    `bound` is what the engine host has told of the queue of all tenants.
    """

    def __init__(self) -> None:
        self._drain = DrainRate()
        self.bound = QueueBound(None, 0.0)

    def started(self, count: int, now: float) -> None:
        """Count streams whose first token has come."""
        self._drain.left(count, now)

    def refusal(self, waiting: int, limit: int | None, now: float, streams: int = 1) -> Refusal | None:
        """Say why a request of so many streams is not taken while `waiting` ones have had no token; None when it is."""
        if limit is not None and waiting > limit:
            stay_away_s = wait_s(waiting - limit, self._drain.per_s(now))
            text = (
                f"cannot take this request: {waiting} wait for the engine already, and limit 'requests.queue' is"
                f" {limit}; try again in {math.ceil(stay_away_s)} s"
            )
            return Refusal("requests.queue", "rate_limited", text, stay_away_s)
        if self.bound.limit and streams > self.bound.limit:
            text = (
                f"cannot take a request of {streams} answers: the engine's queue holds {self.bound.limit}, ask for that"
                " many at most"
            )
            return Refusal("engine.queue", "invalid_request", text)
        most = self.bound.most
        if most is not None and waiting + streams > most:
            per_s = self._drain.per_s(now) or self.bound.starts_per_s
            stay_away_s = wait_s(waiting + streams - most, per_s)
            text = (
                f"cannot take this request: the engine's queue is full, and {waiting} of yours are in it;"
                f" try again in {math.ceil(stay_away_s)} s"
            )
            return Refusal("engine.queue", "overloaded", text, stay_away_s)
        return None
