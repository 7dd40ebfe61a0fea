"""The chunked coding: sizes, extensions, trailers, and their limits."""

from __future__ import annotations

import pytest

from seedance.daemon.protocol.chunked import LAST_CHUNK, ChunkedBody, chunk
from seedance.daemon.protocol.head import Limits
from seedance.errors import RemoteProtocolError

LIMITS = Limits(body_bytes=100, chunk_line_bytes=20, chunk_extension_bytes=30, trailer_bytes=40)

TAKEN = [
    ("empty", b"0\r\n\r\n", b""),
    ("one chunk", b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
    ("two chunks", b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello"),
    ("hex in both cases", b"A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n", b"01234567890123456789"),
    ("leading zeros", b"0000000000000005\r\nhello\r\n0000\r\n\r\n", b"hello"),
    ("line breaks in the data", b"4\r\n\r\n\r\n\r\n0\r\n\r\n", b"\r\n\r\n"),
    ("extension", b'5;a="b";c\r\nhello\r\n0;d\r\n\r\n', b"hello"),
    ("trailer", b"5\r\nhello\r\n0\r\nX-Sum: 1\r\nY:\r\n\r\n", b"hello"),
    ("body at the limit", b"64\r\n" + b"a" * 100 + b"\r\n0\r\n\r\n", b"a" * 100),
    ("line at the limit", b"1;" + b"a" * 18 + b"\r\na\r\n0\r\n\r\n", b"a"),
    ("trailer at the limit", b"0\r\n" + b"X: " + b"a" * 35 + b"\r\n\r\n", b""),
]

REFUSED = [
    ("no size", 400, b"\r\n"),
    ("not hex", 400, b"g\r\n"),
    ("sign", 400, b"+5\r\nhello\r\n"),
    ("prefix", 400, b"0x5\r\nhello\r\n"),
    ("underscore", 400, b"1_0\r\n"),
    ("white space before", 400, b" 5\r\nhello\r\n"),
    ("white space after", 400, b"5 \r\nhello\r\n"),
    ("white space before an extension", 400, b"5 ;a\r\nhello\r\n"),
    ("17 digits", 400, b"00000000000000005\r\n"),
    ("over 64 bits", 413, b"ffffffffffffffff\r\n"),
    ("body over the limit", 413, b"65\r\n"),
    ("body over the limit in two", 413, b"64\r\n" + b"a" * 100 + b"\r\n1\r\n"),
    ("bare LF after the size", 400, b"5\nhello\r\n0\r\n\r\n"),
    ("bare CR after the size", 400, b"5\rhello\r\n0\r\n\r\n"),
    ("NUL in an extension", 400, b"5;\0\r\n"),
    ("bare CR in an extension", 400, b"5;a\rb\r\n"),
    ("line over the limit", 400, b"1;" + b"a" * 19 + b"\r\n"),
    ("endless line", 400, b"1;" + b"a" * 21),
    ("extensions over the limit", 400, b"1;aaaaaaaaaaaaaaa\r\na\r\n" * 2),
    ("data too long", 400, b"5\r\nhello!\r\n"),
    ("data too short", 400, b"5\r\nhell\r\n0\r\n\r\n"),
    ("bare LF after the data", 400, b"5\r\nhello\n0\r\n\r\n"),
    ("trailer without a colon", 400, b"0\r\nX\r\n\r\n"),
    ("trailer folded", 400, b"0\r\nX: a\r\n b\r\n\r\n"),
    ("trailer with white space before the colon", 400, b"0\r\nX : a\r\n\r\n"),
    ("trailer with NUL", 400, b"0\r\nX: \0\r\n\r\n"),
    ("trailer with a bare LF", 400, b"0\r\nX: a\nY: b\r\n\r\n"),
    ("trailer over the limit", 400, b"0\r\n" + b"X: " + b"a" * 38 + b"\r\n\r\n"),
    ("trailers over the limit", 400, b"0\r\n" + b"X: a\r\n" * 7 + b"\r\n"),
    ("endless trailer", 400, b"0\r\nX: " + b"a" * 40),
]


def take(pieces: list[bytes]) -> tuple[bool, ChunkedBody, bytearray]:
    body, buffer, done = ChunkedBody(LIMITS), bytearray(), False
    for piece in pieces:
        buffer += piece
        done = done or body.take(buffer)
    return done, body, buffer


@pytest.mark.parametrize(("data", "expected"), [row[1:] for row in TAKEN], ids=[row[0] for row in TAKEN])
def test_takes(data: bytes, expected: bytes) -> None:
    for pieces in ([data + b"GET /"], [bytes((byte,)) for byte in data + b"GET /"]):
        done, body, left = take(pieces)
        assert (done, bytes(body.body), bytes(left)) == (True, expected, b"GET /")


@pytest.mark.parametrize(("status", "data"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refuses(status: int, data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="^cannot ") as whole:
        take([data])
    with pytest.raises(RemoteProtocolError) as drip:
        take([bytes((byte,)) for byte in data])
    assert whole.value.code == drip.value.code == status
    assert str(whole.value) == str(drip.value)


@pytest.mark.parametrize("length", range(len(TAKEN[7][1])))
def test_waits_for_the_rest(length: int) -> None:
    done, _, _ = take([TAKEN[7][1][:length]])
    assert not done


def test_frames_chunks() -> None:
    assert chunk(b"hello") == b"5\r\nhello\r\n"
    assert chunk(b"a" * 300) == b"12c\r\n" + b"a" * 300 + b"\r\n"
    done, body, left = take([chunk(b"he"), chunk(b"llo"), LAST_CHUNK])
    assert (done, bytes(body.body), bytes(left)) == (True, b"hello", b"")
