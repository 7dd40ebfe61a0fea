"""One request head: what is taken, what is refused and with which status."""

from __future__ import annotations

import time

import pytest

from seedance.daemon.protocol.head import Limits, Request, parse_head
from seedance.errors import RemoteProtocolError

HOST = b"Host: a\r\n"


def post(fields: bytes, version: bytes = b"1.1", host: bytes = HOST) -> bytes:
    return b"POST /v1/completions HTTP/" + version + b"\r\n" + host + fields + b"\r\n"


def parsed(data: bytes, limits: Limits | None = None) -> Request:
    request = parse_head(data, limits or Limits())
    assert request is not None
    return request


REFUSED = [
    # The request line.
    ("no method", 400, b" / HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("method is no token", 400, b"GE(T / HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("method with NUL", 400, b"GE\0T / HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("empty line first", 400, b"\r\nGET / HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("TLS on a plain port", 400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    ("two spaces", 400, b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("tab for a space", 400, b"GET\t/\tHTTP/1.1\r\n" + HOST + b"\r\n"),
    ("space at the end", 400, b"GET / HTTP/1.1 \r\n" + HOST + b"\r\n"),
    ("no version", 400, b"GET /\r\n" + HOST + b"\r\n"),
    ("lower-case version", 400, b"GET / http/1.1\r\n" + HOST + b"\r\n"),
    ("another protocol", 400, b"SOURCE / ICE/1.0\r\n" + HOST + b"\r\n"),
    ("target with a space", 400, b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("target with a tab", 400, b"GET /a\tb HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("target with NUL", 400, b"GET /\0 HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("target with DEL", 400, b"GET /\x7f HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("target with obs-text", 400, b"GET /\xc3\xa9 HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("target with a fragment", 400, b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("target is no path", 400, b"GET a HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("target is another scheme", 400, b"GET ftp://a/ HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("target without authority", 400, b"GET http:///a HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("target whose authority is no host", 400, b"GET http://a<b/ HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("target with user info", 400, b"GET http://u@a/ HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("asterisk for GET", 400, b"GET * HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("CONNECT", 400, b"CONNECT a:443 HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("CONNECT with a path", 400, b"CONNECT /a HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("HTTP/0.9", 400, b"GET /\r\n\r\n"),
    ("HTTP/1.2", 505, post(b"", b"1.2")),
    ("HTTP/2.0", 505, post(b"", b"2.0")),
    ("HTTP/0.9 by name", 505, post(b"", b"0.9")),
    ("HTTP/2 preface", 505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    # Line ends.
    ("bare LF after the request line", 400, b"GET / HTTP/1.1\n" + HOST + b"\r\n"),
    ("bare LF after a field", 400, post(b"X: a\n")),
    ("bare LF everywhere", 400, b"GET / HTTP/1.1\nHost: a\n\n"),
    ("bare LF in a value", 400, post(b"X: a\nY: b\r\n")),
    ("bare LF as the empty line", 400, b"GET / HTTP/1.1\r\nHost: a\r\n\n"),
    ("bare CR in a value", 400, post(b"X: a\rY: b\r\n")),
    ("bare CR after a field", 400, post(b"X: a\r\r\n")),
    ("bare CR in the request line", 400, b"GET /\r HTTP/1.1\r\n" + HOST + b"\r\n"),
    # Fields.
    ("obs-fold, space", 400, post(b"X: a\r\n b\r\n")),
    ("obs-fold, tab", 400, post(b"X: a\r\n\tb\r\n")),
    ("fold of the first field", 400, post(b"", host=b" X: a\r\n" + HOST)),
    ("white space before the colon", 400, post(b"X : a\r\n")),
    ("tab before the colon", 400, post(b"Content-Length\t: 3\r\n")),
    ("no colon", 400, post(b"X\r\n")),
    ("empty name", 400, post(b": a\r\n")),
    ("name is no token", 400, post(b"X(y): a\r\n")),
    ("name with obs-text", 400, post(b"X\xff: a\r\n")),
    ("NUL in a value", 400, post(b"X: a\0b\r\n")),
    ("NUL in a name", 400, post(b"X\0: a\r\n")),
    ("control character in a value", 400, post(b"X: a\x01b\r\n")),
    ("DEL in a value", 400, post(b"X: a\x7f\r\n")),
    # Host.
    ("no host", 400, post(b"", host=b"")),
    ("two hosts", 400, post(HOST)),
    ("two hosts in 1.0", 400, post(HOST, b"1.0")),
    ("host with a path", 400, post(b"", host=b"Host: a/b\r\n")),
    ("host with user info", 400, post(b"", host=b"Host: u@a\r\n")),
    ("host with a space", 400, post(b"", host=b"Host: a b\r\n")),
    # Framing.
    ("CL and TE", 400, post(b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n")),
    ("TE and CL", 400, post(b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n")),
    ("CL and TE in 1.0", 400, post(b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", b"1.0")),
    ("two CL, equal", 400, post(b"Content-Length: 3\r\nContent-Length: 3\r\n")),
    ("two CL, different", 400, post(b"Content-Length: 3\r\ncontent-length: 4\r\n")),
    ("CL list", 400, post(b"Content-Length: 5, 5\r\n")),
    ("CL with a sign", 400, post(b"Content-Length: +5\r\n")),
    ("CL negative", 400, post(b"Content-Length: -5\r\n")),
    ("CL in hex", 400, post(b"Content-Length: 0x5\r\n")),
    ("CL with an underscore", 400, post(b"Content-Length: 1_0\r\n")),
    ("CL with a fraction", 400, post(b"Content-Length: 5.0\r\n")),
    ("CL in superscript", 400, post(b"Content-Length: \xb2\r\n")),
    ("CL empty", 400, post(b"Content-Length: \r\n")),
    ("CL of 19 digits", 413, post(b"Content-Length: 9999999999999999999\r\n")),
    ("CL that int() would refuse", 413, post(b"Content-Length: " + b"9" * 5000 + b"\r\n")),
    ("TE in 1.0", 400, post(b"Transfer-Encoding: chunked\r\n", b"1.0")),
    ("TE identity", 400, post(b"Transfer-Encoding: identity\r\n")),
    ("TE gzip alone", 400, post(b"Transfer-Encoding: gzip\r\n")),
    ("TE chunked not last", 400, post(b"Transfer-Encoding: chunked, gzip\r\n")),
    ("TE chunked twice", 400, post(b"Transfer-Encoding: chunked, chunked\r\n")),
    ("TE chunked twice, in case", 400, post(b"Transfer-Encoding: CHUNKED,chunked\r\n")),
    ("two TE", 400, post(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n")),
    ("TE gzip and chunked in two fields", 400, post(b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n")),
    ("TE misspelt", 400, post(b"Transfer-Encoding: xchunked\r\n")),
    ("TE quoted", 400, post(b'Transfer-Encoding: "chunked"\r\n')),
    ("TE with a parameter", 400, post(b"Transfer-Encoding: chunked;a=b\r\n")),
    ("TE with a vertical tab", 400, post(b"Transfer-Encoding: \x0bchunked\r\n")),
    ("TE with a no-break space", 400, post(b"Transfer-Encoding: \xa0chunked\r\n")),
    ("TE empty member", 400, post(b"Transfer-Encoding: ,chunked\r\n")),
    ("TE empty", 400, post(b"Transfer-Encoding:\r\n")),
    ("TE that we lack", 501, post(b"Transfer-Encoding: gzip, chunked\r\n")),
    ("expectation that we lack", 417, post(b"Expect: 200-ok\r\n")),
    ("expectation twice", 417, post(b"Expect: 100-continue\r\nExpect: 100-continue\r\n")),
]


@pytest.mark.parametrize(("status", "data"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refuses(status: int, data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="^cannot ") as caught:
        parse_head(data)
    assert caught.value.code == status


@pytest.mark.parametrize(("status", "data"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refuses_the_same_byte_by_byte(status: int, data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as whole:
        parse_head(data)
    with pytest.raises(RemoteProtocolError) as drip:
        for length in range(1, len(data) + 1):
            assert parse_head(data[:length], scanned=length - 1) is None
    assert (drip.value.code, str(drip.value)) == (status, str(whole.value))


REASONS = [
    (post(b"X: a\r\n b\r\n"), "folded"),
    (post(b"X : a\r\n"), "white space between"),
    (post(b"X\r\n"), "no colon"),
    (post(b"X: a\rb\r\n"), "bare CR"),
    (post(b"X(: a\r\n"), "not a token"),
    (post(b"X: \x01\r\n"), "control character"),
    (post(b"X: a\n"), "bare LF"),
    (post(b"Content-Length: 3\r\nContent-Length: 3\r\n"), "more than one content-length"),
]


@pytest.mark.parametrize(("data", "reason"), REASONS)
def test_says_what_is_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        parse_head(data)


def test_reads_a_request() -> None:
    data = (
        b"POST /v1/chat%2Fcompletions?a=1&b=%20?x HTTP/1.1\r\n"
        b"Host: [::1]:8000\r\nAUTHORIZATION:\t Bearer k \t\r\n"
        b"X-Empty:\r\nX: caf\xe9\r\ncontent-length: 007\r\n\r\n{...}"
    )
    request = parsed(data)
    assert (request.method, request.path, request.query) == ("POST", "/v1/chat%2Fcompletions", "a=1&b=%20?x")
    assert request.http_version == "1.1"
    assert request.headers == [
        ("host", "[::1]:8000"),
        ("authorization", "Bearer k"),
        ("x-empty", ""),
        ("x", "café"),
        ("content-length", "007"),
    ]
    assert request.get("authorization") == "Bearer k"
    assert request.get("nothing") is None
    assert (request.content_length, request.chunked, request.has_body) == (7, False, True)
    assert data[request.head_bytes :] == b"{...}"


def test_joins_fields_of_one_name() -> None:
    request = parsed(post(b"Authorization: Bearer a\r\nX: 1\r\nauthorization: Bearer b\r\n"))
    assert request.get("authorization") == "Bearer a, Bearer b"
    assert [value for name, value in request.headers if name == "authorization"] == ["Bearer a", "Bearer b"]


@pytest.mark.parametrize(
    ("line", "path", "query"),
    [
        (b"GET /", "/", ""),
        (b"GET /?", "/", ""),
        (b"GET //a/../b", "//a/../b", ""),
        (b"GET /a?b?c", "/a", "b?c"),
        (b"GET http://host:1/a?b", "/a", "b"),
        (b"GET HTTPS://host", "/", ""),
        (b"GET http://host?b", "/", "b"),
        (b"OPTIONS *", "*", ""),
        (b"BREW /pot", "/pot", ""),
    ],
)
def test_splits_targets(line: bytes, path: str, query: str) -> None:
    request = parsed(line + b" HTTP/1.1\r\n" + HOST + b"\r\n")
    assert (request.path, request.query) == (path, query)


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: close\r\n", False),
        (b"1.1", b"Connection: TE, Close\r\n", False),
        (b"1.1", b"Connection: TE\r\nConnection: close\r\n", False),
        (b"1.1", b"Connection: closed\r\n", True),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: Keep-Alive\r\n", True),
        (b"1.0", b"Connection: keep-alive, close\r\n", False),
    ],
)
def test_knows_whether_the_connection_stays(version: bytes, connection: bytes, keep_alive: bool) -> None:
    assert parsed(post(connection, version)).keep_alive is keep_alive


@pytest.mark.parametrize(
    ("fields", "upgrade"),
    [
        (b"Upgrade: websocket\r\nConnection: Upgrade\r\n", True),
        (b"Upgrade: h2c, WebSocket\r\nConnection: keep-alive, upgrade\r\n", True),
        (b"Upgrade: websocket\r\n", False),
        (b"Connection: upgrade\r\n", False),
        (b"Upgrade: websockets\r\nConnection: upgrade\r\n", False),
    ],
)
def test_knows_an_upgrade(fields: bytes, upgrade: bool) -> None:
    assert parsed(post(fields)).is_websocket_upgrade is upgrade


def test_takes_chunked_whatever_its_case() -> None:
    request = parsed(post(b"Transfer-Encoding:  Chunked \r\n"))
    assert (request.chunked, request.content_length, request.has_body) == (True, None, True)


def test_ignores_an_expectation_of_http_1_0() -> None:
    assert parsed(post(b"Expect: 100-Continue\r\n")).expects_continue
    assert not parsed(post(b"Expect: 100-continue\r\n", b"1.0")).expects_continue


def test_needs_no_host_in_http_1_0() -> None:
    assert parsed(b"GET / HTTP/1.0\r\n\r\n").headers == []


def test_head_limit_counts_every_byte() -> None:
    data = post(b"X: a\r\n")
    assert parsed(data, Limits(head_bytes=len(data))).head_bytes == len(data)
    for received in (data, data[:-1], data + b"more"):
        with pytest.raises(RemoteProtocolError) as caught:
            parse_head(received, Limits(head_bytes=len(data) - 1))
        assert caught.value.code == 431


def test_field_count_has_a_limit() -> None:
    parsed(post(b"X: a\r\n" * 99))
    with pytest.raises(RemoteProtocolError) as caught:
        parse_head(post(b"X: a\r\n" * 100))
    assert caught.value.code == 431


def test_target_has_a_limit() -> None:
    limits = Limits(target_bytes=16)
    parsed(b"GET /" + b"a" * 15 + b" HTTP/1.1\r\n" + HOST + b"\r\n", limits)
    with pytest.raises(RemoteProtocolError) as caught:
        parse_head(b"GET /" + b"a" * 16 + b" HTTP/1.1\r\n" + HOST + b"\r\n", limits)
    assert caught.value.code == 414
    with pytest.raises(RemoteProtocolError) as caught:
        parse_head(b"GET /" + b"a" * (33 << 10))
    assert caught.value.code == 414


@pytest.mark.parametrize(
    "shape",
    [b"X:" + b" " * 60_000 + b"\0", b"X" * 60_000, (b"a:b\r\n" * 12_000) + b"\0", b"a\t" * 30_000, b":" * 60_000],
    ids=["spaces", "name", "fields", "tabs", "colons"],
)
def test_refusing_takes_no_longer_than_reading(shape: bytes) -> None:
    """A pattern that backtracked would take minutes here, not milliseconds."""
    begin = time.process_time()
    with pytest.raises(RemoteProtocolError):
        parse_head(post(shape + b"\r\n"), Limits(head_bytes=1 << 20, headers=1 << 20))
    assert time.process_time() - begin < 1
