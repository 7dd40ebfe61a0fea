"""A stream of an FM session: what its request has come to, and its own sink."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Final, Protocol

from seedance.daemon.doors import fm
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.doors.openai_response import Usage
from seedance.daemon.journal import Journal, fill
from seedance.daemon.journal_records import FirstToken, StreamRecord, token_list
from seedance.daemon.protocol.fm_messages import Note
from seedance.daemon.protocol.fm_sender import Backpressure
from seedance.daemon.protocol.fm_server import ServerSession
from seedance.daemon.protocol.fm_session import Options
from seedance.daemon.service import Answer, Service
from seedance.daemon.session_log import Kept
from seedance.daemon.stream import Sink
from seedance.engine.request import FinishReason, TokenLogprobs

_ID_BYTES: Final = 16


class Sessions(Protocol):
    """What a session needs of the tenant's sessions."""

    loop: asyncio.AbstractEventLoop
    service: Service
    options: Options
    journal: Journal

    @property
    def resume_for_ms(self) -> int:
        """How long a session waits for its client."""

    def touched(self, session: Any) -> None:
        """Have a session's frames sent at the next turn of the loop."""

    def flush(self) -> None:
        """Send the frames of all that were touched now."""

    def left(self, kept: Kept[Any]) -> None:
        """Take note that a session's client is away."""

    def remove(self, kept: Kept[Any]) -> None:
        """Keep a session no longer."""

    def stream_began(self, answer: FmAnswer) -> None:
        """Take note that there is a stream of this name."""

    def stream_ended(self, id: str) -> None:
        """Take note that a stream is over."""

    def cancel(self, id: str) -> bool:
        """End a stream of any session; tells whether there is one, or was."""


class Session(Protocol):
    """What a stream needs of its session."""

    number: int

    @property
    def protocol(self) -> ServerSession:
        """The protocol's part, whole."""

    def touch(self) -> None:
        """Have what there is to send sent soon."""

    def sent_in_columns(self, answer: FmAnswer, data: bytes) -> bool:
        """Send text of a stream that is `in_columns`; False where that cannot be, and nothing is done."""

    def tell(self, note: Note) -> None:
        """Send a note, if there is room for it."""

    def pressed(self, pressure: Backpressure) -> None:
        """Do what the protocol says of a client that takes too little."""

    def stream_ended(self, answer: FmAnswer, last: Backpressure) -> None:
        """Take note that a stream is over; `last` is what sending its last frame gave."""


class FmAnswer(Answer):
    """One stream of a session, and its own sink; `id` is its name for all of the tenant's clients.

    `infer` is the payload that asked for it, `text_bytes` how much of its text the session was given. `record` is what
    the journal of the last worker has of it, until there is an engine that goes on with it. `in_columns` says that its
    session is a row (`fm_columns`).
    """

    __slots__ = (
        "_first_s",
        "_session",
        "_sessions",
        "begun_s",
        "id",
        "in_columns",
        "infer",
        "number",
        "record",
        "text_bytes",
    )

    def __init__(self, sessions: Sessions, session: Session, number: int, record: StreamRecord | None = None) -> None:
        super().__init__()
        self._sessions = sessions
        self._session = session
        self.number = number
        self.in_columns = False
        self.record = record
        if record is None:
            self.begun_s, self._first_s = sessions.loop.time(), None
            self.id, self.infer, self.text_bytes = secrets.token_urlsafe(_ID_BYTES), b"", 0
            return
        self.begun_s, self._first_s = record.begun_s, record.first_s
        self.id, self.infer, self.text_bytes = record.id, record.infer, record.told_bytes
        self.prompt_tokens = len(token_list(record.prompt_token_ids))

    def saved(self, waiting_bytes: int) -> StreamRecord:
        """Return what the journal needs of it; so much of its text has no number yet."""
        if self.record is not None:
            return self.record
        record = StreamRecord(self.number, self.id, self.infer, self.begun_s, first_s=self._first_s)
        record.told_bytes = self.text_bytes - waiting_bytes
        for stream in self.streams:
            fill(record, stream, self.model)
        return record

    @property
    def has_begun(self) -> bool:
        """Return whether text has come, and there is an engine that goes on with it."""
        return self._first_s is not None and len(self.streams) == 1

    def over(self) -> None:
        """Take note that it is in the journal no longer."""
        self._sessions.journal.left(len(self.streams))

    def sink(self, index: int) -> Sink:
        return self

    def started(self) -> None:
        """See `service.Answer`; ACCEPT has told it already."""
        (stream,) = self.streams
        self._sessions.journal.submitted(self._session.number, self.number, stream, self.model)

    def failed(self, error: ApiError) -> None:
        self.stream_failed(error)

    def cancelled_by_client(self) -> None:
        """End with what there is."""
        self._sessions.service.cancel(self)
        self.stream_finished(FinishReason.ABORT)

    def text_arrived(self, text: str) -> None:
        if self._first_s is None:
            self._first_s = self._sessions.loop.time()
            self._sessions.journal.note(FirstToken(self._session.number, self.number, self._first_s))
        self.data_arrived(text.encode())

    def data_arrived(self, data: bytes) -> None:
        """Take more text."""
        session = self._session
        if self.in_columns and session.sent_in_columns(self, data):
            return
        self.text_bytes += len(data)
        pressure = session.protocol.send_tokens(self.number, data)
        session.touch()
        if pressure is Backpressure.REFUSED:
            self._sessions.service.cancel(self)
            self.stream_failed(ApiError("overloaded", "cannot go on: too much waits already for this client"))
        elif pressure:
            session.pressed(pressure)

    def logprobs_arrived(self, text: str, positions: Sequence[TokenLogprobs]) -> None:
        raise AssertionError("no request with log probabilities is taken")

    def note_arrived(self, note: str) -> None:
        self._session.tell(Note(stream=self.number, note=note))

    def stream_finished(self, reason: FinishReason) -> None:
        usage = Usage(
            self.prompt_tokens,
            sum(stream.output_tokens for stream in self.streams),
            sum(stream.cached_tokens for stream in self.streams),
        )
        retry_after_s = None
        if reason is FinishReason.QUOTA_EXCEEDED:
            retry_after_s = self._sessions.service.retry_after_s()
        end = fm.end(self.number, reason, usage, self._slo(), retry_after_s)
        self._session.stream_ended(self, self._session.protocol.end_stream(end))

    def stream_failed(self, error: ApiError) -> None:
        last = self._session.protocol.fail_stream(fm.error(error, self.number))
        self._session.stream_ended(self, last)

    def _slo(self) -> dict[str, float]:
        slo = {"total_ms": 1000 * (self._sessions.loop.time() - self.begun_s)}
        if self._first_s is not None:
            slo["first_token_ms"] = 1000 * (self._first_s - self.begun_s)
        return slo
