"""Many live streams read by one thread, with the times between their events, and the health beside them."""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable, Sequence

from support.raw_http import Connection, request


class LiveStreams:
    """Streams that are read as they come; owns the connections, whose heads have not been read."""

    def __init__(self, connections: Sequence[Connection], health: Connection | None = None) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections = list(connections)
        self._health = health
        for connection in self._connections:
            connection.head()
            connection.sock.setblocking(False)
            self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def watch(self, until: Callable[[float], bool], every_s: float = 0.02) -> tuple[list[float], list[float]]:
        """Read until `until(seconds so far)`, which is asked every so often, as is the service's health.

        Returns the times between the reads of each stream, and the times that the answers about the health took.
        """
        gaps: list[float] = []
        healths: list[float] = []
        last: dict[Connection, float] = {}
        begun = time.perf_counter()
        asked_at = 0.0
        while True:
            now = time.perf_counter()
            if now - asked_at >= every_s:
                if until(now - begun):
                    return gaps, healths
                asked_at = now
                healths += self._health_s()
            for key, _ in self._selector.select(every_s):
                now = time.perf_counter()
                assert key.data.sock.recv(65536), "a stream ended"
                if key.data in last:
                    gaps.append(now - last[key.data])
                last[key.data] = now

    def _health_s(self) -> list[float]:
        if self._health is None:
            return []
        begun = time.perf_counter()
        self._health.send(request("GET", "/healthz"))
        assert self._health.response().status == 200
        return [time.perf_counter() - begun]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._selector.close()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
