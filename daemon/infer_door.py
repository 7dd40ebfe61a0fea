"""The JSON WebSocket door of a worker: `/v2/infer`, one or several streams on one connection; and the test echo."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from seedance.daemon.doors import infer, openai_response
from seedance.daemon.doors.errors import ApiError, infer_error
from seedance.daemon.doors.infer import Cancel, InferRequest, InferStream, Rejected
from seedance.daemon.doors.openai_response import Usage
from seedance.daemon.protocol.frame import CloseCode, TextTemplate, frame_text
from seedance.daemon.protocol.websocket import (
    BinaryReceived,
    Event,
    PongReceived,
    TextReceived,
    WebSocketServer,
)
from seedance.daemon.ring.driver import Flow
from seedance.daemon.service import Answer, Service
from seedance.daemon.stream import Sink
from seedance.engine.request import FinishReason, TokenLogprobs

_log = logging.getLogger(__name__)
_json = msgspec.json.Encoder().encode

MAX_STREAMS: Final = 256
"""Streams at once on one connection, whatever the tenant's own limit."""
PAUSE_PART: Final = 4
"""When such a part of the backlog that a client may have waits for it, the engine leaves its streams out."""
MISSED_TICKS: Final = 6
"""There are two ticks to a ping interval: who says nothing at all for three intervals is gone."""


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
            self.web_socket.send_ping()
            self._flush()

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


class InferConnection(WebSocketConnection):
    """A client of `/v2/infer`."""

    __slots__ = ("_answers",)

    def __init__(self, owner: Owner, flow: Flow, message_bytes: int) -> None:
        super().__init__(owner, flow, message_bytes)
        self._answers: dict[str | None, _InferAnswer] | None = None  # most connections idle: no dict until it is needed

    def message_received(self, message: str | bytes) -> None:
        parsed = infer.parse(message)
        if isinstance(parsed, Rejected):
            self.send(frame_text(parsed.message()))
        elif isinstance(parsed, Cancel):
            answer = (self._answers or {}).get(parsed.id)
            if answer is not None:
                answer.cancelled_by_client()
        else:
            self._infer(parsed)

    def _infer(self, request: InferRequest) -> None:
        service = self._owner.service
        answers = self._answers if self._answers is not None else {}
        try:
            if request.id in answers:
                which = "without an id" if request.id is None else f"with id '{request.id}'"
                raise ApiError("invalid_request", f"cannot start a second stream {which} before the first has ended")
            if len(answers) >= MAX_STREAMS:
                raise ApiError("rate_limited", f"cannot run more than {MAX_STREAMS} streams on one connection")
            service.admit(request.model, 1)
            answer = _InferAnswer(self, service, request)
            answer.urgency = service.urgency(self.flow.fd, request.deadline_ms)
            self._answers = answers
            answers[request.id] = answer
            if request.messages is None:
                assert request.prompt is not None
                service.begin(request, [request.prompt], answer)
            else:
                service.begin_chat(request, answer)
        except ApiError as error:
            self.send(frame_text(infer_error(error, request.id)))

    def end_stream(self, stream_id: str | None, last_message: bytes) -> None:
        """Send a stream's last message and forget it."""
        if self._answers is not None:
            self._answers.pop(stream_id, None)
            if not self._answers:
                self._answers = None
        self.send(frame_text(last_message))
        if self._owner.leaving and not self.is_busy:
            self.close(CloseCode.GOING_AWAY, "the service is going away")

    @property
    def is_busy(self) -> bool:
        return self._answers is not None

    def cancel_all(self) -> None:
        answers, self._answers = self._answers, None
        for answer in (answers or {}).values():
            self._owner.service.cancel(answer)

    def set_paused(self, is_paused: bool) -> None:
        for answer in (self._answers or {}).values():
            self._owner.service.engine.set_paused(answer.streams, is_paused)


_PLAIN: Final = TextTemplate(*InferStream().around_text())


def plain_frame(text: str) -> bytes:
    """Return the frame of a delta in a stream without an id: the same in all of them."""
    return _PLAIN.frame(_json(text))


class _InferAnswer(Answer):
    """One stream of a connection, and its own sink."""

    __slots__ = ("_builder", "_connection", "_flow", "_id", "_logprobs", "_parts", "_service", "_template")

    def __init__(self, connection: InferConnection, service: Service, request: InferRequest) -> None:
        super().__init__()
        self._connection = connection
        self._flow = connection.flow
        self._service = service
        self._id = request.id
        self._builder = InferStream(request.id)
        self._template = TextTemplate(*self._builder.around_text()) if request.id is not None else _PLAIN
        self._parts: list[str] | None = None if request.streams() else []
        self._logprobs: dict[str, Any] | None = None

    def sink(self, index: int) -> Sink:
        return self

    def started(self) -> None:
        if self._template is _PLAIN and self._parts is None:
            self._service.engine.bypass(self.streams[0], self._flow.fd, self._connection.fell_behind)

    def failed(self, error: ApiError) -> None:
        self.stream_failed(error)

    def cancelled_by_client(self) -> None:
        """End with what there is."""
        self._service.cancel(self)
        self.stream_finished(FinishReason.ABORT)

    def text_arrived(self, text: str) -> None:
        if self._parts is None:
            # The hot path: past the connection, straight to its flow.
            waiting_bytes = self._flow.send(self._template.frame(_json(text)))
            if waiting_bytes:
                self._connection.fell_behind(waiting_bytes)
        else:
            self._parts.append(text)

    def logprobs_arrived(self, text: str, positions: Sequence[TokenLogprobs]) -> None:
        logprobs = openai_response.chat_logprobs(positions, self.vocabulary)
        if self._parts is None:
            self._connection.send(frame_text(self._builder.delta_logprobs(text, logprobs)))
        else:
            self._parts.append(text)
            if self._logprobs is None:
                self._logprobs = logprobs
            else:
                openai_response.extend_logprobs(self._logprobs, logprobs)

    def note_arrived(self, note: str) -> None:
        if self._parts is None:
            self._connection.send(frame_text(self._builder.note(note)))

    def stream_finished(self, reason: FinishReason) -> None:
        usage = Usage(
            self.prompt_tokens,
            sum(stream.output_tokens for stream in self.streams),
            sum(stream.cached_tokens for stream in self.streams),
        )
        retry_after_s = self._service.retry_after_s() if reason is FinishReason.QUOTA_EXCEEDED else None
        if self._parts is None:
            message = self._builder.finish(reason, usage, retry_after_s)
        else:
            message = self._builder.whole("".join(self._parts), reason, usage, self._logprobs, retry_after_s)
        self._connection.end_stream(self._id, message)

    def stream_failed(self, error: ApiError) -> None:
        self._connection.end_stream(self._id, self._builder.error(error))
