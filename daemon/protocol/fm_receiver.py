"""The receiving half of an FM session: each numbered frame once, and in order.

The wire has the low 32 bits of a sequence. The value nearest to what is expected is taken (serial-number arithmetic),
and its distance says everything else:

    distance        is
    0               in order: delivered, and with it what it was waited for
    1 … 127         early: waits in the ring; where something is missing before it for long, that is NACKed
    -1 … -1024      a duplicate: dropped, and what we have is ACKed at once, as the peer seems not to know
    all else        no frame that a right peer can have sent: the connection fails

The last line also catches a peer that begins to count again: dropping its frames would be silence for ever. The ring
is a dict, so that nothing is held while nothing is early. It has a bound in bytes; an early frame over it is dropped as
though the link had lost it, and asked for again once it is due.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final

from seedance.daemon.protocol.fm_frame import SEQ_MASK, Kind
from seedance.daemon.protocol.fm_messages import ACK_DELAY_MS, RING_FRAMES
from seedance.daemon.protocol.fm_timing import NEVER, RoundTrip

DUPLICATES: Final = 1024
ACK_DELAY_S: Final = ACK_DELAY_MS / 1000
ACK_FRAMES: Final = RING_FRAMES // 2
ACK_BYTES: Final = 64 << 10
DEFAULT_RING_BYTES: Final = 4 << 20

_HALF: Final = 1 << 31
_MAX_BACKOFF: Final = 64


class Placed(enum.Enum):
    """What became of a frame."""

    IN_ORDER = enum.auto()  # to be delivered now, and then all of `take_ready`
    EARLY = enum.auto()
    DROPPED = enum.auto()
    TOO_FAR = enum.auto()  # a flow-control error
    STRANGE = enum.auto()  # a protocol error


def unwrap(low: int, expected: int) -> int:
    """Return the sequence nearest to `expected` whose low 32 bits are `low`; it may be negative."""
    return expected + ((low - expected + _HALF) & SEQ_MASK) - _HALF


class Receiver:
    """Put frames in order. What is early is held as the payload's bytes, whatever it may be once decoded.

    `expected_seq` is the next that is to be delivered. `ack_due_s` and `nack_due_s` are when `ack_sent` and
    `missing_ranges` are to be called, NEVER for not at all. `tokens_ack_delay_s` is how long the ACK of
    TOKENS may wait.
    """

    __slots__ = (
        "_backoff",
        "_early",
        "_early_bytes",
        "_heard_at_s",
        "_heard_seq",
        "_nacked_at_s",
        "_ring_bytes",
        "_unacked_bytes",
        "_unacked_frames",
        "ack_due_s",
        "expected_seq",
        "nack_due_s",
        "tokens_ack_delay_s",
    )

    def __init__(self, expected_seq: int = 1, ring_bytes: int = DEFAULT_RING_BYTES) -> None:
        self.expected_seq = expected_seq
        self.ack_due_s = NEVER
        self.nack_due_s = NEVER
        self.tokens_ack_delay_s = ACK_DELAY_S
        # Early payloads by sequence, each with the time when it came.
        self._early: dict[int, tuple[bytes, float]] = {}
        self._early_bytes = 0
        self._ring_bytes = ring_bytes
        # The highest that came while something before it is missing, and when; it may have had no room in the ring.
        self._heard_seq = 0
        self._heard_at_s = NEVER
        self._nacked_at_s: dict[int, float] = {}
        self._backoff = 1
        self._unacked_frames = 0
        self._unacked_bytes = 0

    @property
    def has_gap(self) -> bool:
        """Tell whether frames came from behind one that was missing: after each delivery, `take_ready` goes on."""
        return self._heard_seq > 0

    @property
    def early_frames(self) -> int:
        """Return how many frames wait in the ring."""
        return len(self._early)

    @property
    def early_bytes(self) -> int:
        """Return the size of the payloads that wait in the ring."""
        return self._early_bytes

    def place(self, low: int, data: bytes, start: int, end: int, now: float, round_trip: RoundTrip) -> Placed:
        """Take a frame with these low 32 bits of a sequence, and say what becomes of it.

        Its payload is what `data` has from `start` to `end`.
        """
        expected, size = self.expected_seq, end - start
        if low == expected & SEQ_MASK:
            self.expected_seq = expected + 1
            self._delivered(data[start], size, now)
            return Placed.IN_ORDER
        seq = unwrap(low, expected)
        distance = seq - expected
        if distance >= RING_FRAMES:
            return Placed.TOO_FAR
        if distance < -DUPLICATES or seq < 1:
            return Placed.STRANGE
        if distance < 0 or seq in self._early:
            self.ack_due_s = now
            return Placed.DROPPED
        if not self._heard_seq:
            self.nack_due_s = now + round_trip.reordering_s
        if seq > self._heard_seq:
            self._heard_seq, self._heard_at_s = seq, now
        if self._early_bytes + size > self._ring_bytes:
            return Placed.DROPPED
        self._early[seq] = (data[start:end], now)
        self._early_bytes += size
        return Placed.EARLY

    def take_ready(self, now: float) -> Iterator[bytes]:
        """Yield the payloads that waited for the one that was just delivered."""
        early = self._early
        while early and (found := early.pop(self.expected_seq, None)) is not None:
            self.expected_seq += 1
            payload = found[0]
            self._early_bytes -= len(payload)
            self._delivered(payload[0], len(payload), now)
            self.ack_due_s = now  # a gap is closed: the peer need not keep it
            yield payload
        if self._nacked_at_s:
            self._backoff = 1
            for seq in [seq for seq in self._nacked_at_s if seq < self.expected_seq]:
                del self._nacked_at_s[seq]
        if self._heard_seq < self.expected_seq:
            self._heard_seq = 0
            self.nack_due_s = NEVER

    def missing_ranges(self, now: float, round_trip: RoundTrip) -> list[tuple[int, int]]:
        """Return the ranges to be asked for now, first and last of each, and set when to look again.

        A frame is missing when one behind it has come, for as long as that may be by reordering; asked for, it is
        awaited for a round trip, and for twice as long each time nothing comes of it.
        """
        ranges: list[tuple[int, int]] = []
        next_due_s = NEVER
        again = False
        for seq, since_s in self._missing():
            asked_s = self._nacked_at_s.get(seq)
            if asked_s is None:
                due_s = since_s + round_trip.reordering_s
            else:
                due_s = asked_s + round_trip.answer_s * self._backoff
            if due_s > now:
                next_due_s = min(next_due_s, due_s)
                continue
            again |= asked_s is not None
            self._nacked_at_s[seq] = now
            if ranges and ranges[-1][1] == seq - 1:
                ranges[-1] = (ranges[-1][0], seq)
            else:
                ranges.append((seq, seq))
        if again:
            self._backoff = min(self._backoff * 2, _MAX_BACKOFF)
        if ranges:
            next_due_s = min(next_due_s, now + round_trip.answer_s * self._backoff)
        self.nack_due_s = next_due_s
        return ranges

    def _missing(self) -> list[tuple[int, float]]:
        """Return what is missing, in order, each with the time since which that can be told."""
        found: list[tuple[int, float]] = []
        since_s = self._heard_at_s
        for seq in range(self._heard_seq, self.expected_seq - 1, -1):
            early = self._early.get(seq)
            if early is None:
                found.append((seq, since_s))
            else:
                since_s = min(since_s, early[1])
        return found[::-1]

    # What the peer is told.

    def _delivered(self, kind: int, size: int, now: float) -> None:
        self._unacked_frames += 1
        self._unacked_bytes += size
        if self._unacked_frames >= ACK_FRAMES or self._unacked_bytes >= ACK_BYTES:
            self.ack_due_s = now
        elif kind != Kind.TOKENS:
            self.ack_due_s = min(self.ack_due_s, now + ACK_DELAY_S)
        elif self.ack_due_s == NEVER:
            self.ack_due_s = now + self.tokens_ack_delay_s

    @property
    def owes_ack(self) -> bool:
        """Tell whether something was delivered that the peer does not know of."""
        return self.ack_due_s != NEVER

    def ack_sent(self) -> int:
        """Take note that an ACK is sent; return its sequence, the last that was delivered."""
        self._unacked_frames = self._unacked_bytes = 0
        self.ack_due_s = NEVER
        return self.expected_seq - 1

    def connection_lost(self) -> None:
        """Forget what is early: the peer begins again behind what was delivered."""
        self._early.clear()
        self._early_bytes = 0
        self._heard_seq = 0
        self._nacked_at_s.clear()
        self._backoff = 1
        self.nack_due_s = NEVER
        self.ack_sent()
