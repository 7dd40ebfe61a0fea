"""The JSON WebSocket door of a worker: `/v2/infer`, one or several streams on one connection; and the test echo."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from seedance.daemon.doors import infer
from seedance.daemon.doors.errors import ApiError, infer_error
from seedance.daemon.doors.infer import Cancel, InferRequest, NumberedMessages, Rejected, Resume
from seedance.daemon.infer_answers import DirectAnswer, KeptAnswer
from seedance.daemon.kept_request import INFER, KeptRequest, RequestKey
from seedance.daemon.kept_stream import KeptStream
from seedance.daemon.kept_streams import MESSAGES, KeptStreams
from seedance.daemon.protocol.frame import CloseCode, Opcode, frame_control, frame_text
from seedance.daemon.protocol.websocket import (
    BinaryReceived,
    CloseReceived,
    Event,
    PongReceived,
    TextReceived,
    WebSocketServer,
)
from seedance.daemon.ring.driver import Flow
from seedance.daemon.service import Answer, Service

_log = logging.getLogger(__name__)

MAX_STREAMS: Final = 256
"""Streams at once on one connection, whatever the tenant's own limit."""
PAUSE_PART: Final = 4
"""When such a part of the backlog that a client may have waits for it, the engine leaves its streams out."""
MISSED_TICKS: Final = 3
"""Who says nothing at all for so many ping intervals is gone."""
_PING: Final = frame_control(Opcode.PING, b"")


class Owner(Protocol):
    """What a WebSocket needs of its worker."""

    service: Service
    max_backlog_bytes: int
    leaving: bool

    def forget(self, connection: WebSocketConnection) -> None:
        """The connection is gone."""


class WebSocketConnection:
    """An endpoint that speaks WebSocket; `message_received` is what a door does with a message."""

    __slots__ = ("_missed", "_owner", "flow", "web_socket")

    def __init__(self, owner: Owner, flow: Flow, message_bytes: int) -> None:
        self._owner = owner
        self._missed = 0
        self.flow = flow
        self.web_socket = WebSocketServer(message_bytes)

    def data_received(self, data: bytes) -> None:
        self._missed = 0
        web_socket = self.web_socket
        web_socket.receive_data(data)
        for event in web_socket.events_received():
            if self.flow.fd >= 0:  # it may have been cut off on the way
                self._event(event)
        self._flush()

    def eof_received(self) -> None:
        self.cancel_all()
        self.web_socket.receive_eof()
        self._flush()
        self.flow.close()

    def backlog_drained(self) -> None:
        self.set_paused(False)

    def connection_lost(self, error: OSError | None) -> None:
        self.cancel_all()
        self._owner.forget(self)

    def message_received(self, message: str | bytes) -> None:
        """Act on one message of the client."""
        raise NotImplementedError

    @property
    def is_busy(self) -> bool:
        """Whether something is running for the client."""
        return False

    def cancel_all(self) -> None:
        """End whatever the connection has running."""

    def set_paused(self, is_paused: bool) -> None:
        """Have the engine leave what the connection has running out of its steps, or take it in again."""

    def close(self, code: int, reason: str) -> None:
        """Begin the closing handshake; what is running is cancelled."""
        self.cancel_all()
        self.web_socket.close(code, reason)
        self._flush()

    def tick(self) -> None:
        """Ping; end a connection whose peer has answered nothing to the last ones.

        Our close counts as a ping, and so does waiting for the peer to take what is left for it.
        """
        if self._missed >= MISSED_TICKS:
            self.flow.abort()
            return
        self._missed += 1
        if self.web_socket.is_open and not self.flow.waiting_bytes:
            self.send(_PING)

    def send(self, frame: bytes) -> None:
        """Send one frame."""
        waiting_bytes = self.flow.send(frame)
        if waiting_bytes:
            self.fell_behind(waiting_bytes)

    def fell_behind(self, waiting_bytes: int) -> None:
        """Pause the streams while much waits because the peer reads slowly; end the connection if that is no help."""
        if waiting_bytes > self._owner.max_backlog_bytes:
            _log.info("a WebSocket client reads too slowly; its streams are ended")
            self.cancel_all()
            self.flow.abort()
        elif waiting_bytes > self._owner.max_backlog_bytes // PAUSE_PART:
            self.set_paused(True)

    def _event(self, event: Event) -> None:
        if isinstance(event, TextReceived | BinaryReceived):
            if self.web_socket.is_open:  # who has closed, or is told to, gets no more answers
                self.message_received(event.text if isinstance(event, TextReceived) else event.data)
        elif isinstance(event, PongReceived):
            pass
        elif self.web_socket.should_close:
            self.cancel_all()

    def _flush(self) -> None:
        data = self.web_socket.data_to_send()
        if data:
            self.send(data)
        if self.web_socket.should_close:
            self.flow.close()


class EchoConnection(WebSocketConnection):
    """Sends every message back: what the conformance suite talks to."""

    __slots__ = ()

    def message_received(self, message: str | bytes) -> None:
        if self.web_socket.is_open:
            if isinstance(message, str):
                self.web_socket.send_text(message)
            else:
                self.web_socket.send_binary(message)


class InferOwner(Owner, Protocol):
    """What a connection of the JSON door needs of its worker."""

    streams: KeptStreams


class InferConnection(WebSocketConnection):
    """A client of `/v2/infer`: the streams that are its own, and those that it reads."""

    __slots__ = ("_running",)

    _owner: InferOwner

    def __init__(self, owner: InferOwner, flow: Flow, message_bytes: int) -> None:
        super().__init__(owner, flow, message_bytes)
        self._running: dict[str | None, DirectAnswer | MessageReader] | None = None  # most idle: no dict without need

    def message_received(self, message: str | bytes) -> None:
        parsed = infer.parse(message)
        if isinstance(parsed, Rejected):
            self.send(frame_text(parsed.message()))
        elif isinstance(parsed, Cancel):
            running = (self._running or {}).get(parsed.id)
            if running is not None:
                running.cancelled_by_client()
        else:
            try:
                if isinstance(parsed, Resume):
                    self._resume(parsed)
                elif parsed.resumable:
                    self._begin_kept(parsed, message)
                else:
                    self._begin(parsed)
            except ApiError as error:
                self.send(frame_text(infer_error(error, parsed.id)))

    def _begin(self, request: InferRequest) -> None:
        self._check_place(request.id)
        service = self._owner.service
        service.admit(request.model, 1)
        answer = DirectAnswer(self, service, request)
        self._put(request.id, answer)
        self._ask(request, answer)

    def _begin_kept(self, request: InferRequest, message: str | bytes) -> None:
        self._check_place(request.id)
        streams, service, key = self._owner.streams, self._owner.service, None
        data = message.encode() if isinstance(message, str) else message
        if request.idempotency_key is not None:
            key = RequestKey.of(request.idempotency_key, data)
            if (stream := streams.begun(MESSAGES, key)) is not None:
                self._read(request.id, stream, 0)
                return
        service.admit(request.model, 1)
        stream = streams.begin(MESSAGES, key)
        answer = KeptAnswer(stream, service)
        # Before any work is done for it: a client that goes away in the middle of that knows what to come back for.
        stream.begin()
        stream.accepted(answer, KeptRequest(INFER, data))
        self._read(request.id, stream, 0)
        self._ask(request, answer)

    def _ask(self, request: InferRequest, answer: Answer) -> None:
        service = self._owner.service
        answer.urgency = service.urgency(self.flow.fd, request.deadline_ms)
        service.begin_infer(request, answer)

    def _resume(self, resume: Resume) -> None:
        self._check_place(resume.id)
        self._read(resume.id, self._owner.streams.find(MESSAGES, resume.token), resume.last_seq)

    def _read(self, id: str | None, stream: KeptStream, last_seq: int) -> None:
        reader = MessageReader(self, id, stream, self._owner.streams.resume_for_ms)
        self._put(id, reader)
        try:
            stream.connect(reader, last_seq)
        except ApiError:
            self.take_out(id)
            raise

    def _check_place(self, id: str | None) -> None:
        running = self._running or {}
        if id in running:
            which = "without an id" if id is None else f"with id '{id}'"
            raise ApiError("invalid_request", f"cannot start a second stream {which} before the first has ended")
        if len(running) >= MAX_STREAMS:
            raise ApiError("rate_limited", f"cannot run more than {MAX_STREAMS} streams on one connection")

    def _put(self, id: str | None, running: DirectAnswer | MessageReader) -> None:
        if self._running is None:
            self._running = {}
        self._running[id] = running

    def take_out(self, id: str | None) -> None:
        """Forget a stream."""
        if self._running is not None:
            self._running.pop(id, None)
            if not self._running:
                self._running = None

    def end_stream(self, id: str | None, last_message: bytes | None = None) -> None:
        """Send a stream's last message, if it has not been, and forget it."""
        self.take_out(id)
        if last_message is not None:
            self.send(frame_text(last_message))
        if self._owner.leaving and not self.is_busy:
            self.close(CloseCode.GOING_AWAY, "the service is going away")

    @property
    def is_busy(self) -> bool:
        return self._running is not None

    def tell(self, note: str, retry_after_ms: int) -> None:
        """Tell the client something, if it has streams here."""
        if self.is_busy:
            self.send(frame_text(infer.told(note, retry_after_ms)))

    def cancel_all(self) -> None:
        running, self._running = self._running, None
        for each in (running or {}).values():
            each.connection_lost()

    def abandon(self, id: str | None, stream: KeptStream) -> None:
        """End a kept stream, and keep nothing of it: the client wants no more."""
        self.take_out(id)
        self._owner.streams.abandon(stream)

    def set_paused(self, is_paused: bool) -> None:
        for each in (self._running or {}).values():
            each.set_paused(is_paused)

    def backlog_drained(self) -> None:
        self.set_paused(False)
        for id, each in list((self._running or {}).items()):
            if self.flow.waiting_bytes:
                break
            if isinstance(each, MessageReader) and self._running is not None:
                self._running[id] = self._running.pop(id)  # the next time the others come first
                each.stream.drained()

    def _event(self, event: Event) -> None:
        if isinstance(event, CloseReceived) and event.code == CloseCode.NORMAL:
            for each in list((self._running or {}).values()):
                each.abandoned()
        super()._event(event)


class MessageReader:
    """A connection as it reads a kept stream; see `kept_stream.Reader`. `id` is the client's own for it."""

    __slots__ = ("_connection", "_id", "_messages", "_resume_for_ms", "stream")

    def __init__(self, connection: InferConnection, id: str | None, stream: KeptStream, resume_for_ms: int) -> None:
        self._connection = connection
        self._id = id
        self._messages = NumberedMessages(id)
        self._resume_for_ms = resume_for_ms
        self.stream = stream

    def begin(self) -> None:
        kept = self.stream.kept
        self._connection.send(frame_text(self._messages.welcome(kept.name, kept.token, self._resume_for_ms)))

    def take(self, first_seq: int, records: Sequence[bytes]) -> int:
        message = self._messages.message
        frames = [frame_text(message(seq, record)) for seq, record in enumerate(records, first_seq)]
        return self._connection.flow.send(b"".join(frames))

    def tell(self, note: str, retry_after_ms: int) -> None:
        """Nothing: its connection tells it once, whatever it has running."""

    def all_taken(self) -> None:
        self._connection.end_stream(self._id)

    def taken_over(self) -> None:
        self._let_go("another connection goes on with the stream")

    def sent_away(self) -> None:
        self._let_go("the service is going away")

    def _let_go(self, reason: str) -> None:
        connection = self._connection
        connection.take_out(self._id)
        if not connection.is_busy:
            connection.close(CloseCode.GOING_AWAY, reason)

    def fail(self, error: ApiError) -> None:
        self._connection.end_stream(self._id, infer_error(error, self._id))

    # -- what its connection does with it -----------------------------------------------------------------------------

    def connection_lost(self) -> None:
        """Leave the stream: that is no cancel."""
        self.stream.disconnected(self)

    def cancelled_by_client(self) -> None:
        """End the stream with what there is."""
        self.stream.cancelled_by_client()

    def abandoned(self) -> None:
        """End the stream, and keep nothing of it."""
        self._connection.abandon(self._id, self.stream)

    def set_paused(self, is_paused: bool) -> None:
        """Nothing: the stream knows by itself when too much waits."""
