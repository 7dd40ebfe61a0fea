"""The round trip and the heartbeat."""

from __future__ import annotations

import pytest

from seedance.daemon.protocol.fm_timing import HEARTBEAT_S, MIN_TIMEOUT_S, Heartbeat, RoundTrip


def test_before_a_measurement() -> None:
    trip = RoundTrip()
    assert (trip.srtt_s, trip.reordering_s, trip.answer_s) == (None, MIN_TIMEOUT_S, 1.0)


def test_the_first_measurement_counts_whole() -> None:
    """RFC 6298 §2.2."""
    trip = RoundTrip()
    trip.measured(0.4)
    assert (trip.srtt_s, trip.reordering_s) == (0.4, 0.1)
    assert trip.answer_s == pytest.approx(0.4 + 4 * 0.2)


def test_later_ones_are_smoothed() -> None:
    """RFC 6298 §2.3: the variation first, with the old mean."""
    trip = RoundTrip()
    trip.measured(0.4)
    trip.measured(0.8)
    assert trip.srtt_s == pytest.approx(0.45)
    assert trip.answer_s == pytest.approx(0.45 + 4 * (0.2 * 3 / 4 + 0.4 / 4))


def test_a_steady_round_trip_is_waited_for_and_hardly_more() -> None:
    trip = RoundTrip()
    for _ in range(100):
        trip.measured(0.1)
    assert trip.answer_s == pytest.approx(0.1)


def test_no_timeout_is_shorter_than_20_ms() -> None:
    trip = RoundTrip()
    for sample_s in (0.0001, -1.0):
        trip.measured(sample_s)
    assert (trip.reordering_s, trip.answer_s) == (0.020, 0.020)


def test_a_peer_that_is_silent_for_three_pings_is_gone() -> None:
    heartbeat = Heartbeat(5.0)
    pings = []
    for count in range(3):
        assert heartbeat.due_s == 5.0 + count * HEARTBEAT_S
        pings.append(heartbeat.next_ping(heartbeat.due_s))
    assert len(set(pings)) == 3
    assert None not in pings
    assert heartbeat.next_ping(heartbeat.due_s) is None


def test_a_word_in_time_is_enough() -> None:
    heartbeat = Heartbeat(0.0)
    for count in range(12):
        assert heartbeat.next_ping(count * HEARTBEAT_S) is not None
        if count % 3 == 2:
            heartbeat.heard()


def test_who_has_spoken_lately_need_not_be_pinged() -> None:
    heartbeat, now = Heartbeat(0.0), 0.0
    for _ in range(10):
        assert heartbeat.put_off(now)
        assert heartbeat.put_off(now + HEARTBEAT_S / 2)
        assert heartbeat.due_s == now + HEARTBEAT_S
        now = heartbeat.due_s
        heartbeat.heard()
    assert heartbeat.put_off(now)
    assert heartbeat.put_off(now)
    assert not heartbeat.put_off(now), "nothing was heard since"
    assert heartbeat.next_ping(now) is not None
    assert heartbeat.next_ping(now + HEARTBEAT_S) is None


def test_only_the_last_ping_measures_and_once() -> None:
    heartbeat = Heartbeat(0.0)
    first = heartbeat.next_ping(0.0)
    last = heartbeat.extra_ping(1.0)
    assert first is not None
    assert heartbeat.pong_arrived(first, 1.5) is None
    assert heartbeat.pong_arrived(last, 1.5) == 0.5
    assert heartbeat.pong_arrived(last, 2.5) is None
    assert heartbeat.pong_arrived(b"\0" * 8, 3.0) is None
