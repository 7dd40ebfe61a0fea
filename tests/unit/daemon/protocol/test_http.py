"""The connection: phases, bodies, answers, hand-over, and every misuse."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable

import pytest
from support.protocol_drive import SMALL_LIMITS, serve

from seedance.daemon.protocol.head import Limits
from seedance.daemon.protocol.http import (
    Event,
    HeadReceived,
    HttpServer,
    Phase,
    ProtocolFailed,
    RequestReceived,
    chunk,
)
from seedance.errors import LocalProtocolError

GET = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n"
GET_1_0 = b"GET /a HTTP/1.0\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
EXPECT = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
UPGRADE = b"GET /a HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"


def held(data: bytes) -> HttpServer:
    """Return a server that holds the head of `data`."""
    server = HttpServer()
    server.receive_data(data)
    (event,) = server.events_received()
    assert isinstance(event, HeadReceived)
    assert server.phase is Phase.HELD
    return server


def answering(data: bytes) -> HttpServer:
    """Return a server that has all of the request `data`."""
    server = held(data)
    server.accept_body()
    (event,) = server.events_received()
    assert isinstance(event, RequestReceived)
    assert server.phase is Phase.ANSWERING
    return server


def failure(events: list[Event]) -> ProtocolFailed:
    (event,) = events
    assert isinstance(event, ProtocolFailed)
    return event


def test_goes_through_its_phases() -> None:
    server = HttpServer()
    assert (server.phase, server.should_close) == (Phase.IDLE, False)
    server.receive_data(POST[:10])
    assert (server.phase, server.events_received()) == (Phase.HEAD, [])
    server.receive_data(POST[10:-2])
    (event,) = server.events_received()
    assert isinstance(event, HeadReceived)
    assert (server.phase, event.request.path, server.data_to_send()) == (Phase.HELD, "/a", b"")
    server.accept_body()
    assert (server.phase, server.events_received()) == (Phase.BODY, [])
    server.receive_data(POST[-2:])
    assert (server.phase, server.events_received()) == (Phase.ANSWERING, [RequestReceived(event.request, b"hello")])
    server.send_response(200, [("X", "y")], b"ok")
    assert server.data_to_send() == b"HTTP/1.1 200 OK\r\nX: y\r\nContent-Length: 2\r\n\r\nok"
    assert (server.phase, server.should_close, server.data_to_send()) == (Phase.IDLE, False, b"")


@pytest.mark.parametrize("data", [POST, CHUNKED])
def test_holds_the_body_back_until_it_is_wanted(data: bytes) -> None:
    server = held(data)
    assert server.events_received() == []
    server.accept_body()
    (event,) = server.events_received()
    assert isinstance(event, RequestReceived)
    assert event.body == b"hello"


def test_tells_of_an_empty_body_too() -> None:
    server = held(GET)
    server.accept_body()
    (event,) = server.events_received()
    assert isinstance(event, RequestReceived)
    assert event.body == b""


def test_asks_for_the_body_only_when_it_is_wanted() -> None:
    server = held(EXPECT)
    assert server.data_to_send() == b""
    server.accept_body()
    assert server.data_to_send() == b"HTTP/1.1 100 Continue\r\n\r\n"
    server.receive_data(b"hello")
    (event,) = server.events_received()
    assert isinstance(event, RequestReceived)


def test_refuses_without_asking_for_the_body() -> None:
    server = held(EXPECT)
    server.send_response(401, [], b"no")
    assert server.data_to_send() == (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
    assert server.should_close


def test_answering_before_the_body_is_in_closes() -> None:
    for server in (held(POST), held(CHUNKED), held(POST[:-1])):
        server.send_response(401, [])
        assert server.data_to_send().endswith(b"Connection: close\r\n\r\n")
        assert server.should_close
    server = held(POST[:-1])
    server.accept_body()
    server.send_response(408, [])
    assert server.should_close
    server.receive_data(b"o" + GET)
    assert server.events_received() == []


def test_answering_on_the_head_alone_keeps_the_connection_where_there_is_no_body() -> None:
    server = held(GET + GET.replace(b"/a", b"/b"))
    server.send_response(404, [])
    assert b"Connection" not in server.data_to_send()
    (event,) = server.events_received()
    assert isinstance(event, HeadReceived)
    assert event.request.path == "/b"


def test_reads_a_pipelined_request_only_after_the_answer() -> None:
    server = answering(POST + CHUNKED + GET)
    for _ in range(2):
        assert server.events_received() == []
        server.send_response(200, [])
        (head,) = server.events_received()
        assert isinstance(head, HeadReceived)
        server.accept_body()
        (request,) = server.events_received()
        assert isinstance(request, RequestReceived)
    server.send_response(200, [])
    assert (server.events_received(), server.phase) == ([], Phase.IDLE)


def test_reads_a_short_head_after_a_long_one_that_came_slowly() -> None:
    server = HttpServer()
    for byte in GET.replace(b"/a", b"/" + b"a" * 100):
        server.receive_data(bytes((byte,)))
    for _ in range(2):
        (event,) = server.events_received()
        assert isinstance(event, HeadReceived)
        server.send_response(404, [])
        server.receive_data(GET)


def test_asks_for_backpressure_instead_of_hoarding() -> None:
    limits = Limits(buffer_bytes=100)
    server = HttpServer(limits)
    server.receive_data(POST)
    server.events_received()
    server.accept_body()
    assert server.wants_read
    server.receive_data(GET * 4)
    assert not server.wants_read
    server.send_response(200, [])
    assert not server.wants_read
    server.send_response(200, [])
    assert server.wants_read


def test_reads_a_body_over_the_buffer_mark() -> None:
    server = HttpServer(Limits(buffer_bytes=100))
    server.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n" + b"a" * 500)
    server.events_received()
    assert not server.wants_read
    server.accept_body()
    assert server.wants_read
    server.receive_data(b"a" * 500)
    (event,) = server.events_received()
    assert isinstance(event, RequestReceived)
    assert event.body == b"a" * 1000


@pytest.mark.parametrize(
    ("data", "chunked", "expected", "closes"),
    [
        (
            GET,
            True,
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
            False,
        ),
        (GET_1_0, False, b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc", True),
        (
            GET_1_0.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"),
            False,
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc",
            True,
        ),
        (GET.replace(b"GET", b"HEAD"), True, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", False),
    ],
)
def test_streams(data: bytes, chunked: bool, expected: bytes, closes: bool) -> None:
    server = answering(data)
    server.start_stream(200, [])
    assert (server.phase, server.chunked) == (Phase.STREAMING, chunked)
    for piece in (b"ab", b"", b"c"):
        server.send_chunk(piece)
    server.end_stream()
    assert server.data_to_send() == expected
    assert (server.should_close, server.chunked) == (closes, False)


def test_owner_may_write_the_chunks_itself() -> None:
    server = answering(GET)
    server.start_stream(200, [])
    wire = server.data_to_send() + chunk(b"ab")
    server.end_stream()
    wire += server.data_to_send()
    assert wire.endswith(b"\r\n\r\n2\r\nab\r\n0\r\n\r\n")
    assert server.phase is Phase.IDLE


@pytest.mark.parametrize(
    ("data", "connection", "closes"),
    [
        (GET, b"", False),
        (GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), b"Connection: close\r\n", True),
        (GET_1_0, b"Connection: close\r\n", True),
        (
            GET_1_0.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"),
            b"Connection: keep-alive\r\n",
            False,
        ),
    ],
)
def test_says_whether_the_connection_stays(data: bytes, connection: bytes, closes: bool) -> None:
    server = answering(data + GET)
    server.send_response(200, [], b"x")
    assert server.data_to_send() == b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n" + connection + b"\r\nx"
    assert server.should_close is closes
    assert bool(server.events_received()) is not closes


def test_head_request_gets_the_length_without_the_body() -> None:
    server = answering(GET.replace(b"GET", b"HEAD") + GET)
    server.send_response(200, [], b"hello")
    assert server.data_to_send() == b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    server.accept_body()
    server.send_response(200, [], b"hello")
    assert server.data_to_send().endswith(b"\r\n\r\nhello")


@pytest.mark.parametrize("status", [204, 304])
def test_bodiless_statuses_have_no_length(status: int) -> None:
    server = answering(GET)
    server.send_response(status, [])
    assert b"Content-Length" not in server.data_to_send()
    assert server.phase is Phase.IDLE


def test_rewinds_to_the_start_of_the_current_request() -> None:
    server = answering(GET)
    server.receive_data(POST[:30])
    server.send_response(200, [])
    server.receive_data(POST[30:] + GET)
    assert isinstance(server.events_received()[0], HeadReceived)
    assert server.rewind() == POST + GET
    assert (server.phase, server.wants_read, server.should_close) == (Phase.HANDED_OVER, False, False)
    with pytest.raises(LocalProtocolError):
        server.receive_data(b"x")


def test_switches_protocols() -> None:
    server = held(UPGRADE + b"\x81\x80")
    assert server.switch_protocols([("Upgrade", "websocket"), ("Connection", "Upgrade")]) == b"\x81\x80"
    assert server.data_to_send() == (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    )
    assert server.phase is Phase.HANDED_OVER
    assert held(UPGRADE).switch_protocols([]) == b""


def test_refuses_to_switch_what_does_not_ask_for_it() -> None:
    for data in (GET, UPGRADE.replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\nx")):
        server = held(data)
        with pytest.raises(LocalProtocolError):
            server.switch_protocols([])
        server.send_response(400, [])


MISUSES: list[tuple[str, Callable[[], HttpServer], Callable[[HttpServer], object]]] = [
    ("answer while idle", HttpServer, lambda server: server.send_response(200, [])),
    ("stream while idle", HttpServer, lambda server: server.start_stream(200, [])),
    ("accept while idle", HttpServer, lambda server: server.accept_body()),
    ("rewind while idle", HttpServer, lambda server: server.rewind()),
    ("switch while idle", HttpServer, lambda server: server.switch_protocols([])),
    ("chunk while idle", HttpServer, lambda server: server.send_chunk(b"a")),
    ("end while idle", HttpServer, lambda server: server.end_stream()),
    ("chunk without a stream", lambda: answering(GET), lambda server: server.send_chunk(b"a")),
    ("end without a stream", lambda: answering(GET), lambda server: server.end_stream()),
    ("accept twice", lambda: answering(GET), lambda server: server.accept_body()),
    ("rewind after accepting", lambda: answering(GET), lambda server: server.rewind()),
    ("switch after accepting", lambda: answering(UPGRADE), lambda server: server.switch_protocols([])),
    ("body with 204", lambda: answering(GET), lambda server: server.send_response(204, [], b"a")),
    ("stream with 304", lambda: answering(GET), lambda server: server.start_stream(304, [])),
    ("own length", lambda: answering(GET), lambda server: server.send_response(200, [("Content-Length", "1")], b"a")),
    ("line break in a field", lambda: held(GET), lambda server: server.send_response(200, [("X", "a\r\nY: b")])),
    ("line break in an upgrade", lambda: held(UPGRADE), lambda server: server.switch_protocols([("X", "\r\n")])),
]


@pytest.mark.parametrize(("make", "misuse"), [row[1:] for row in MISUSES], ids=[row[0] for row in MISUSES])
def test_misuse_raises_and_changes_nothing(
    make: Callable[[], HttpServer], misuse: Callable[[HttpServer], object]
) -> None:
    server = make()
    before = server.phase
    with pytest.raises(LocalProtocolError, match="^cannot "):
        misuse(server)
    assert (server.phase, server.data_to_send()) == (before, b"")


def test_streaming_forbids_a_second_answer() -> None:
    server = answering(GET)
    server.start_stream(200, [])
    for misuse in (server.send_response, server.start_stream):
        with pytest.raises(LocalProtocolError):
            misuse(200, [])


FAILED = [
    ("malformed head", 400, "protocol_error", b"GET / HTTP/1.1\r\nHost : a\r\n\r\n"),
    ("malformed chunk", 400, "protocol_error", CHUNKED.replace(b"5\r\n", b"5 \r\n")),
    ("long head", 431, "invalid_request", b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 1100),
    ("long target", 414, "invalid_request", b"GET /" + b"a" * 300 + b" HTTP/1.1\r\nHost: a\r\n\r\n"),
    ("long body", 413, "invalid_request", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 513\r\n\r\n"),
    ("long chunked body", 413, "invalid_request", CHUNKED.replace(b"5\r\n", b"201\r\n")),
    ("HTTP/2", 505, "protocol_error", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ("gzip", 501, "protocol_error", CHUNKED.replace(b"chunked", b"gzip, chunked")),
    ("expectation", 417, "protocol_error", EXPECT.replace(b"100-", b"x-")),
    ("end in a head", 400, "protocol_error", GET[:-1]),
    ("end in a body", 400, "protocol_error", POST[:-1]),
    ("end in a chunked body", 400, "protocol_error", CHUNKED[:-1]),
]


@pytest.mark.parametrize(("status", "code", "data"), [row[1:] for row in FAILED], ids=[row[0] for row in FAILED])
def test_answers_a_broken_peer_and_closes(status: int, code: str, data: bytes) -> None:
    events, sent, closes = serve([data])
    failed = events[-1]
    assert isinstance(failed, ProtocolFailed)
    assert (failed.status, failed.code, closes) == (status, code, True)
    head, _, body = sent.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nConnection: close" in head
    assert b"\r\nContent-Length: %d\r\n" % len(body) in head
    error = json.loads(body)["error"]
    assert (error["message"], error["type"], error["code"]) == (failed.message, "invalid_request_error", code)


def test_a_body_over_the_limit_is_refused_on_its_head() -> None:
    server = HttpServer(SMALL_LIMITS)
    server.receive_data(b"HEAD / HTTP/1.1\r\nHost: a\r\nContent-Length: 513\r\n\r\n")
    assert failure(server.events_received()).status == 413
    assert server.data_to_send().endswith(b"Connection: close\r\n\r\n")


def test_reads_nothing_after_a_failure() -> None:
    server = HttpServer()
    server.receive_data(b"\0")
    assert failure(server.events_received()).status == 400
    assert server.data_to_send()
    server.receive_data(GET)
    server.receive_eof()
    assert (server.events_received(), server.data_to_send(), server.wants_read) == ([], b"", False)


def test_end_while_idle_closes_quietly() -> None:
    server = HttpServer()
    server.receive_eof()
    assert (server.should_close, server.events_received(), server.data_to_send()) == (True, [], b"")


def test_end_while_answering_is_remembered() -> None:
    server = answering(GET + GET)
    server.receive_eof()
    assert (server.should_close, server.events_received()) == (False, [])
    server.send_response(200, [])
    (event,) = server.events_received()
    assert isinstance(event, HeadReceived)
    server.accept_body()
    server.start_stream(200, [])
    server.end_stream()
    assert (server.should_close, server.events_received()[1:]) == (True, [])


def test_end_while_holding_fails_once_the_body_is_wanted() -> None:
    server = held(POST[:-1])
    server.receive_eof()
    assert server.events_received() == []
    server.accept_body()
    assert failure(server.events_received()).status == 400


def test_close_when_done() -> None:
    idle = HttpServer()
    idle.close_when_done()
    assert idle.should_close
    busy = answering(GET + GET)
    busy.close_when_done()
    busy.close_when_done()
    assert not busy.should_close
    busy.send_response(200, [])
    assert b"Connection: close\r\n" in busy.data_to_send()
    assert (busy.should_close, busy.events_received()) == (True, [])
    streaming = answering(GET + GET)
    streaming.start_stream(200, [])
    streaming.close_when_done()
    streaming.end_stream()
    assert streaming.should_close


def test_ignores_what_follows_the_last_request() -> None:
    server = answering(GET_1_0)
    server.start_stream(200, [])
    server.receive_data(b"\0" * 100_000)
    assert server.wants_read
    server.end_stream()
    assert (server.should_close, server.events_received()) == (True, [])


def test_an_idle_connection_is_small() -> None:
    """Measured after a request, so that nothing lazily allocated is left behind."""
    count = 500
    servers: list[HttpServer | None] = [None] * count
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for index in range(count):
            server = answering(POST)
            server.send_response(200, [], b"ok")
            server.data_to_send()
            servers[index] = server
            del server
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / count < 300
