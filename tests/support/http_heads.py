"""Request heads, right and wrong in every part, for tests and for the corpus of the fuzz target."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping


def _fields(name: bytes, *values: bytes) -> list[bytes]:
    return [name + b": " + value + b"\r\n" for value in values]


# A head as slots: first what is usual, then everything else that a slot may hold.
SLOTS: dict[str, list[bytes]] = {
    "method": [
        b"POST",
        b"GET",
        b"HEAD",
        b"OPTIONS",
        b"BREW",
        b"CONNECT",
        b"get",
        b"G@T",
        b"PRI",
        b"",
        b"GE\0T",
        b"\r\nGET",
    ],
    "space": [b" ", b"  ", b"\t", b""],
    "target": [
        b"/",
        b"/?",
        b"/stream",
        b"/v1?a=b",
        b"http://a/b?c",
        b"/%00",
        b'/"<>|{}',
        b"*",
        b"a:1",
        b"/a#b",
        b"/\x80",
    ],
    "target end": [b"", b" b", b"\t", b"\x7f", b"\0", b"://", b"<"],
    "version": [
        b"HTTP/1.1",
        b"HTTP/1.0",
        b"HTTP/2.0",
        b"HTTP/1.2",
        b"HTTP/0.9",
        b"http/1.1",
        b"HTTP/1.1 ",
        b"ICE/1.0",
        b"",
    ],
    "line end": [b"\r\n", b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n\r\n", b"\0\r\n"],
    "host": [*_fields(b"Host", b"a", b"", b"[::1]:8", b"a/b", b"u@a", b"a b"), b""],
    "second host": [b"", *_fields(b"host", b"a", b"b")],
    "name": [b"X", b"X-Y_z", b"", b"X(", b"\xff", b"X\0", b" X", b"X\r", b"X\n"],
    "colon": [b": ", b":", b":\t \t", b" : ", b"\t:", b"", b" ", b"\r\n:", b"::"],
    "value": [
        b"a",
        b"",
        b" a\t",
        b"\xe9\xff",
        b"a b",
        b"a\0b",
        b"\x01",
        b"\x7f",
        b"\x0b",
        b"a\r\n b",
        b"a\r\n\tb",
        b"a\rb",
        b"a\r",
    ],
    "field end": [b"\r\n", b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n \r\n", b" \t\r\n"],
    "length": [
        b"",
        *_fields(b"Content-Length", b"0", b"5", b"05", b"+5", b"-0", b"5, 5", b"5 5", b"0x5", b"9" * 20, b""),
        *_fields(b"content-length", b"\x0b5", b"\xa05", b"5\x85", b"\xb2", b"5.0"),
    ],
    "second length": [
        b"",
        *_fields(b"Content-Length", b"5", b"6"),
        b"Content-Length : 5\r\n",
        b"Content_Length: 5\r\n",
    ],
    "coding": [
        b"",
        *_fields(b"Transfer-Encoding", b"chunked", b"Chunked", b"gzip, chunked", b"chunked, chunked", b"identity", b""),
        *_fields(b"transfer-encoding", b",chunked", b"xchunked", b"\x85chunked", b"chunked\xa0", b"\x0cchunked"),
    ],
    "second coding": [b"", *_fields(b"Transfer-Encoding", b"chunked", b"gzip"), b"Transfer-Encoding\t: chunked\r\n"],
    "connection": [b"", *_fields(b"Connection", b"close", b"keep-alive", b"Keep-Alive, Close", b"upgrade", b",")],
    "upgrade": [b"", *_fields(b"Upgrade", b"websocket", b"h2c")],
    "expect": [b"", *_fields(b"Expect", b"100-continue", b"x")],
    "end": [b"\r\n", b"\n", b"\r\r\n", b" \r\n\r\n"],
}
_REQUEST_LINE = ("method", "space", "target", "target end", "space", "version", "line end")


def head(chosen: Mapping[str, bytes]) -> bytes:
    """Return the head with what was chosen for some slots, and the usual in the others."""
    slots = {name: chosen.get(name, choices[0]) for name, choices in SLOTS.items()}
    fields = [value for name, value in slots.items() if name not in _REQUEST_LINE]
    return b"".join([*(slots[name] for name in _REQUEST_LINE), *fields])


def pairs() -> Iterator[bytes]:
    """Return every head that is unusual in up to two slots."""
    for first, second in itertools.combinations(SLOTS, 2):
        for one, other in itertools.product(SLOTS[first], SLOTS[second]):
            yield head({first: one, second: other})
