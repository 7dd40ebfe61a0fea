"""One kept stream: its records to whoever reads it, and what it does while nobody takes them."""

from __future__ import annotations

import pytest
from support.kept_parts import FakeReader, FakeStreams

from seedance.daemon.doors.errors import ApiError
from seedance.daemon.history import RECORD_COST_BYTES
from seedance.daemon.kept_request import RequestKey


def test_who_keeps_up_gets_each_record_at_once() -> None:
    streams, reader = FakeStreams(), FakeReader()
    stream = streams.stream()
    stream.connect(reader, 0)
    assert reader.said == []
    stream.begin()
    for record in (b"a", b"b"):
        stream.append(record)
    assert reader.taken == [(1, b"a"), (2, b"b")]
    stream.append(b"c")
    stream.finish()
    assert (reader.taken[-1], reader.said) == ((3, b"c"), ["begin", "all_taken"])
    assert streams.said == ["connected", "ended", "left"]


def test_who_comes_back_gets_what_it_has_not_had_then_what_comes() -> None:
    streams, first, second = FakeStreams(), FakeReader(), FakeReader()
    stream = streams.stream()
    stream.connect(first, 0)
    stream.begin()
    stream.append(b"a")
    stream.append(b"b")
    stream.disconnected(first)
    stream.append(b"c")
    assert len(first.taken) == 2
    stream.connect(second, 1)  # the second one was lost on the way
    stream.append(b"d")
    assert second.taken == [(2, b"b"), (3, b"c"), (4, b"d")]
    assert (second.said, second.pieces) == (["begin"], [2, 1])


def test_a_reader_is_told_beside_the_stream_and_nobody_else_is() -> None:
    streams, early, first, second = FakeStreams(), FakeReader(), FakeReader(), FakeReader()
    stream = streams.stream()
    stream.tell("draining", 1)
    stream.connect(early, 0)
    stream.tell("draining", 2)  # to nobody: its answer has no beginning yet
    stream.begin()
    stream.connect(first, 0)
    stream.tell("draining", 3)
    stream.append(b"a")
    stream.connect(second, 0)
    assert (early.said, first.said) == (["begin", "taken_over"], ["begin", "draining 3", "taken_over"])
    assert (second.said, second.taken) == (["begin"], [(1, b"a")])


def test_a_stream_that_ended_meanwhile_ends_for_whoever_comes() -> None:
    streams = FakeStreams()
    stream = streams.stream()
    stream.begin()
    stream.append(b"a")
    stream.finish()
    for last_seq, expected in ((0, [(1, b"a")]), (1, [])):
        reader = FakeReader()
        stream.connect(reader, last_seq)
        assert (reader.taken, reader.said) == (expected, ["begin", "all_taken"])
    assert (stream.is_over, stream.is_sent) == (True, True)


def test_a_newer_reader_takes_the_older_ones_place() -> None:
    streams, older, newer = FakeStreams(), FakeReader(), FakeReader()
    stream = streams.stream()
    stream.begin()
    stream.connect(older, 0)
    stream.append(b"a")
    stream.connect(newer, 0)
    stream.disconnected(older)  # it learns of it late
    stream.append(b"b")
    assert (older.said, older.taken) == (["begin", "taken_over"], [(1, b"a")])
    assert newer.taken == [(1, b"a"), (2, b"b")]
    assert "left" not in streams.said


@pytest.mark.parametrize(
    ("last_seq", "code", "oldest_seq"), [(0, "gone", 3), (1, "gone", 3), (6, "invalid_request", None)]
)
def test_going_on_where_nothing_is(last_seq: int, code: str, oldest_seq: int | None) -> None:
    streams = FakeStreams(3 * (10 + RECORD_COST_BYTES))
    stream, reader = streams.stream(), FakeReader()
    stream.connect(reader, 0)
    for _ in range(5):
        stream.append(b"x" * 10)
    with pytest.raises(ApiError) as caught:
        stream.connect(FakeReader(), last_seq)
    assert (caught.value.code, caught.value.oldest_seq) == (code, oldest_seq)
    stream.append(b"y")
    assert reader.taken[-1] == (6, b"y")  # nothing has changed for it


def test_what_waits_for_a_client_is_never_dropped_and_pauses_the_stream() -> None:
    cost = 100 + RECORD_COST_BYTES
    streams = FakeStreams(16 * cost)
    stream, reader = streams.stream(), FakeReader(room_bytes=150)
    stream.begin()
    stream.connect(reader, 0)
    for _ in range(2):
        stream.append(b"x" * 100)  # the second one waits in the flow
    for _ in range(4):
        stream.append(b"x" * 100)
    assert "pause" not in streams.said
    stream.append(b"x" * 100)
    assert streams.said[-1] == "pause"
    for _ in range(12):  # what was under way in the engine
        assert not stream.is_full
        stream.append(b"x" * 100)
    assert stream.is_full
    reader.room_bytes = 100_000
    stream.drained()
    assert [seq for seq, _ in reader.taken] == list(range(1, 20))
    assert streams.said[-1] == "go on"
    assert stream.held_bytes - streams.stream().held_bytes <= 18 * cost


def test_a_stream_pauses_and_waits_for_who_is_away() -> None:
    streams = FakeStreams(4000)
    stream, reader = streams.stream(), FakeReader(room_bytes=300)
    stream.begin()
    for _ in range(20):
        stream.append(b"x" * 100)
    assert streams.said == ["pause"]
    stream.connect(reader, 0)
    assert len(reader.taken) == 20  # one piece
    assert streams.said[-1] == "go on"
    stream.disconnected(reader)
    stream.drained()  # late news of a flow that is gone
    assert streams.said[-1] == "left"


def test_much_goes_in_pieces() -> None:
    streams = FakeStreams(1 << 20)
    stream, reader = streams.stream(), FakeReader(room_bytes=30_000)
    for _ in range(100):
        stream.append(b"x" * 1000)
    stream.connect(reader, 0)
    assert reader.pieces == [17, 17]
    reader.room_bytes = 1000_000
    stream.drained()
    assert [seq for seq, _ in reader.taken] == list(range(1, 101))


def test_a_request_that_is_not_served_leaves_nothing() -> None:
    streams, reader = FakeStreams(), FakeReader()
    stream = streams.stream()
    stream.connect(reader, 0)
    stream.fail(ApiError("context_too_long", "cannot"))
    assert (reader.said, streams.said[1:]) == (["context_too_long"], ["ended", "forget"])


@pytest.mark.parametrize(
    ("is_begun", "has_key", "expected"),
    [(False, False, "abandon"), (False, True, "left"), (True, False, "left"), (True, True, "left")],
)
def test_nobody_comes_back_with_nothing(is_begun: bool, has_key: bool, expected: str) -> None:
    streams, reader = FakeStreams(), FakeReader()
    stream = streams.stream()
    stream.request_key = RequestKey.of("k", b"") if has_key else None
    stream.connect(reader, 0)
    if is_begun:
        stream.begin()
    stream.disconnected(reader)
    assert streams.said[-1] == expected


def test_cancelling_ends_it_once() -> None:
    streams, reader = FakeStreams(), FakeReader()
    stream = streams.stream()
    stream.connect(reader, 0)
    for _ in range(2):
        stream.cancelled_by_client()
    assert reader.taken == [(1, b"abort")]
    assert stream.id == "name"


def test_what_it_needs_goes_to_the_next_worker() -> None:
    """What was not sent is not let go of there, and pauses the stream as it did here."""
    streams = FakeStreams(4000)
    stream, reader = streams.stream(), FakeReader(room_bytes=150)
    stream.begin()
    stream.connect(reader, 0)
    for _ in range(12):
        stream.append(b"x" * 100)
    assert (len(reader.taken), streams.said[-1]) == (2, "pause")
    streams = FakeStreams(4000)
    again = streams.stream()
    again.restore(stream._record())
    assert (again.is_begun, again.is_over, again.held_bytes) == (True, False, stream.held_bytes)
    for _ in range(40):
        again.append(b"y" * 100)
    assert again.oldest_seq <= 3
    assert (again.is_full, streams.said) == (True, ["pause"])
    newest = FakeReader()
    again.connect(newest, 2)
    assert [record[:1] for _, record in newest.taken] == [b"x"] * 10 + [b"y"] * 40


def test_the_service_goes_away() -> None:
    streams, reader = FakeStreams(), FakeReader()
    stream = streams.stream()
    stream.begin()
    stream.connect(reader, 0)
    for _ in range(2):
        stream.park()
    assert (reader.said, streams.said[-1]) == (["begin", "sent_away"], "left")
