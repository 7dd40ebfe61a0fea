"""The chunked transfer coding (RFC 9112 §7.1): decoding a request's body, framing a response's.

What cannot be told from the outside is bounded: extensions, of which we know none, are skipped up to a limit, and so
are trailer fields, which are checked and dropped. White space around the size is refused.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Final

from seedance.daemon.protocol.head import FIELDS, Limits
from seedance.errors import RemoteProtocolError

LAST_CHUNK: Final = b"0\r\n\r\n"

# Sixteen digits hold any 64-bit length; more would only be leading zeros or abuse.
_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(;[\t -~\x80-\xff]*+)?")
_MORE: Final = -1


def chunk(data: bytes) -> bytes:
    """Return `data` as one chunk; it must not be empty, as an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class _State(enum.Enum):
    SIZE = enum.auto()
    DATA = enum.auto()
    DATA_END = enum.auto()
    TRAILER = enum.auto()
    DONE = enum.auto()


class ChunkedBody:
    """A body that arrives in chunks.

    SIZE → DATA → DATA_END → SIZE …, and after the chunk of size 0: TRAILER → DONE. Each state has one reader, which
    takes what it can from the buffer, or says that it needs more.
    """

    __slots__ = ("_extension_bytes", "_left", "_limits", "_state", "_trailer_bytes", "body")

    def __init__(self, limits: Limits) -> None:
        self.body = bytearray()
        self._limits = limits
        self._state = _State.SIZE
        self._left = 0
        self._extension_bytes = 0
        self._trailer_bytes = 0

    def take(self, buffer: bytearray) -> bool:
        """Decode and remove what belongs to the body from the front of `buffer`; True once the body is complete.

        Raises RemoteProtocolError with the status to answer.
        """
        at = 0
        while self._state is not _State.DONE:
            step = _READERS[self._state](self, buffer, at)
            if step == _MORE:
                break
            at = step
        del buffer[:at]
        return self._state is _State.DONE

    def _read_size(self, buffer: bytearray, at: int) -> int:
        end = _line_end(buffer, at, self._limits.chunk_line_bytes, "chunk-size line")
        if end == _MORE:
            return _MORE
        line = _SIZE_LINE.fullmatch(buffer, at, end)
        if line is None:
            raise RemoteProtocolError("cannot read the body: a chunk-size line is malformed", 400)
        self._left = int(line[1], 16)
        self._extension_bytes += len(line[2] or b"")
        if self._extension_bytes > self._limits.chunk_extension_bytes:
            raise RemoteProtocolError("cannot read the body: its chunk extensions are too long", 400)
        if len(self.body) + self._left > self._limits.body_bytes:
            raise body_too_large(self._limits)
        self._state = _State.DATA if self._left else _State.TRAILER
        return end + 2

    def _read_data(self, buffer: bytearray, at: int) -> int:
        piece = buffer[at : at + self._left]
        if not piece:
            return _MORE
        self.body += piece
        self._left -= len(piece)
        if not self._left:
            self._state = _State.DATA_END
        return at + len(piece)

    def _read_data_end(self, buffer: bytearray, at: int) -> int:
        end = buffer[at : at + 2]
        if not b"\r\n".startswith(end):
            raise RemoteProtocolError("cannot read the body: a chunk is longer than its size says", 400)
        if len(end) < len(b"\r\n"):
            return _MORE
        self._state = _State.SIZE
        return at + 2

    def _read_trailer(self, buffer: bytearray, at: int) -> int:
        room = self._limits.trailer_bytes - self._trailer_bytes - len(b"\r\n")
        end = _line_end(buffer, at, room, "trailer section")
        if end == _MORE:
            return _MORE
        if end == at:
            self._state = _State.DONE
        elif FIELDS.fullmatch(buffer, at, end + 2) is None:
            raise RemoteProtocolError("cannot read the body: a trailer field is malformed", 400)
        self._trailer_bytes += end + 2 - at
        return end + 2


_READERS: Final[dict[_State, Callable[[ChunkedBody, bytearray, int], int]]] = {
    _State.SIZE: ChunkedBody._read_size,
    _State.DATA: ChunkedBody._read_data,
    _State.DATA_END: ChunkedBody._read_data_end,
    _State.TRAILER: ChunkedBody._read_trailer,
}


def body_too_large(limits: Limits) -> RemoteProtocolError:
    """Return the refusal of a body over the limit."""
    return RemoteProtocolError(f"cannot take a body of more than {limits.body_bytes} bytes", 413)


def _line_end(buffer: bytearray, at: int, limit: int, what: str) -> int:
    """Return where the line at `at` has its CRLF, or _MORE; a line has at most `limit` bytes before it."""
    limit = max(limit, 0)
    end = buffer.find(b"\r\n", at, at + limit + 2)
    if end < 0 and len(buffer) - at >= limit + 2:
        raise RemoteProtocolError(f"cannot read the body: the {what} is too long", 400)
    return end
