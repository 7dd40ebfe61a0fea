"""The server side of one WebSocket (RFC 6455), from the opening handshake's answer to the closing handshake.

No extension is offered, permessage-deflate neither: a token stream is many messages of some bytes, which deflate makes
larger, and its window costs more memory than all the rest of a connection.

A payload is unmasked, counted and, if text, validated as it arrives, so bytes are handled once however they were cut,
and a message that is too long or no UTF-8 fails before it is complete. An idle connection holds no buffer.
"""

from __future__ import annotations

import codecs
import enum
from collections.abc import Callable
from typing import Final

import msgspec

from seedance.daemon.protocol.frame import (
    CONTROL_BIT,
    FIN_BIT,
    LENGTH_16,
    LENGTH_64,
    MASK_BIT,
    MASK_BYTES,
    MAX_CONTROL_BYTES,
    MAX_LENGTH_16,
    OPCODE_BITS,
    RESERVED_BITS,
    SHORT_HEADER_BYTES,
    CloseCode,
    Opcode,
    close_payload,
    frame_binary,
    frame_control,
    frame_text,
    parse_close,
    unmask,
)
from seedance.daemon.protocol.handshake import HandshakeRefused, accept_response_headers, choose_subprotocol
from seedance.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "BinaryReceived",
    "CloseCode",
    "CloseReceived",
    "Event",
    "Failed",
    "HandshakeRefused",
    "PingReceived",
    "PongReceived",
    "TextReceived",
    "WebSocketServer",
    "accept_response_headers",
    "choose_subprotocol",
    "frame_binary",
    "frame_text",
]

DEFAULT_MESSAGE_BYTES: Final = 1 << 20

_MORE: Final = -1


class TextReceived(msgspec.Struct, frozen=True, gc=False):
    """A whole text message."""

    text: str


class BinaryReceived(msgspec.Struct, frozen=True, gc=False):
    """A whole binary message."""

    data: bytes


class PingReceived(msgspec.Struct, frozen=True, gc=False):
    """A ping; its pong is already in `data_to_send`."""

    payload: bytes


class PongReceived(msgspec.Struct, frozen=True, gc=False):
    """A pong, asked for or not."""

    payload: bytes


class CloseReceived(msgspec.Struct, frozen=True, gc=False):
    """The peer closed, or answered our close; `code` is NO_STATUS where it gave none. The last event."""

    code: int
    reason: str


class Failed(msgspec.Struct, frozen=True, gc=False):
    """The connection cannot go on; the close frame is in `data_to_send`. The last event.

    `code` is what the peer is told, or ABNORMAL when it went away without closing.
    """

    code: int
    reason: str


Event = TextReceived | BinaryReceived | PingReceived | PongReceived | CloseReceived | Failed


class _Phase(enum.Enum):
    OPEN = enum.auto()
    CLOSING = enum.auto()  # our close is sent, the peer's has not come
    CLOSED = enum.auto()


class WebSocketServer:
    """One WebSocket's frames, from the first byte after the handshake on.

    The owner feeds `receive_data` and `receive_eof`, then takes `events_received` and sends `data_to_send`. While
    `is_open` it may also write `frame_text` and `frame_binary` to the socket itself. Once `should_close` is set it
    closes the connection when everything is sent (§7.1.1: the server goes first). After `close` messages still arrive,
    until the peer's close; the owner puts a deadline on that.
    """

    __slots__ = (
        "_buffer",
        "_events",
        "_fin",
        "_left",
        "_mask",
        "_message",
        "_message_bytes",
        "_opcode",
        "_out",
        "_phase",
        "_valid",
    )

    def __init__(self, message_bytes: int = DEFAULT_MESSAGE_BYTES) -> None:
        self._message_bytes = message_bytes
        self._phase = _Phase.OPEN
        self._events: list[Event] | None = None
        self._out: bytearray | None = None
        # The start of a frame's header, or of a control frame, that is not complete.
        self._buffer = b""
        # The message at hand: CONTINUATION stands for none. `_valid` of its bytes are known to be UTF-8.
        self._opcode = Opcode.CONTINUATION
        self._message: bytearray | None = None
        self._valid = 0
        # The data frame at hand, of which `_left` bytes are to come; the mask is turned to where they begin.
        self._left = 0
        self._mask = b""
        self._fin = False

    # What the peer did.

    def receive_data(self, data: bytes) -> None:
        """Take bytes from the peer."""
        if self._phase is _Phase.CLOSED:
            return
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        try:
            at = self._read_payload(data, 0) if self._left else 0
            while not self._left and not self.should_close:
                step = self._read_frame(data, at)
                if step == _MORE:
                    self._buffer = data[at:]
                    break
                at = step
        except RemoteProtocolError as error:
            self._fail(error.code, str(error))

    def receive_eof(self) -> None:
        """Take the end of what the peer sends; without a close frame before it, that is a failure (§7.1.5)."""
        if self._phase is not _Phase.CLOSED:
            self._tell(Failed(CloseCode.ABNORMAL, "cannot read on: the connection ended without a close frame"))
            self._end()

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
    def is_open(self) -> bool:
        """Tell whether messages may be sent."""
        return self._phase is _Phase.OPEN

    @property
    def should_close(self) -> bool:
        """Tell whether the connection is to be closed once everything is sent."""
        return self._phase is _Phase.CLOSED

    # What the owner does.

    def send_text(self, payload: str | bytes) -> None:
        """Send a text message; bytes must be UTF-8 and are not checked."""
        self._send(frame_text(payload.encode() if isinstance(payload, str) else payload))

    def send_binary(self, payload: bytes) -> None:
        """Send a binary message."""
        self._send(frame_binary(payload))

    def send_ping(self, payload: bytes = b"") -> None:
        """Send a ping of up to 125 bytes; the peer answers with a pong of the same."""
        self._send(frame_control(Opcode.PING, payload))

    def close(self, code: int = CloseCode.NORMAL, reason: str = "") -> None:
        """Begin the closing handshake; idempotent. `reason` takes up to 123 bytes of UTF-8."""
        frame = frame_control(Opcode.CLOSE, close_payload(code, reason))
        if self._phase is _Phase.OPEN:
            self._write(frame)
            self._phase = _Phase.CLOSING

    # Reading. Each reader returns where it has got to in `data`.

    def _read_frame(self, data: bytes, at: int) -> int:
        """Read the frame at `at` as far as it is there; _MORE says that not even its header is."""
        if len(data) - at < SHORT_HEADER_BYTES:
            return _MORE
        first, second = data[at], data[at + 1]
        self._check_header(first, second)
        opcode, length = first & OPCODE_BITS, second & ~MASK_BIT
        at += SHORT_HEADER_BYTES
        if length >= LENGTH_16:
            size = 2 if length == LENGTH_16 else 8
            if len(data) - at < size:
                return _MORE
            length = self._extended_length(length, int.from_bytes(data[at : at + size], "big"))
            at += size
        if opcode < CONTROL_BIT:
            self._check_size(length)
        self._mask = data[at : at + MASK_BYTES]
        at += MASK_BYTES
        if len(data) < at:
            return _MORE
        if opcode in _CONTROLS:
            if len(data) - at < length:
                return _MORE
            _CONTROLS[opcode](self, unmask(data[at : at + length], self._mask))
            return at + length
        self._fin = bool(first & FIN_BIT)
        return self._begin_payload(data, at, opcode, length)

    def _check_header(self, first: int, second: int) -> None:
        """Check a header's first two bytes (§5.2, §5.4, §5.5)."""
        opcode = first & OPCODE_BITS
        if first & RESERVED_BITS:
            raise _broken("a reserved bit is set, but no extension was agreed on")
        if not second & MASK_BIT:
            raise _broken("a client's frame is not masked")
        if opcode in _CONTROLS:
            if not first & FIN_BIT:
                raise _broken("a control frame is fragmented")
            if second & ~MASK_BIT > MAX_CONTROL_BYTES:
                raise _broken(f"a control frame has more than {MAX_CONTROL_BYTES} bytes")
        elif opcode == Opcode.CONTINUATION:
            if self._opcode is Opcode.CONTINUATION:
                raise _broken("there is no message to continue")
        elif opcode > Opcode.BINARY:
            raise _broken(f"opcode {opcode} is unknown")
        elif self._opcode is not Opcode.CONTINUATION:
            raise _broken("a new message begins inside another one")

    @staticmethod
    def _extended_length(kind: int, length: int) -> int:
        if length >> 63 or length < LENGTH_16 or (kind == LENGTH_64 and length <= MAX_LENGTH_16):
            raise _broken("a frame's length is not in its shortest form")
        return length

    def _check_size(self, length: int) -> None:
        before = len(self._message) if self._message is not None else 0
        if before + length > self._message_bytes:
            raise RemoteProtocolError(
                f"cannot take a message of more than {self._message_bytes} bytes", CloseCode.MESSAGE_TOO_BIG
            )

    def _begin_payload(self, data: bytes, at: int, opcode: int, length: int) -> int:
        if self._fin and opcode and len(data) - at >= length:
            self._tell_message(opcode, unmask(data[at : at + length], self._mask))
            return at + length
        if opcode:
            self._opcode = Opcode(opcode)
            self._message = bytearray()
            self._valid = 0
        self._left = length
        return self._read_payload(data, at)

    def _read_payload(self, data: bytes, at: int) -> int:
        message = self._message
        assert message is not None
        piece = data[at : at + self._left]
        message += unmask(piece, self._mask)
        self._left -= len(piece)
        turn = len(piece) % MASK_BYTES
        self._mask = self._mask[turn:] + self._mask[:turn]
        if self._opcode is Opcode.TEXT:
            self._validate(message)
        if not self._left and self._fin:
            opcode, self._opcode, self._message = self._opcode, Opcode.CONTINUATION, None
            self._tell_message(opcode, bytes(message))
        return at + len(piece)

    def _validate(self, message: bytearray) -> None:
        """Check the new bytes of a text; the last ones may be the beginning of a character."""
        try:
            _, used = codecs.utf_8_decode(message[self._valid :], "strict", False)
        except UnicodeDecodeError:
            raise _not_utf8() from None
        self._valid += used

    def _tell_message(self, opcode: int, payload: bytes) -> None:
        if opcode == Opcode.BINARY:
            self._tell(BinaryReceived(payload))
            return
        try:
            self._tell(TextReceived(payload.decode()))
        except UnicodeDecodeError:
            raise _not_utf8() from None

    def _ping_arrived(self, payload: bytes) -> None:
        self._tell(PingReceived(payload))
        if self._phase is _Phase.OPEN:
            self._write(frame_control(Opcode.PONG, payload))

    def _pong_arrived(self, payload: bytes) -> None:
        self._tell(PongReceived(payload))

    def _close_arrived(self, payload: bytes) -> None:
        code, reason = parse_close(payload)
        if self._phase is _Phase.OPEN:
            self._write(frame_control(Opcode.CLOSE, payload[:2]))
        self._tell(CloseReceived(code, reason))
        self._end()

    def _fail(self, code: int, reason: str) -> None:
        if self._phase is _Phase.OPEN:
            self._write(frame_control(Opcode.CLOSE, close_payload(code, reason)))
        self._tell(Failed(code, reason))
        self._end()

    def _end(self) -> None:
        self._phase = _Phase.CLOSED
        self._message = None
        self._left = 0
        self._buffer = b""

    # Writing.

    def _send(self, frame: bytes) -> None:
        if self._phase is not _Phase.OPEN:
            raise LocalProtocolError("cannot send on a WebSocket that is closing or closed")
        self._write(frame)

    def _write(self, frame: bytes) -> None:
        if self._out is None:
            self._out = bytearray(frame)
        else:
            self._out += frame

    def _tell(self, event: Event) -> None:
        if self._events is None:
            self._events = [event]
        else:
            self._events.append(event)


_CONTROLS: Final[dict[int, Callable[[WebSocketServer, bytes], None]]] = {
    Opcode.CLOSE: WebSocketServer._close_arrived,
    Opcode.PING: WebSocketServer._ping_arrived,
    Opcode.PONG: WebSocketServer._pong_arrived,
}


def _broken(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"cannot read a frame: {reason}", CloseCode.PROTOCOL_ERROR)


def _not_utf8() -> RemoteProtocolError:
    return RemoteProtocolError("cannot read a text message that is not UTF-8", CloseCode.INVALID_DATA)
