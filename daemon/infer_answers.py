"""What the JSON WebSocket door makes of requests: streams that are one connection's own, and streams that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from seedance.daemon.doors import openai_response
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.doors.infer import InferRequest, InferStream
from seedance.daemon.doors.openai_response import Usage
from seedance.daemon.kept_stream import TOO_MUCH, KeptStream
from seedance.daemon.protocol.frame import TextTemplate, frame_text
from seedance.daemon.ring.driver import Flow
from seedance.daemon.service import Answer, Service
from seedance.daemon.stream import Sink
from seedance.engine.request import FinishReason, TokenLogprobs

_json = msgspec.json.Encoder().encode
_PLAIN: Final = TextTemplate(*InferStream().around_text())


def plain_frame(text: str) -> bytes:
    """Return the frame of a delta in a stream without an id: the same in all of them."""
    return _PLAIN.frame(_json(text))


class Connection(Protocol):
    """What an answer needs of its connection."""

    flow: Flow

    def send(self, frame: bytes) -> None:
        """Send one frame."""

    def fell_behind(self, waiting_bytes: int) -> None:
        """The client has so much to take still of what was sent on `flow` directly."""

    def end_stream(self, id: str | None, last_message: bytes | None = None) -> None:
        """Send a stream's last message, and forget it."""


class _InferAnswer(Answer):
    """One stream, and its own sink."""

    __slots__ = ("_builder", "_service")

    def __init__(self, service: Service, builder: InferStream) -> None:
        super().__init__()
        self._service = service
        self._builder = builder

    def sink(self, index: int) -> Sink:
        return self

    def failed(self, error: ApiError) -> None:
        self.stream_failed(error)

    def cancelled_by_client(self) -> None:
        self._service.cancel(self)
        self.stream_finished(FinishReason.ABORT)

    def text_arrived(self, text: str) -> None:
        """See `stream.Sink`."""
        raise NotImplementedError

    def logprobs_arrived(self, text: str, positions: Sequence[TokenLogprobs]) -> None:
        """See `stream.Sink`."""
        raise NotImplementedError

    def note_arrived(self, note: str) -> None:
        """See `stream.Sink`."""
        raise NotImplementedError

    def stream_finished(self, reason: FinishReason) -> None:
        """See `stream.Sink`."""
        retry_after_s = self._service.retry_after_s() if reason is FinishReason.QUOTA_EXCEEDED else None
        usage = Usage(
            self.prompt_tokens,
            sum(stream.output_tokens for stream in self.streams),
            sum(stream.cached_tokens for stream in self.streams),
        )
        self.end(self.last_message(reason, usage, retry_after_s))

    def stream_failed(self, error: ApiError) -> None:
        """See `stream.Sink`."""
        self.end(self._builder.error(error))

    def last_message(self, reason: FinishReason, usage: Usage, retry_after_s: float | None) -> bytes:
        """Return the message that ends the stream well."""
        return self._builder.finish(reason, usage, retry_after_s)

    def end(self, last_message: bytes) -> None:
        """Send the last message."""
        raise NotImplementedError


class DirectAnswer(_InferAnswer):
    """A stream that ends with its connection."""

    __slots__ = ("_connection", "_flow", "_id", "_logprobs", "_parts", "_template")

    def __init__(self, connection: Connection, service: Service, request: InferRequest) -> None:
        super().__init__(service, InferStream(request.id))
        self._connection = connection
        self._flow = connection.flow
        self._id = request.id
        self._template = TextTemplate(*self._builder.around_text()) if request.id is not None else _PLAIN
        self._parts: list[str] | None = None if request.streams() else []
        self._logprobs: dict[str, Any] | None = None

    def started(self) -> None:
        if self._template is _PLAIN and self._parts is None:
            self._service.engine.bypass(self.streams[0], self._flow.fd, self._connection.fell_behind)

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

    def last_message(self, reason: FinishReason, usage: Usage, retry_after_s: float | None) -> bytes:
        if self._parts is None:
            return self._builder.finish(reason, usage, retry_after_s)
        return self._builder.whole("".join(self._parts), reason, usage, self._logprobs, retry_after_s)

    def end(self, last_message: bytes) -> None:
        self._connection.end_stream(self._id, last_message)

    # -- what its connection does with it -----------------------------------------------------------------------------

    def connection_lost(self) -> None:
        """End: nobody is there for it."""
        self._service.cancel(self)

    def abandoned(self) -> None:
        """Nothing: the connection's end follows."""

    def set_paused(self, is_paused: bool) -> None:
        """Have the engine leave the stream out, or take it in again."""
        self._service.engine.set_paused(self.streams, is_paused)


class KeptAnswer(_InferAnswer):
    """A stream that outlives its connections: each of its messages is a record."""

    __slots__ = ("_stream",)

    def __init__(self, stream: KeptStream, service: Service) -> None:
        super().__init__(service, InferStream())
        self._stream = stream

    def started(self) -> None:
        self._stream.submitted()

    def text_arrived(self, text: str) -> None:
        self._append(self._builder.delta(text))

    def logprobs_arrived(self, text: str, positions: Sequence[TokenLogprobs]) -> None:
        logprobs = openai_response.chat_logprobs(positions, self.vocabulary)
        self._append(self._builder.delta_logprobs(text, logprobs))

    def note_arrived(self, note: str) -> None:
        self._append(self._builder.note(note))

    def end(self, last_message: bytes) -> None:
        self._stream.append(last_message)
        self._stream.finish()

    def _append(self, message: bytes) -> None:
        if self._stream.is_full:
            self._service.cancel(self)
            self.stream_failed(TOO_MUCH)
        else:
            self._stream.append(message)
