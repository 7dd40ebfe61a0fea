"""An FM session in a worker, and its streams: both live on without a connection.

What a step of the engine brings for a session leaves as one WebSocket message, at the loop's next turn.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from typing import Final, Protocol

from seedance.daemon import fm_rows
from seedance.daemon.doors import fm
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.fm_answer import FmAnswer, Sessions
from seedance.daemon.fm_rows import FmRows
from seedance.daemon.journal import saved
from seedance.daemon.journal_records import SessionEnded, SessionRecord, StreamBegun, StreamRecord
from seedance.daemon.protocol.fm_messages import (
    Ack,
    Cancel,
    Hello,
    Infer,
    Note,
    Part,
    encode_payload,
    parse_ack,
)
from seedance.daemon.protocol.fm_sender import Backpressure
from seedance.daemon.protocol.fm_server import ServerSession
from seedance.daemon.protocol.fm_session import Drained, Event, Failed
from seedance.daemon.protocol.fm_states import State
from seedance.daemon.protocol.fm_timing import NEVER
from seedance.daemon.protocol.frame import CloseCode
from seedance.daemon.session_log import Kept

_log = logging.getLogger(__name__)

SESSION_COST_BYTES: Final = 4 << 10
"""What a session or a stream costs beside what is held for its client, roughly: it bounds how many there are."""


class Connection(Protocol):
    """What a session needs of the connection that it is on."""

    @property
    def fd(self) -> int:
        """The descriptor, or -1."""

    def send_message(self, message: bytes) -> None:
        """Send a binary message."""

    def end(self, close_code: int) -> None:
        """Close, for the session has no more use for it; `disconnected` was called."""

    def fell_behind(self, waiting_bytes: int) -> None:
        """So much of what was sent past `send_message` waits, because the client reads slowly."""

    def all_sent(self) -> None:
        """What there was to send has been sent."""


class FmSession:
    """One session and its streams; `kept` is its entry in the log of sessions."""

    __slots__ = (
        "_answers",
        "_client_id",
        "_connection",
        "_is_known",
        "_is_touched",
        "_protocol",
        "_rows",
        "_rows_fd",
        "_sessions",
        "_timer",
        "kept",
        "number",
    )

    kept: Kept[FmSession]

    def __init__(
        self,
        sessions: Sessions,
        number: int,
        client_id: str,
        name: str,
        token: str,
        record: SessionRecord | None = None,
    ) -> None:
        """`number` is its own in the journal, and `record` what that has of it; `restore` is to follow then."""
        next_seq, expected_seq = (1, 1) if record is None else (record.acked_seq + 1, record.expected_seq)
        self._protocol = ServerSession(
            name,
            token,
            sessions.resume_for_ms,
            next_seq=next_seq,
            expected_seq=expected_seq,
            options=sessions.options,
        )
        self.number = number
        self._client_id = client_id
        self._is_known = False  # to the journal
        self._sessions = sessions
        self._answers: dict[int, FmAnswer] = {}
        self._connection: Connection | None = None
        self._rows: FmRows | None = None
        self._rows_fd = -1  # of the last ones
        self._is_touched = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def protocol(self) -> ServerSession:
        """Return the protocol's part, whole: a session that has rows has none any more."""
        if self._rows is not None:
            self.take_back()
        return self._protocol

    @property
    def held_bytes(self) -> int:
        """See `session_log.Resumable`."""
        parts_bytes = sum(answer.parts.size_bytes for answer in self._answers.values() if answer.parts is not None)
        return SESSION_COST_BYTES * (1 + len(self._answers)) + parts_bytes + self.protocol.held_bytes

    @property
    def oldest_seq(self) -> int:
        """See `session_log.Resumable`."""
        return self.protocol.oldest_seq

    @property
    def is_busy(self) -> bool:
        """Whether its client has anything still to come."""
        return bool(self._answers) or self.protocol.held_bytes > 0

    # -- the journal --------------------------------------------------------------------------------------------------

    def saved(self) -> bytes:
        """Return all that the journal needs of it; nothing before its first HELLO."""
        if not self._is_known:
            return b""
        had_rows = self._rows is not None
        unsaved, waiting, waiting_bytes = self.protocol.all_saved()
        record = self._record()
        record.streams = [answer.saved(waiting_bytes.get(answer.number, 0)) for answer in self._answers.values()]
        if had_rows and self._connection is not None:
            self._enter_columns(self._connection)
        return saved(record, unsaved, waiting)

    def restore(self, record: SessionRecord) -> None:
        """Be what the journal has; streams go on when there is an engine."""
        self._is_known = True
        self.protocol.restore(
            record.encoding,
            record.payload_bytes,
            record.last_stream,
            record.frames,
            record.waiting,
            [stream.number for stream in record.streams],
        )
        for stream in record.streams:
            answer = FmAnswer(self._sessions, self, stream.number, stream)
            self._answers[stream.number] = answer
            self._sessions.stream_began(answer)
            self._sessions.service.expect(functools.partial(answer.resume, stream))

    def _record(self) -> SessionRecord:
        protocol = self.protocol
        return SessionRecord(
            self.number, protocol.session_id, self._client_id, protocol.encoding, protocol.payload_bytes
        )

    def _save(self) -> None:
        unsaved = self.protocol.take_unsaved()
        if unsaved is not None:
            self._sessions.journal.changes(self.number, unsaved)

    # -- the connection -----------------------------------------------------------------------------------------------

    def connect(self, connection: Connection, hello: Hello) -> None:
        """Go on with a connection, on which this HELLO came; an older one is closed."""
        if (older := self._connection) is not None:
            self._drop_connection()
            older.end(CloseCode.ABNORMAL)
        self._connection = connection
        self.protocol.resume_for_ms = self._sessions.resume_for_ms
        self.protocol.connect(hello, self._sessions.loop.time())
        if not self._is_known and self.protocol.state is State.CONNECTED and self._sessions.journal.is_kept:
            self._is_known = True
            self.protocol.save_from_now()
            self._sessions.journal.note(self._record())
        self._act()
        self.flush()

    def message_received(self, message: bytes) -> None:
        """Take a binary message of the client."""
        ack = parse_ack(message)
        if ack is not None and self._acked(ack):
            return
        self.protocol.receive_data(message, self._sessions.loop.time())
        self._act()
        self.touch()

    def disconnected(self, connection: Connection) -> None:
        """Take note that the connection is of no use any more: the session waits for its client."""
        if self._connection is connection:
            self._drop_connection()
            self.protocol.receive_eof()
            self._sessions.left(self.kept)

    def _drop_connection(self) -> None:
        self.take_back()
        self._connection = None
        self._sessions.service.engine.fm_columns.drop(self._rows_fd)

    def touch(self) -> None:
        """Have what there is to send sent soon."""
        if self._rows is not None:
            self.take_back()  # what comes after that is to stay behind it
        if not self._is_touched and (self._connection is not None or self._protocol.has_unsaved()):
            self._is_touched = True
            self._sessions.touched(self)

    def flush(self) -> None:
        """Send what there is to send."""
        if not self._is_touched:
            self._is_touched = True
            self._sessions.touched(self)
        self._sessions.flush()

    def prepare(self) -> list[bytes]:
        """Return what there is to send, once the journal is committed: `send` is to follow then."""
        self._is_touched = False
        self._save()
        if self._connection is None:
            return []
        messages = self.protocol.data_to_send(self._sessions.loop.time())
        self._save()
        return messages

    def send(self, messages: Sequence[bytes]) -> None:
        """Send what `prepare` returned."""
        connection = self._connection
        if connection is None:
            return
        for message in messages:
            connection.send_message(message)
        if self._connection is not connection:
            return  # it was so slow that it was given up
        if (close_code := self.protocol.close_code) is not None:
            self.disconnected(connection)
            connection.end(close_code)
        else:
            self._await_timer()
            connection.all_sent()
            self._enter_columns(connection)

    def _await_timer(self) -> None:
        due_s, timer = self._protocol.next_timer(), self._timer
        if timer is not None:
            if timer.when() <= due_s:
                return
            timer.cancel()
        self._timer = None if due_s == NEVER else self._sessions.loop.call_at(due_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        if self._rows is not None and self._rows.has_sent() and self._protocol.put_off_ping(self._sessions.loop.time()):
            self._await_timer()
            return
        self.protocol.timer_fired(self._sessions.loop.time())
        self._act()
        self.flush()

    # -- columns ------------------------------------------------------------------------------------------------------

    def _enter_columns(self, connection: Connection) -> None:
        """Become rows, if nothing is to be sent before."""
        if not self._answers or self._is_touched or self._connection is not connection:
            return
        engine, answers, fd = self._sessions.service.engine, list(self._answers.values()), connection.fd
        self._rows = fm_rows.enter(engine, self._protocol, self.number, fd, answers, self)
        self._rows_fd = fd

    def take_back(self) -> None:
        """See `fm_columns.Owner`; idempotent."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.leave()

    def sent_in_columns(self, answer: FmAnswer, data: bytes) -> bool:
        """See `fm_answer.Session`."""
        return self._rows is not None and self._rows.send_text(answer, data)

    def fell_behind(self, waiting_bytes: int) -> None:
        """See `fm_columns.Owner`."""
        if self._connection is not None:
            self._connection.fell_behind(waiting_bytes)

    def _acked(self, ack: Ack) -> bool:
        """Take an ACK after which there is nothing to do; False where the protocol has to look at it."""
        if self._rows is not None:
            return self._rows.acked(ack)
        is_taken = self._protocol.acked_quietly(ack.seq, ack.credit)
        if is_taken and self._connection is not None:
            self._connection.all_sent()
        return is_taken

    # -- streams ------------------------------------------------------------------------------------------------------

    def tell(self, note: Note) -> None:
        """Send a note, if there is room for it."""
        self.pressed(self.protocol.note(note))
        self.touch()

    def pressed(self, pressure: Backpressure) -> None:
        """Do what the protocol says of a client that takes too little; its connection is given up if it must be."""
        if pressure is Backpressure.NONE:
            return
        self._set_paused(True)
        connection = self._connection
        if pressure is not Backpressure.PAUSE and connection is not None:
            _log.info("a client of an FM session reads too slowly; the session waits for it to come back")
            self.disconnected(connection)
            connection.end(CloseCode.ABNORMAL)

    def stream_ended(self, answer: FmAnswer, last: Backpressure) -> None:
        """Take note that a stream is over; `last` is what sending its last frame gave."""
        del self._answers[answer.number]
        answer.over()
        self._sessions.stream_ended(answer.id)
        self.pressed(last)
        self.touch()

    def end(self) -> None:
        """End the session and all its streams; nobody is told."""
        for answer in self._answers.values():
            self._sessions.service.cancel(answer)
            answer.over()
            self._sessions.stream_ended(answer.id)
        self._answers.clear()
        self._drop_connection()
        self.protocol.close()
        self._sessions.remove(self.kept)
        self.close()
        if self._is_known:
            self._sessions.journal.note(SessionEnded(self.number))
            self._sessions.flush()

    def park(self) -> None:
        """Send the client away, to come back."""
        connection = self._connection
        if connection is not None:
            self.flush()
            self.disconnected(connection)
            connection.end(CloseCode.GOING_AWAY)

    def close(self) -> None:
        """Do nothing any more by itself."""
        if self._timer is not None:
            self._timer.cancel()

    def _act(self) -> None:
        for event in self.protocol.events_received():
            self._act_on(event)

    def _act_on(self, event: Event) -> None:
        if isinstance(event, Infer):
            self._infer(event)
        elif isinstance(event, Cancel):
            self._cancel(event)
        elif isinstance(event, Part):
            if (answer := self._answers.get(event.stream)) is not None:
                answer.part_arrived(event)
        elif isinstance(event, Drained):
            self._set_paused(False)
        elif isinstance(event, Failed):
            _log.info("an FM connection cannot go on: %s", event.message)

    def _infer(self, message: Infer) -> None:
        service = self._sessions.service
        answer = FmAnswer(self._sessions, self, message.stream)
        try:
            request = fm.parse(message)
            service.admit(request.model, 1)
        except ApiError as error:
            self.pressed(self.protocol.fail_stream(fm.error(error, message.stream)))
            return
        self._answers[message.stream] = answer
        self._sessions.stream_began(answer)
        record = StreamRecord(message.stream, answer.id, encode_payload(message), answer.begun_s)
        answer.infer = record.infer
        self._sessions.journal.note(StreamBegun(self.number, record))
        # Before any work is done for it: a client that goes away in the middle of that knows what to come back for.
        self.pressed(self.protocol.accept(message.stream, answer.id))
        fd = -1 if self._connection is None else self._connection.fd
        answer.urgency = service.urgency(fd, request.deadline_ms)
        answer.begin(message, request)

    def _cancel(self, cancel: Cancel) -> None:
        if cancel.stream:
            answer = self._answers.get(cancel.stream)
            if answer is not None:
                answer.cancelled_by_client()
        elif not self._sessions.cancel(cancel.id):
            self.tell(Note(stream=0, note=f"cannot cancel '{cancel.id}': there is no such stream"))

    def _set_paused(self, is_paused: bool) -> None:
        streams = [stream for answer in self._answers.values() for stream in answer.streams]
        self._sessions.service.engine.set_paused(streams, is_paused)
