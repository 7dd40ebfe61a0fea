"""The server side of one HTTP/1.1 connection (RFC 9112).

A connection answers one request after the other. Its phases and what moves it between them:

    IDLE ─ bytes ─► HEAD ─ head ─► HELD ─ accept_body ─► BODY ─ whole body ─► ANSWERING
                                    ├─ rewind, switch_protocols ─► HANDED_OVER
    HELD, BODY, ANSWERING ─ send_response ──────────────────────────────► IDLE or CLOSED
    HELD, BODY, ANSWERING ─ start_stream ─► STREAMING ─ end_stream ─► IDLE or CLOSED
    any phase that reads ─ what the peer must not send ─► CLOSED

In HELD the head is known and nothing of the body has been asked for: who it is and whether it may is decided on the
head alone. Answering before the body is in closes the connection after the answer, since what follows would have to be
read and thrown away. A pipelined request waits, unread, until the one before it has been answered.

The chunks of a stream need not pass through here: after `start_stream` the owner may write `chunk(data)` to the socket
itself (or the bare data when `chunked` is False) and only comes back for `end_stream`.

There is no clock here; the owner puts a deadline on `phase`. An idle connection holds no buffer.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from seedance.daemon.protocol.chunked import LAST_CHUNK, ChunkedBody, body_too_large, chunk
from seedance.daemon.protocol.head import DEFAULT_LIMITS, Limits, Request, parse_head
from seedance.daemon.protocol.response import BODILESS, JSON, Headers, error_object, response_head, switching_head
from seedance.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "Event",
    "HeadReceived",
    "Headers",
    "HttpServer",
    "Phase",
    "ProtocolFailed",
    "RequestReceived",
    "chunk",
    "error_object",
]


class HeadReceived(msgspec.Struct, frozen=True, gc=False):
    """A request's head is in; the connection waits in HELD for what its owner decides."""

    request: Request


class RequestReceived(msgspec.Struct, frozen=True, gc=False):
    """The whole request is in; comes after `accept_body`, also where there is no body."""

    request: Request
    body: bytes


class ProtocolFailed(msgspec.Struct, frozen=True, gc=False):
    """The peer broke the protocol or a limit; the answer is already in `data_to_send`, and nothing more is read."""

    status: int
    code: str
    message: str


Event = HeadReceived | RequestReceived | ProtocolFailed


class Phase(enum.Enum):
    """What a connection is doing, for deadlines and misuse texts."""

    IDLE = "idle"
    HEAD = "reading a head"
    HELD = "holding a head"
    BODY = "reading a body"
    ANSWERING = "answering"
    STREAMING = "streaming"
    CLOSED = "closed"
    HANDED_OVER = "handed over"


class _Move(enum.Enum):
    ACCEPT_BODY = "accept the body"
    REWIND = "rewind"
    SWITCH = "switch protocols"
    ANSWER = "answer"
    START_STREAM = "start a stream"
    SEND_CHUNK = "send a chunk"
    END_STREAM = "end the stream"


# Everything that the owner may do, and where it leads; what is not here is a bug of ours.
_ANSWERS: Final = {_Move.ANSWER: Phase.IDLE, _Move.START_STREAM: Phase.STREAMING}
_MOVES: Final[dict[Phase, dict[_Move, Phase]]] = {
    Phase.IDLE: {},
    Phase.HEAD: {},
    Phase.HELD: {
        **_ANSWERS,
        _Move.ACCEPT_BODY: Phase.BODY,
        _Move.REWIND: Phase.HANDED_OVER,
        _Move.SWITCH: Phase.HANDED_OVER,
    },
    Phase.BODY: _ANSWERS,
    Phase.ANSWERING: _ANSWERS,
    Phase.STREAMING: {_Move.SEND_CHUNK: Phase.STREAMING, _Move.END_STREAM: Phase.IDLE},
    Phase.CLOSED: {},
    Phase.HANDED_OVER: {},
}

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOO_MUCH: Final = frozenset((413, 414, 431))


class HttpServer:
    """One connection's HTTP/1.1.

    The owner feeds `receive_data` and `receive_eof`, then takes `events_received` and sends `data_to_send`; it does the
    latter two also after each call of its own, as an answer can let a waiting request in. Once `should_close` is set it
    closes the connection when everything is sent.
    """

    __slots__ = (
        "_buffer",
        "_chunked_body",
        "_eof",
        "_events",
        "_head_only",
        "_http_1_0",
        "_keep_alive",
        "_limits",
        "_out",
        "_phase",
        "_request",
        "_scanned",
        "_stays",
        "chunked",
    )

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._phase = Phase.IDLE
        self._stays = True
        self._eof = False
        # Buffers exist while something is in them.
        self._buffer: bytearray | None = None
        self._out: bytearray | None = None
        self._events: list[Event] | None = None
        # Of the current request.
        self._request: Request | None = None
        self._chunked_body: ChunkedBody | None = None
        self._scanned = 0
        self._keep_alive = False
        self._head_only = False
        self._http_1_0 = False
        self.chunked = False

    # What the peer did.

    def receive_data(self, data: bytes) -> None:
        """Take bytes from the peer."""
        if self._phase is Phase.HANDED_OVER:
            raise LocalProtocolError("cannot receive HTTP on a connection that was handed over")
        if self._phase is Phase.CLOSED or (self._phase is Phase.STREAMING and not self._keep_alive) or not data:
            return
        if self._buffer is None:
            self._buffer = bytearray(data)
        else:
            self._buffer += data
        self._advance()

    def receive_eof(self) -> None:
        """Take the end of what the peer sends; it may still be waiting for an answer."""
        self._eof = True
        self._advance()

    # What it meant.

    def events_received(self) -> list[Event]:
        """Return what happened since the last call, in order."""
        events, self._events = self._events, None
        return events or []

    def data_to_send(self) -> bytes:
        """Return what is to be sent since the last call, b"" for nothing."""
        if self._out is None:
            return b""
        out, self._out = self._out, None
        return bytes(out)

    @property
    def phase(self) -> Phase:
        """What the connection is doing."""
        return self._phase

    @property
    def should_close(self) -> bool:
        """Tell whether the connection is to be closed once everything is sent."""
        return self._phase is Phase.CLOSED

    @property
    def wants_read(self) -> bool:
        """Tell whether reading on makes sense; False asks for backpressure, or nothing more will be read."""
        if self._phase in (Phase.CLOSED, Phase.HANDED_OVER):
            return False
        return self._phase is Phase.BODY or self._buffer is None or len(self._buffer) < self._limits.buffer_bytes

    # What the owner does.

    def accept_body(self) -> None:
        """Let the body in; sends "100 Continue" where the client waits for it. RequestReceived follows."""
        self._move(_Move.ACCEPT_BODY)
        request = self._request
        assert request is not None
        self._drop(request.head_bytes)
        if request.expects_continue:
            self._write(_CONTINUE)
        if request.chunked:
            self._chunked_body = ChunkedBody(self._limits)
        self._advance()

    def rewind(self) -> bytes:
        """Give the request back as raw bytes, with all that came after it, for another process to start afresh."""
        self._move(_Move.REWIND)
        return self._hand_over()

    def switch_protocols(self, headers: Headers) -> bytes:
        """Answer 101 with `headers` and return the bytes that already belong to the new protocol."""
        request = self._request
        if request is None or not request.is_websocket_upgrade or request.has_body:
            raise LocalProtocolError("cannot switch protocols without a request that asks for it and has no body")
        head = switching_head(headers)
        self._move(_Move.SWITCH)
        self._write(head)
        return self._hand_over()[request.head_bytes :]

    def send_response(self, status: int, headers: Headers, body: bytes = b"") -> None:
        """Send a whole response; Content-Length and Connection are added here."""
        head = response_head(status, headers)
        if status in BODILESS:
            if body:
                raise LocalProtocolError(f"cannot send a body with status {status}")
        else:
            head += b"Content-Length: %d\r\n" % len(body)
        head_only = self._head_only
        self._begin_answer(_Move.ANSWER, head)
        if not head_only:
            self._write(body)
        self._end_answer()

    def start_stream(self, status: int, headers: Headers) -> None:
        """Send a response's head; the body follows in pieces, chunked, or up to the end of an HTTP/1.0 connection.

        A HEAD request gets no body: `send_chunk` then sends nothing, and an owner that writes chunks by itself must
        not either.
        """
        head = response_head(status, headers)
        if status in BODILESS:
            raise LocalProtocolError(f"cannot stream a body with status {status}")
        chunked = not self._http_1_0
        if chunked:
            head += b"Transfer-Encoding: chunked\r\n"
        self._begin_answer(_Move.START_STREAM, head, delimited=chunked)
        self.chunked = chunked

    def send_chunk(self, data: bytes) -> None:
        """Send a piece of a stream's body; an empty one is nothing."""
        self._move(_Move.SEND_CHUNK)
        if data and not self._head_only:
            self._write(chunk(data) if self.chunked else data)

    def end_stream(self) -> None:
        """End a stream's body, and with it the answer."""
        self._move(_Move.END_STREAM)
        if self.chunked and not self._head_only:
            self._write(LAST_CHUNK)
        self.chunked = False
        self._end_answer()

    def close_when_done(self) -> None:
        """Keep the connection no longer than for the request at hand; an idle one closes at once. Idempotent."""
        self._stays = False
        if self._phase is Phase.IDLE:
            self._phase = Phase.CLOSED

    # Reading.

    def _advance(self) -> None:
        """Read what the phase allows: at most one head, or one body."""
        try:
            if self._phase in (Phase.IDLE, Phase.HEAD):
                self._read_head()
            elif self._phase is Phase.BODY:
                self._read_body()
            if self._eof and self._phase in (Phase.HEAD, Phase.BODY):
                raise RemoteProtocolError("cannot read the request: the connection ended in the middle of it", 400)
        except RemoteProtocolError as error:
            self._fail(error.code, str(error))

    def _read_head(self) -> None:
        if self._buffer is None:
            if self._eof:
                self._phase = Phase.CLOSED
            return
        self._phase = Phase.HEAD
        request = parse_head(self._buffer, self._limits, self._scanned)
        if request is None:
            self._scanned = len(self._buffer)
            return
        self._scanned = 0
        self._head_only = request.method == "HEAD"
        self._http_1_0 = request.http_version == "1.0"
        self._keep_alive = request.keep_alive
        if request.content_length is not None and request.content_length > self._limits.body_bytes:
            raise body_too_large(self._limits)
        self._request = request
        self._phase = Phase.HELD
        self._tell(HeadReceived(request))

    def _read_body(self) -> None:
        request = self._request
        assert request is not None
        body = self._take_chunked() if request.chunked else self._take_counted(request.content_length or 0)
        if body is None:
            return
        self._request = self._chunked_body = None
        self._phase = Phase.ANSWERING
        self._tell(RequestReceived(request, body))

    def _take_counted(self, length: int) -> bytes | None:
        if not length:
            return b""
        if self._buffer is None or len(self._buffer) < length:
            return None
        with memoryview(self._buffer) as view:
            body = bytes(view[:length])
        self._drop(length)
        return body

    def _take_chunked(self) -> bytes | None:
        assert self._chunked_body is not None
        if self._buffer is None or not self._chunked_body.take(self._buffer):
            return None
        self._drop(0)
        return bytes(self._chunked_body.body)

    def _drop(self, length: int) -> None:
        """Drop bytes from the front of the buffer, and an empty buffer as a whole."""
        assert self._buffer is not None
        if length == len(self._buffer):
            self._buffer = None
        else:
            del self._buffer[:length]

    def _fail(self, status: int, message: str) -> None:
        code = "invalid_request" if status in _TOO_MUCH else "protocol_error"
        body = error_object(message, "invalid_request_error", code)
        head = response_head(status, JSON) + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
        self._write(head if self._head_only else head + body)
        self._tell(ProtocolFailed(status, code, message))
        self._buffer = self._request = self._chunked_body = None
        self._phase = Phase.CLOSED

    # Answering.

    def _move(self, move: _Move) -> None:
        phase = _MOVES[self._phase].get(move)
        if phase is None:
            raise LocalProtocolError(f"cannot {move.value} while {self._phase.value}")
        self._phase = phase

    def _begin_answer(self, move: _Move, head: bytes, *, delimited: bool = True) -> None:
        """Send a head; `delimited` says that the end of the body shows without closing the connection."""
        unread = self._request is not None and (self._phase is Phase.BODY or self._request.has_body)
        held = self._request if self._phase is Phase.HELD else None
        self._move(move)
        if held is not None and not unread:
            self._drop(held.head_bytes)
        self._request = self._chunked_body = None
        self._keep_alive = self._keep_alive and self._stays and delimited and not unread
        if not self._keep_alive:
            self._buffer = None
            head += b"Connection: close\r\n"
        elif self._http_1_0:
            head += b"Connection: keep-alive\r\n"
        self._write(head + b"\r\n")

    def _end_answer(self) -> None:
        self._head_only = self._http_1_0 = False
        if not self._keep_alive or not self._stays:
            self._phase = Phase.CLOSED
            self._buffer = None
            return
        self._phase = Phase.IDLE
        self._advance()

    def _hand_over(self) -> bytes:
        assert self._buffer is not None
        data = bytes(self._buffer)
        self._buffer = self._request = None
        return data

    def _write(self, data: bytes) -> None:
        if self._out is None:
            self._out = bytearray(data)
        else:
            self._out += data

    def _tell(self, event: Event) -> None:
        if self._events is None:
            self._events = [event]
        else:
            self._events.append(event)
