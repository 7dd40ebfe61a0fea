"""An FM session in a worker, and its streams: both live on without a connection.

What a step of the engine brings for a session leaves as one WebSocket message, at the loop's next turn.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Final, Protocol

from seedance.daemon.doors import fm
from seedance.daemon.doors.errors import ApiError, invalid
from seedance.daemon.doors.openai_response import Usage
from seedance.daemon.protocol.fm_messages import Cancel, Hello, Infer, Note, Part
from seedance.daemon.protocol.fm_sender import Backpressure
from seedance.daemon.protocol.fm_server import ServerSession
from seedance.daemon.protocol.fm_session import Drained, Event, Failed, Options
from seedance.daemon.protocol.fm_timing import NEVER
from seedance.daemon.protocol.frame import CloseCode
from seedance.daemon.service import Answer, Service
from seedance.daemon.session_log import Kept
from seedance.daemon.stream import Sink
from seedance.engine.request import FinishReason, TokenLogprobs

_log = logging.getLogger(__name__)

SESSION_COST_BYTES: Final = 4 << 10
"""What a session or a stream costs beside what is held for its client, roughly: it bounds how many there are."""
_ID_BYTES: Final = 16


class Connection(Protocol):
    """What a session needs of the connection that it is on."""

    @property
    def fd(self) -> int:
        """The descriptor, or -1."""

    def send_message(self, message: bytes) -> None:
        """Send a binary message."""

    def end(self, close_code: int) -> None:
        """Close, for the session has no more use for it; `disconnected` was called."""

    def all_sent(self) -> None:
        """What there was to send has been sent."""


class Sessions(Protocol):
    """What a session needs of the tenant's sessions."""

    loop: asyncio.AbstractEventLoop
    service: Service
    options: Options

    @property
    def resume_for_ms(self) -> int:
        """How long a session waits for its client."""

    def touched(self, session: FmSession) -> None:
        """Have a session's frames sent at the next turn of the loop."""

    def left(self, kept: Kept[FmSession]) -> None:
        """Take note that a session's client is away."""

    def remove(self, kept: Kept[FmSession]) -> None:
        """Keep a session no longer."""

    def stream_began(self, answer: FmAnswer) -> None:
        """Take note that there is a stream of this name."""

    def stream_ended(self, id: str) -> None:
        """Take note that a stream is over."""

    def cancel(self, id: str) -> bool:
        """End a stream of any session; tells whether there is one, or was."""


class FmSession:
    """One session and its streams; `kept` is its entry in the log of sessions."""

    __slots__ = ("_answers", "_connection", "_is_touched", "_sessions", "_timer", "kept", "protocol")

    kept: Kept[FmSession]

    def __init__(self, sessions: Sessions, name: str, token: str) -> None:
        self.protocol = ServerSession(name, token, sessions.resume_for_ms, options=sessions.options)
        self._sessions = sessions
        self._answers: dict[int, FmAnswer] = {}
        self._connection: Connection | None = None
        self._is_touched = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held_bytes(self) -> int:
        """See `session_log.Resumable`."""
        return SESSION_COST_BYTES * (1 + len(self._answers)) + self.protocol.held_bytes

    @property
    def oldest_seq(self) -> int:
        """See `session_log.Resumable`."""
        return self.protocol.oldest_seq

    @property
    def is_busy(self) -> bool:
        """Whether its client has anything still to come."""
        return bool(self._answers) or self.protocol.held_bytes > 0

    # -- the connection -----------------------------------------------------------------------------------------------

    def connect(self, connection: Connection, hello: Hello) -> None:
        """Go on with a connection, on which this HELLO came; an older one is closed."""
        if (older := self._connection) is not None:
            self._connection = None
            older.end(CloseCode.ABNORMAL)
        self._connection = connection
        self.protocol.resume_for_ms = self._sessions.resume_for_ms
        self.protocol.connect(hello, self._sessions.loop.time())
        self._act()
        self.flush()

    def message_received(self, message: bytes) -> None:
        """Take a binary message of the client."""
        self.protocol.receive_data(message, self._sessions.loop.time())
        self._act()
        self.touch()

    def disconnected(self, connection: Connection) -> None:
        """Take note that the connection is of no use any more: the session waits for its client."""
        if self._connection is connection:
            self._connection = None
            self.protocol.receive_eof()
            self._sessions.left(self.kept)

    def touch(self) -> None:
        """Have what there is to send sent soon."""
        if not self._is_touched and self._connection is not None:
            self._is_touched = True
            self._sessions.touched(self)

    def flush(self) -> None:
        """Send what there is to send."""
        self._is_touched = False
        connection = self._connection
        if connection is None:
            return
        for message in self.protocol.data_to_send(self._sessions.loop.time()):
            connection.send_message(message)
        if self._connection is not connection:
            return  # it was so slow that it was given up
        if (close_code := self.protocol.close_code) is not None:
            self.disconnected(connection)
            connection.end(close_code)
        else:
            self._await_timer()
            connection.all_sent()

    def _await_timer(self) -> None:
        due_s, timer = self.protocol.next_timer(), self._timer
        if timer is not None:
            if timer.when() <= due_s:
                return
            timer.cancel()
        self._timer = None if due_s == NEVER else self._sessions.loop.call_at(due_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self.protocol.timer_fired(self._sessions.loop.time())
        self._act()
        self.flush()

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
        self._sessions.stream_ended(answer.id)
        self.pressed(last)
        self.touch()

    def end(self) -> None:
        """End the session and all its streams; nobody is told."""
        for answer in self._answers.values():
            self._sessions.service.cancel(answer)
            self._sessions.stream_ended(answer.id)
        self._answers.clear()
        self._connection = None
        self.protocol.close()
        self._sessions.remove(self.kept)
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
                self._sessions.service.cancel(answer)
                answer.stream_failed(invalid("cannot take a part: they are not supported here"))
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
        # Before any work is done for it: a client that goes away in the middle of that knows what to come back for.
        self.pressed(self.protocol.accept(message.stream, answer.id))
        fd = -1 if self._connection is None else self._connection.fd
        answer.urgency = service.urgency(fd, request.deadline_ms)
        if request.messages is None:
            assert request.prompt is not None
            service.begin(request, [request.prompt], answer)
        else:
            service.begin_chat(request, answer)

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


class FmAnswer(Answer):
    """One stream of a session, and its own sink; `id` is its name for all of the tenant's clients."""

    __slots__ = ("_begun_s", "_first_s", "_session", "_sessions", "id", "number")

    def __init__(self, sessions: Sessions, session: FmSession, number: int) -> None:
        super().__init__()
        self._sessions = sessions
        self._session = session
        self._begun_s = sessions.loop.time()
        self._first_s: float | None = None
        self.number = number
        self.id = secrets.token_urlsafe(_ID_BYTES)

    def sink(self, index: int) -> Sink:
        return self

    def started(self) -> None:
        """See `service.Answer`; ACCEPT has told it already."""

    def failed(self, error: ApiError) -> None:
        self.stream_failed(error)

    def cancelled_by_client(self) -> None:
        """End with what there is."""
        self._sessions.service.cancel(self)
        self.stream_finished(FinishReason.ABORT)

    def text_arrived(self, text: str) -> None:
        if self._first_s is None:
            self._first_s = self._sessions.loop.time()
        session = self._session
        pressure = session.protocol.send_tokens(self.number, text.encode())
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
        slo = {"total_ms": 1000 * (self._sessions.loop.time() - self._begun_s)}
        if self._first_s is not None:
            slo["first_token_ms"] = 1000 * (self._first_s - self._begun_s)
        return slo
