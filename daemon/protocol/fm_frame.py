"""FM frames as bytes: the header, the kinds, and TOKENS, the one body that must be cheap.

     0        2     3              7                11
     | magic  | ver | seq_id (u32) | payload_len u32 | payload …
     | 0x464D | 1   |              |                 | kind u8 · body

Big-endian. A WebSocket binary message holds one or more whole frames, and a frame needs no other one to be understood.
The kinds of `UNNUMBERED` are about the connection and have `seq_id` 0, and so has an ERROR about stream 0. Of all
others it is the low half of a 64-bit sequence number, and may well be 0, too.

The body of TOKENS is the stream as a varint (LEB128, in its shortest form), an encoding, and the bytes. All else of it
is the same in every frame of a stream: `tokens_prefix` makes that part, once.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Final

from seedance.daemon.protocol.frame import CloseCode
from seedance.errors import RemoteProtocolError

SUBPROTOCOL: Final = "seedance.fm.v1"
MAGIC: Final = b"FM"
VERSION: Final = 1
HEADER_BYTES: Final = 11
SEQ_MASK: Final = 0xFFFFFFFF
MAX_STREAM: Final = 0xFFFFFFFF

DEFAULT_PAYLOAD_BYTES: Final = 1 << 20
MIN_PAYLOAD_BYTES: Final = 4096
"""The least that may be agreed on: every frame about the connection fits."""
TOKENS_PREFIX_BYTES: Final = 7
"""The most that is in a TOKENS payload before its data."""

_START: Final = MAGIC + bytes((VERSION,))
_HEADER: Final = struct.Struct("!3sII")
_pack: Final = _HEADER.pack
_unpack_from: Final = _HEADER.unpack_from
_VARINT_MORE: Final = 0x80
_VARINT_BYTES: Final = 5


class Kind(enum.IntEnum):
    """What a frame is: its payload's first byte."""

    HELLO = 1
    WELCOME = 2
    INFER = 3
    PART = 4
    ACCEPT = 5
    TOKENS = 6
    END = 7
    ERROR = 8
    NOTE = 9
    CANCEL = 10
    ACK = 11
    NACK = 12
    PING = 13
    PONG = 14


UNNUMBERED: Final = frozenset((Kind.HELLO, Kind.WELCOME, Kind.ACK, Kind.NACK, Kind.PING, Kind.PONG))


class Encoding(enum.IntEnum):
    """What the data of TOKENS is. A session has one of the first two; deltas of either are merged by joining them."""

    TEXT = 0  # UTF-8, whole characters
    BYTES = 1  # the tokens' own bytes, which may end inside a character
    LOGPROBS = 2  # see `fm_logprobs`: of streams that were asked for log probabilities, in whatever session


OF_SESSIONS: Final = frozenset((Encoding.TEXT, Encoding.BYTES))


def frame(seq: int, payload: bytes) -> bytes:
    """Return a payload as a frame; of `seq`, the low 32 bits go on the wire."""
    return _pack(_START, seq & SEQ_MASK, len(payload)) + payload


def tokens_frame(seq: int, prefix: bytes, data: bytes) -> bytes:
    """Return a TOKENS frame of the stream that `prefix` was made for."""
    return _pack(_START, seq & SEQ_MASK, len(prefix) + len(data)) + prefix + data


def tokens_prefix(stream: int, encoding: int) -> bytes:
    """Return what every TOKENS payload of a stream begins with."""
    out = bytearray((Kind.TOKENS,))
    while stream >= _VARINT_MORE:
        out.append(stream & 0x7F | _VARINT_MORE)
        stream >>= 7
    out += bytes((stream, encoding))
    return bytes(out)


def split_message(message: bytes, payload_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield the frames of a WebSocket message: `seq_id`, and where in the message the payload begins and ends.

    Raises RemoteProtocolError at the first that is none, with MESSAGE_TOO_BIG for a payload of more than
    `payload_bytes`.
    """
    at, size = 0, len(message)
    while True:
        if size - at < HEADER_BYTES:
            raise broken(f"a header takes {HEADER_BYTES} bytes, and {size - at} are left of the message")
        start, seq_id, length = _unpack_from(message, at)
        if start != _START:
            raise broken(_wrong_start(start))
        if length > payload_bytes:
            raise RemoteProtocolError(
                f"cannot take a frame with {length} bytes of payload; {payload_bytes} are agreed on",
                CloseCode.MESSAGE_TOO_BIG,
            )
        at += HEADER_BYTES
        if length == 0 or size - at < length:
            raise broken(f"its payload has {length} bytes, and {size - at} are left of the message")
        yield seq_id, at, at + length
        at += length
        if at == size:
            return


def parse_tokens(message: bytes, at: int, end: int) -> tuple[int, int, bytes]:
    """Return stream, encoding and data of the TOKENS body between `at` and `end`; raises RemoteProtocolError."""
    if end - at > 1 and 0 < message[at] < _VARINT_MORE:  # nearly always
        return message[at], message[at + 1], message[at + 2 : end]
    limit = min(end, at + _VARINT_BYTES)
    stream = shift = 0
    while at < limit:
        byte = message[at]
        stream |= (byte & 0x7F) << shift
        at += 1
        if byte < _VARINT_MORE:
            if not 0 < stream <= MAX_STREAM or (shift and not byte):
                raise broken("its stream is no number from 1 to 2^32 - 1 in the shortest form")
            if at == end:
                raise broken("it ends before its encoding")
            return stream, message[at], message[at + 1 : end]
        shift += 7
    raise broken("its stream has no end")


def broken(reason: str) -> RemoteProtocolError:
    """Return the error for a frame that is none."""
    return RemoteProtocolError(f"cannot read an FM frame: {reason}", CloseCode.PROTOCOL_ERROR)


def _wrong_start(start: bytes) -> str:
    if start[:2] != MAGIC:
        return f"it begins with {start[:2].hex()} instead of {MAGIC.hex()}"
    return f"it is of version {start[2]}, and only {VERSION} is known"
