"""When things of an FM connection are due: the round trip, and the heartbeat. Times are in seconds of any clock."""

from __future__ import annotations

import struct
from typing import Final

NEVER: Final = float("inf")

MIN_TIMEOUT_S: Final = 0.020
HEARTBEAT_S: Final = 15.0
MAX_MISSES: Final = 3

_FIRST_TIMEOUT_S: Final = 1.0  # RFC 6298 §2.1


class RoundTrip:
    """The smoothed round trip and what is waited for because of it (RFC 6298 §2)."""

    __slots__ = ("_variation_s", "srtt_s")

    def __init__(self) -> None:
        self.srtt_s: float | None = None
        self._variation_s = 0.0

    def measured(self, sample_s: float) -> None:
        """Take a measurement."""
        sample_s = max(sample_s, 0.0)
        if self.srtt_s is None:
            self.srtt_s, self._variation_s = sample_s, sample_s / 2
        else:
            self._variation_s += (abs(self.srtt_s - sample_s) - self._variation_s) / 4
            self.srtt_s += (sample_s - self.srtt_s) / 8

    @property
    def reordering_s(self) -> float:
        """Return how long a frame may be late before it is taken for lost (a quarter, as in RFC 8985 §6.2)."""
        return max(MIN_TIMEOUT_S, (self.srtt_s or 0.0) / 4)

    @property
    def answer_s(self) -> float:
        """Return how long an answer may take."""
        if self.srtt_s is None:
            return _FIRST_TIMEOUT_S
        return max(MIN_TIMEOUT_S, self.srtt_s + 4 * self._variation_s)


class Heartbeat:
    """Pings on a schedule, and what they measure; a peer that says nothing at all for MAX_MISSES of them is gone.

    The first ping is due at once: it measures the round trip.
    """

    __slots__ = ("_count", "_misses", "_sent_at_s", "due_s")

    def __init__(self, now: float) -> None:
        self.due_s = now
        self._count = 0
        self._misses = 0
        self._sent_at_s = NEVER

    def heard(self) -> None:
        """Take note that the peer said something."""
        self._misses = 0

    def put_off(self, now: float) -> bool:
        """Do without the ping that is due, if the peer has said something lately; look again in half the time."""
        if self._misses >= MAX_MISSES - 1:
            return False
        self._misses += 1
        self.due_s = now + HEARTBEAT_S / 2
        return True

    def next_ping(self, now: float) -> bytes | None:
        """Return what the ping that is due carries; None when the peer is gone."""
        if self._misses >= MAX_MISSES:
            return None
        self._misses += 1
        self.due_s = now + HEARTBEAT_S
        return self.extra_ping(now)

    def extra_ping(self, now: float) -> bytes:
        """Return what a ping beyond the schedule carries."""
        self._count += 1
        self._sent_at_s = now
        return struct.pack("!Q", self._count)

    def pong_arrived(self, opaque: bytes, now: float) -> float | None:
        """Return the round trip in seconds when this answers the last ping for the first time."""
        if self._sent_at_s == NEVER or opaque != struct.pack("!Q", self._count):
            return None
        sample_s, self._sent_at_s = now - self._sent_at_s, NEVER
        return sample_s
