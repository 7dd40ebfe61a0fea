"""Whatever happens to its connections, a reader of a kept stream gets each record once and in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.kept_parts import FakeReader, FakeStreams

from seedance.daemon.doors.errors import ApiError
from seedance.daemon.history import RECORD_COST_BYTES
from seedance.daemon.kept_stream import KeptStream

STREAM_BYTES = 16 * (20 + RECORD_COST_BYTES)

OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 20)),
    st.tuples(st.just("connect"), st.integers(0, 400)),
    st.tuples(st.just("drain"), st.integers(0, 400)),
    st.tuples(st.just("lose"), st.integers(0, 3)),
)


class Client:
    """A client that keeps what it has read, and loses with a connection the last that was sent on it."""

    def __init__(self, stream: KeptStream) -> None:
        self.stream = stream
        self.read: list[bytes] = []
        self.reader: FakeReader | None = None
        self.is_gone = False

    def connect(self, room_bytes: int) -> None:
        self.take()
        reader = FakeReader(room_bytes)
        try:
            self.stream.connect(reader, len(self.read))
        except ApiError as error:
            assert error.code == "gone"
            assert error.oldest_seq == self.stream.oldest_seq > len(self.read) + 1
            self.is_gone = True
        else:
            self.reader = reader

    def take(self) -> None:
        """Read all that was sent."""
        reader = self.reader
        if reader is not None:
            taken, reader.taken = reader.taken, []
            assert [seq for seq, _ in taken] == list(range(len(self.read) + 1, len(self.read) + len(taken) + 1))
            self.read += [record for _, record in taken]

    def lose(self, records: int) -> None:
        if self.reader is not None:
            del self.reader.taken[len(self.reader.taken) - min(records, len(self.reader.taken)) :]
            self.take()
            reader, self.reader = self.reader, None
            self.stream.disconnected(reader)


@given(st.lists(OPERATIONS, max_size=60))
def test_each_record_once_and_in_order(operations: list[tuple[str, int]]) -> None:
    streams = FakeStreams(STREAM_BYTES)
    stream = streams.stream()
    stream.begin()
    client, records = Client(stream), list[bytes]()
    for what, value in operations:
        if what == "append" and not stream.is_full:
            records.append(b"%d" % len(records) + b"x" * value)
            stream.append(records[-1])
        elif what == "connect":
            client.connect(value)
        elif what == "drain" and client.reader is not None:
            client.reader.room_bytes = value
            stream.drained()
        elif what == "lose":
            client.lose(value)
        # One record may be on the way when there is no more room, and the newest is always kept.
        assert stream.history.held_bytes <= STREAM_BYTES + 2 * (24 + RECORD_COST_BYTES)
        if client.is_gone:
            return
    stream.append(b"last")
    stream.finish()
    client.connect(1_000_000)
    client.take()
    if not client.is_gone:
        assert client.read == [*records, b"last"]
        assert client.reader is not None
        assert client.reader.said == ["begin", "all_taken"]
