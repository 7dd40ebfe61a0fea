"""One WebSocket: messages, control frames, both closing handshakes, and every way in which a peer can be wrong."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable

import pytest
from support.protocol_drive import client_frame, converse, read_frames

from seedance.daemon.protocol.frame import Opcode, close_payload
from seedance.daemon.protocol.websocket import (
    BinaryReceived,
    CloseReceived,
    Event,
    Failed,
    PingReceived,
    PongReceived,
    TextReceived,
    WebSocketServer,
)
from seedance.errors import LocalProtocolError

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = Opcode
EURO = "€".encode()


def received(data: bytes, message_bytes: int = 1 << 20) -> tuple[list[Event], list[tuple[Opcode, bytes]]]:
    server = WebSocketServer(message_bytes)
    server.receive_data(data)
    return server.events_received(), read_frames(server.data_to_send())


MESSAGES: list[tuple[str, bytes, list[Event]]] = [
    ("text", client_frame(TEXT, EURO), [TextReceived("€")]),
    ("empty text", client_frame(TEXT), [TextReceived("")]),
    ("binary", client_frame(BINARY, b"\xff\0"), [BinaryReceived(b"\xff\0")]),
    ("16-bit length", client_frame(TEXT, b"a" * 126), [TextReceived("a" * 126)]),
    ("64-bit length", client_frame(BINARY, b"a" * 65536), [BinaryReceived(b"a" * 65536)]),
    ("two messages", client_frame(TEXT, b"a") + client_frame(TEXT, b"b"), [TextReceived("a"), TextReceived("b")]),
    (
        "fragments",
        client_frame(TEXT, b"a", fin=False) + client_frame(0, b"b", fin=False) + client_frame(0, b"c"),
        [TextReceived("abc")],
    ),
    (
        "fragments of which most are empty",
        client_frame(BINARY, fin=False)
        + client_frame(0, fin=False)
        + client_frame(0, b"a", fin=False)
        + client_frame(0),
        [BinaryReceived(b"a")],
    ),
    (
        "a character over three fragments",
        client_frame(TEXT, EURO[:1], fin=False) + client_frame(0, EURO[1:2], fin=False) + client_frame(0, EURO[2:]),
        [TextReceived("€")],
    ),
    (
        "control frames between fragments",
        client_frame(TEXT, b"a", fin=False)
        + client_frame(PING, b"p")
        + client_frame(PONG, b"q")
        + client_frame(0, b"b"),
        [PingReceived(b"p"), PongReceived(b"q"), TextReceived("ab")],
    ),
    ("longest ping", client_frame(PING, b"p" * 125), [PingReceived(b"p" * 125)]),
]


@pytest.mark.parametrize(("data", "events"), [row[1:] for row in MESSAGES], ids=[row[0] for row in MESSAGES])
def test_receives(data: bytes, events: list[Event]) -> None:
    assert received(data)[0] == events
    drip = WebSocketServer()
    for index in range(len(data)):
        drip.receive_data(data[index : index + 1])
    assert drip.events_received() == events
    assert drip.is_open


FAILED = [
    ("reserved bit 1", 1002, client_frame(TEXT, reserved=4)),
    ("reserved bit 2", 1002, client_frame(TEXT, reserved=2)),
    ("reserved bit 3", 1002, client_frame(PING, reserved=1)),
    ("unmasked", 1002, b"\x81\x01a"),
    ("unmasked ping", 1002, b"\x89\x00"),
    *((f"opcode {opcode}", 1002, client_frame(opcode)) for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)),
    ("fragmented ping", 1002, client_frame(PING, fin=False)),
    ("fragmented close", 1002, client_frame(CLOSE, fin=False)),
    ("ping of 126 bytes", 1002, client_frame(PING, b"a" * 126)),
    ("nothing to continue", 1002, client_frame(CONTINUATION)),
    ("nothing to continue, not final", 1002, client_frame(CONTINUATION, fin=False)),
    ("text inside a text", 1002, client_frame(TEXT, fin=False) + client_frame(TEXT)),
    ("binary inside a text", 1002, client_frame(TEXT, fin=False) + client_frame(BINARY)),
    ("continuation after the end", 1002, client_frame(TEXT, fin=False) + client_frame(0) + client_frame(0)),
    ("16 bits for a short length", 1002, b"\x81\xfe\x00\x7d"),
    ("64 bits for a 16-bit length", 1002, b"\x81\xff\x00\x00\x00\x00\x00\x00\xff\xff"),
    ("length with the highest bit", 1002, b"\x81\xff\x80\x00\x00\x00\x00\x01\x00\x00"),
    ("too long", 1009, b"\x82\xfe\x02\x01"),
    ("too long by far", 1009, b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff"),
    ("too long in fragments", 1009, client_frame(BINARY, b"a" * 512, fin=False) + b"\x80\x81"),
    ("not UTF-8", 1007, client_frame(TEXT, b"\xff")),
    ("overlong", 1007, client_frame(TEXT, b"\xc0\x80")),
    ("surrogate", 1007, client_frame(TEXT, b"\xed\xa0\x80")),
    ("over U+10FFFF", 1007, client_frame(TEXT, b"\xf4\x90\x80\x80")),
    ("half a character", 1007, client_frame(TEXT, EURO[:2])),
    ("half a character in fragments", 1007, client_frame(TEXT, EURO[:1], fin=False) + client_frame(0, EURO[1:2])),
    ("half a character, then nothing", 1007, client_frame(TEXT, EURO[:2], fin=False) + client_frame(0)),
    ("close code of one byte", 1002, client_frame(CLOSE, b"\x03")),
    ("close with 1005", 1002, client_frame(CLOSE, b"\x03\xed")),
    ("close reason not UTF-8", 1007, client_frame(CLOSE, b"\x03\xe8\xff")),
]


@pytest.mark.parametrize(("code", "data"), [row[1:] for row in FAILED], ids=[row[0] for row in FAILED])
def test_fails_on_a_broken_peer(code: int, data: bytes) -> None:
    for pieces in ([data + client_frame(TEXT, b"late")], [bytes((byte,)) for byte in data]):
        events, sent, closes = converse(pieces)
        failed = events[-1]
        assert isinstance(failed, Failed)
        assert (failed.code, closes) == (code, True)
        assert read_frames(sent) == [(CLOSE, close_payload(code, failed.reason))]


def test_a_text_fails_before_it_is_complete() -> None:
    server = WebSocketServer()
    server.receive_data(client_frame(TEXT, EURO + b"\xff" + b"a" * 1000)[:12])
    assert isinstance(server.events_received()[0], Failed)
    events, _ = received(client_frame(TEXT, b"a\xf4\x90", fin=False))
    assert isinstance(events[0], Failed)


def test_a_long_message_fails_on_its_header() -> None:
    events, _ = received(b"\x82\xff\x00\x00\x00\x00\x00\x10\x00\x01")
    assert isinstance(events[0], Failed)
    assert received(b"\x82\xff\x00\x00\x00\x00\x00\x10\x00\x00") == ([], [])


def test_answers_pings() -> None:
    assert received(client_frame(PING, b"a") + client_frame(PING)) == (
        [PingReceived(b"a"), PingReceived(b"")],
        [(PONG, b"a"), (PONG, b"")],
    )


@pytest.mark.parametrize(
    ("payload", "event", "answer"),
    [
        (b"", CloseReceived(1005, ""), b""),
        (b"\x03\xe8", CloseReceived(1000, ""), b"\x03\xe8"),
        (b"\x0f\xa0bye", CloseReceived(4000, "bye"), b"\x0f\xa0"),
    ],
)
def test_the_peer_closes(payload: bytes, event: CloseReceived, answer: bytes) -> None:
    data = client_frame(TEXT, fin=False) + client_frame(CLOSE, payload) + client_frame(PING)
    assert received(data) == ([event], [(CLOSE, answer)])
    server = WebSocketServer()
    server.receive_data(data)
    server.receive_eof()
    assert (server.events_received(), server.should_close, server.is_open) == ([event], True, False)


def test_we_close() -> None:
    server = WebSocketServer()
    server.close(1001, "restart")
    server.close()
    assert read_frames(server.data_to_send()) == [(CLOSE, b"\x03\xe9restart")]
    assert (server.is_open, server.should_close) == (False, False)
    server.receive_data(client_frame(TEXT, b"late") + client_frame(PING) + client_frame(CLOSE, b"\x03\xe9"))
    assert server.events_received() == [TextReceived("late"), PingReceived(b""), CloseReceived(1001, "")]
    assert (server.data_to_send(), server.should_close) == (b"", True)


def test_a_failure_after_our_close_sends_no_second_one() -> None:
    server = WebSocketServer()
    server.close()
    server.data_to_send()
    server.receive_data(b"\xff\xff")
    assert isinstance(server.events_received()[0], Failed)
    assert (server.data_to_send(), server.should_close) == (b"", True)


def test_going_away_without_a_close_is_a_failure() -> None:
    server = WebSocketServer()
    server.receive_data(client_frame(TEXT, b"abc")[:-1])
    server.receive_eof()
    (event,) = server.events_received()
    assert isinstance(event, Failed)
    assert (event.code, server.data_to_send(), server.should_close) == (1006, b"", True)


def test_sends() -> None:
    server = WebSocketServer()
    server.send_text("é")
    server.send_text(b"b")
    server.send_binary(b"\xff")
    server.send_ping(b"p")
    assert read_frames(server.data_to_send()) == [(TEXT, "é".encode()), (TEXT, b"b"), (BINARY, b"\xff"), (PING, b"p")]
    assert server.data_to_send() == b""


MISUSES: list[Callable[[WebSocketServer], object]] = [
    lambda server: server.send_ping(b"a" * 126),
    lambda server: server.close(1005),
    lambda server: server.close(1006),
    lambda server: server.close(1000, "a" * 124),
]


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_raises_and_changes_nothing(misuse: Callable[[WebSocketServer], object]) -> None:
    server = WebSocketServer()
    with pytest.raises(LocalProtocolError, match="^cannot "):
        misuse(server)
    assert (server.is_open, server.data_to_send()) == (True, b"")


def test_sends_nothing_after_its_close() -> None:
    server = WebSocketServer()
    server.close()
    for misuse in (server.send_text, server.send_binary, server.send_ping):
        with pytest.raises(LocalProtocolError):
            misuse(b"a")


def seconds_to_receive(pieces: list[bytes]) -> float:
    server = WebSocketServer(1 << 24)
    begin = time.process_time()
    for piece in pieces:
        server.receive_data(piece)
    (event,) = server.events_received()
    assert isinstance(event, TextReceived)
    return time.process_time() - begin


@pytest.mark.parametrize("shape", ["bytes", "fragments"])
def test_time_grows_with_the_length_only(shape: str) -> None:
    """Eight times the message: a quadratic reader takes 64 times as long, a linear one 8 times."""

    def pieces(length: int) -> list[bytes]:
        if shape == "bytes":
            data = client_frame(TEXT, b"a" * length)
            return [data[at : at + 1] for at in range(len(data))]
        count = length * 4 // 64
        return [client_frame(TEXT if at == 0 else 0, b"a" * 64, fin=at == count - 1) for at in range(count)]

    short = min(seconds_to_receive(pieces(4096)) for _ in range(5))
    long = min(seconds_to_receive(pieces(4096 * 8)) for _ in range(3))
    assert long < 24 * short


def test_an_idle_connection_is_small() -> None:
    """Measured after messages both ways, so that nothing lazily allocated is left behind."""
    count = 500
    data = client_frame(TEXT, b"a", fin=False) + client_frame(PING, b"p") + client_frame(0, b"b")
    servers: list[WebSocketServer | None] = [None] * count
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for index in range(count):
            server = WebSocketServer()
            server.receive_data(data[:7])
            server.receive_data(data[7:])
            server.events_received()
            server.data_to_send()
            servers[index] = server
            del server
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / count < 300
