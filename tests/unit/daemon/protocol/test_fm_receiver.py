"""The receiver: order, duplicates, gaps and what is asked for again, ACKs."""

from __future__ import annotations

import itertools

import pytest

from seedance.daemon.protocol.fm_messages import RING_FRAMES
from seedance.daemon.protocol.fm_receiver import (
    ACK_BYTES,
    ACK_DELAY_S,
    ACK_FRAMES,
    DUPLICATES,
    Placed,
    Receiver,
    unwrap,
)
from seedance.daemon.protocol.fm_timing import NEVER, RoundTrip


class Driven:
    """A receiver, its clock and a round trip of 80 ms; payloads are their sequences in so many bytes."""

    def __init__(self, expected_seq: int = 1, ring_bytes: int = 1 << 20) -> None:
        self.receiver = Receiver(expected_seq, ring_bytes)
        self.trip = RoundTrip()
        for _ in range(100):
            self.trip.measured(0.08)
        self.now = 10.0
        self.delivered: list[int] = []

    def place(self, *seqs: int, size: int = 10) -> Placed:
        placed = Placed.DROPPED
        for seq in seqs:
            data = b"?" + seq.to_bytes(size, "big") + b"?"
            placed = self.receiver.place(seq & 0xFFFFFFFF, data, 1, 1 + size, self.now, self.trip)
            if placed is Placed.IN_ORDER:
                self.delivered.append(seq)
                self.delivered += [int.from_bytes(each, "big") for each in self.receiver.take_ready(self.now)]
        return placed

    def missing_at(self, now: float) -> list[tuple[int, int]]:
        self.now = now
        return self.receiver.missing_ranges(now, self.trip)


def test_in_order_is_delivered_at_once() -> None:
    driven = Driven()
    driven.place(1, 2, 3)
    assert driven.delivered == [1, 2, 3]
    assert not driven.receiver.has_gap
    assert driven.receiver.nack_due_s == NEVER


def test_early_frames_wait_for_what_is_missing() -> None:
    driven = Driven()
    assert driven.place(3, 2, 5) is Placed.EARLY
    assert (driven.delivered, driven.receiver.early_frames, driven.receiver.early_bytes) == ([], 3, 30)
    driven.place(1)
    assert (driven.delivered, driven.receiver.early_frames, driven.receiver.early_bytes) == ([1, 2, 3], 1, 10)
    driven.place(4)
    assert driven.delivered == [1, 2, 3, 4, 5]
    assert (driven.receiver.has_gap, driven.receiver.nack_due_s) == (False, NEVER)


def test_duplicates_are_dropped_wherever_they_are() -> None:
    driven = Driven()
    driven.place(*range(1, DUPLICATES + 3))
    driven.place(DUPLICATES + 5)
    driven.receiver.ack_sent()
    for seq in (3, DUPLICATES + 2, DUPLICATES + 5):
        assert driven.place(seq) is Placed.DROPPED
        assert driven.receiver.ack_due_s == driven.now
    assert driven.place(2) is Placed.STRANGE
    assert driven.delivered == [*range(1, DUPLICATES + 3)]
    assert driven.receiver.early_frames == 1


def test_the_ring_is_full_at_its_size() -> None:
    driven = Driven()
    assert driven.place(*range(2, RING_FRAMES + 1)) is Placed.EARLY
    assert driven.place(RING_FRAMES + 1) is Placed.TOO_FAR
    driven.place(1)
    assert driven.delivered == [*range(1, RING_FRAMES + 1)]


def test_sequences_go_on_beyond_32_bits() -> None:
    first = 2**32 - 3
    driven = Driven(first)
    driven.place(first + 1, first + 4, first, first + 2, first + 3, first + 5)
    assert driven.delivered == [*range(first, first + 6)]
    assert driven.receiver.expected_seq == 2**32 + 3


@pytest.mark.parametrize("expected", [1, 2**31, 2**32 - 1, 2**32, 7 * 2**32 + 5])
@pytest.mark.parametrize("distance", [0, 1, -1, 1024, -1024, 2**31 - 1, -(2**31)])
def test_unwrap_is_nearest(expected: int, distance: int) -> None:
    assert unwrap((expected + distance) & 0xFFFFFFFF, expected) == expected + distance


def test_a_gap_is_asked_for_when_reordering_is_no_excuse_any_more() -> None:
    driven = Driven()
    driven.place(1, 4)
    assert driven.receiver.nack_due_s == 10.02  # a quarter of 80 ms
    assert driven.missing_at(10.019) == []
    assert driven.missing_at(10.02) == [(2, 3)]
    assert driven.receiver.nack_due_s == pytest.approx(10.1)  # a round trip later


def test_each_gap_has_its_own_age() -> None:
    driven = Driven()
    driven.place(3)
    driven.now = 10.015
    driven.place(6)
    assert driven.missing_at(10.02) == [(1, 2)]
    assert driven.receiver.nack_due_s == pytest.approx(10.035)
    assert driven.missing_at(10.036) == [(4, 5)]


def test_a_gap_is_as_old_as_the_first_frame_from_behind_it() -> None:
    driven = Driven()
    driven.place(6)
    driven.now = 10.015
    driven.place(3)
    assert driven.missing_at(10.02) == [(1, 2), (4, 5)]


def test_what_does_not_come_is_asked_for_less_and_less_often() -> None:
    driven = Driven()
    driven.place(2)
    asked: list[float] = []
    while len(asked) < 6:
        if driven.missing_at(driven.receiver.nack_due_s):
            asked.append(driven.now)
    waits = [round((later - earlier) / 0.08) for earlier, later in itertools.pairwise(asked)]
    assert waits == [1, 2, 4, 8, 16]
    driven.place(1)
    driven.place(4)
    assert driven.missing_at(driven.receiver.nack_due_s) == [(3, 3)]
    assert driven.receiver.nack_due_s == pytest.approx(driven.now + 0.08)  # it begins again


def test_an_early_frame_without_room_is_asked_for_later() -> None:
    driven = Driven(ring_bytes=100)
    assert driven.place(3, size=60) is Placed.EARLY
    assert driven.place(4, size=60) is Placed.DROPPED
    assert driven.receiver.early_bytes == 60
    assert driven.missing_at(10.02) == [(1, 2), (4, 4)]
    driven.place(1, 2)
    assert driven.delivered == [1, 2, 3]
    assert driven.receiver.has_gap
    driven.place(4, size=60)
    assert driven.delivered == [1, 2, 3, 4]
    assert (driven.receiver.has_gap, driven.receiver.nack_due_s) == (False, NEVER)


def test_a_frame_larger_than_the_ring_still_comes_in_its_turn() -> None:
    driven = Driven(ring_bytes=100)
    assert driven.place(2, size=1000) is Placed.DROPPED
    assert driven.missing_at(10.02) == [(1, 2)]
    driven.place(1)
    driven.place(2, size=1000)
    assert driven.delivered == [1, 2]


def test_acks_are_delayed_and_count() -> None:
    driven = Driven()
    assert driven.receiver.ack_due_s == NEVER
    driven.place(1)
    driven.now += 0.05
    driven.place(2)
    assert driven.receiver.ack_due_s == 10.0 + ACK_DELAY_S
    assert driven.receiver.ack_sent() == 2
    assert driven.receiver.ack_due_s == NEVER


def test_many_frames_or_bytes_are_acked_at_once() -> None:
    driven = Driven()
    driven.place(*range(1, ACK_FRAMES))
    assert driven.receiver.ack_due_s > driven.now
    driven.place(ACK_FRAMES)
    assert driven.receiver.ack_due_s == driven.now
    driven.receiver.ack_sent()
    driven.place(ACK_FRAMES + 1, size=ACK_BYTES)
    assert driven.receiver.ack_due_s == driven.now


def test_a_gap_that_closes_is_acked_at_once() -> None:
    driven = Driven()
    driven.place(2)
    assert driven.receiver.ack_due_s == NEVER  # nothing was delivered
    driven.place(1)
    assert driven.receiver.ack_due_s == driven.now


def test_a_lost_connection_takes_what_is_early() -> None:
    driven = Driven()
    driven.place(1, 3)
    driven.missing_at(10.02)
    driven.receiver.connection_lost()
    assert (driven.receiver.expected_seq, driven.receiver.early_frames, driven.receiver.early_bytes) == (2, 0, 0)
    assert (driven.receiver.nack_due_s, driven.receiver.ack_due_s, driven.receiver.has_gap) == (NEVER, NEVER, False)
    driven.place(2, 3)
    assert driven.delivered == [1, 2, 3]
