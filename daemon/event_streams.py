"""Server-sent events that outlive their connections: a kept stream as an answer writes it, and as a client reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from seedance.daemon.doors import last_event
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.kept_request import KeptRequest
from seedance.daemon.kept_stream import TOO_MUCH, KeptStream
from seedance.daemon.protocol import sse
from seedance.daemon.protocol.http import chunk
from seedance.daemon.ring.driver import Flow
from seedance.daemon.service import Answer


class Connection(Protocol):
    """What a reader needs of the connection that it is."""

    flow: Flow

    @property
    def chunked(self) -> bool:
        """Whether the streamed response goes in HTTP chunks."""

    def fail(self, error: ApiError) -> None:
        """Send an error response: the last call."""

    def start_stream(self, headers: Sequence[tuple[str, str]]) -> None:
        """Begin a streamed response with status 200."""

    def end_stream(self) -> None:
        """End the streamed response: the last call."""


class EventReader:
    """A connection that reads a stream's events; see `kept_stream.Reader`."""

    __slots__ = ("_connection", "_prefix", "stream")

    def __init__(self, connection: Connection, stream: KeptStream) -> None:
        self._connection = connection
        self._prefix = last_event.id_prefix(stream.kept.token)
        self.stream = stream

    def begin(self) -> None:
        names = (("X-Stream-Id", self.stream.id), ("X-Resume-Token", self.stream.kept.token))
        self._connection.start_stream((*sse.HEADERS, *names))

    def take(self, first_seq: int, records: Sequence[bytes]) -> int:
        prefix, connection = self._prefix, self._connection
        data = b"".join([b"%b%d\n%b" % (prefix, seq, record) for seq, record in enumerate(records, first_seq)])
        return connection.flow.send(chunk(data) if connection.chunked else data)

    def tell(self, note: str, retry_after_ms: int) -> None:
        data = sse.comment_line(note) + sse.retry_line(retry_after_ms)
        self._connection.flow.send(chunk(data) if self._connection.chunked else data)

    def all_taken(self) -> None:
        self._connection.end_stream()

    def taken_over(self) -> None:
        self._connection.flow.abort()

    def sent_away(self) -> None:
        self._connection.flow.close()

    def fail(self, error: ApiError) -> None:
        self._connection.fail(error)


class KeptEvents:
    """A kept stream as the output of an answer: each event that is written is a record."""

    __slots__ = ("_note", "_stream")

    def __init__(self, stream: KeptStream) -> None:
        self._stream = stream
        self._note = b""

    def made_by(self, answer: Answer, request: KeptRequest) -> None:
        """Learn whose output it is, and of what request: before anything else."""
        self._stream.accepted(answer, request)

    @property
    def refusal(self) -> ApiError | None:
        """Why no more text is taken; what ends the stream always is."""
        return TOO_MUCH if self._stream.is_full else None

    def fail(self, error: ApiError) -> None:
        """Answer with an error: the last call."""
        self._stream.fail(error)

    def start_stream(self, headers: Sequence[tuple[str, str]]) -> None:
        """Begin the response; its headers are the reader's business, as there may be several."""
        self._stream.submitted()
        self._stream.begin()

    def choice_ended(self, index: int) -> None:
        """Take note that a choice has ended, before its last event."""
        self._stream.choice_ended(index)

    def write(self, event: bytes) -> None:
        """Take an event."""
        self._stream.append(self._note + event)
        self._note = b""

    def note(self, note: str) -> None:
        """Tell something beside the text: as a comment within the next event, as it is to have no id of its own."""
        self._note = sse.comment_line(note)

    def end_stream(self) -> None:
        """End the response: the last call."""
        self._stream.finish()
