"""Owners for the protocol objects, as simple as an owner can be: what property, fuzz and unit tests drive them with."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from seedance.daemon.protocol import http, websocket
from seedance.daemon.protocol.frame import Opcode, unmask
from seedance.daemon.protocol.head import Limits, Request
from seedance.daemon.protocol.http import HeadReceived, HttpServer, ProtocolFailed, RequestReceived

MASK = b"\x37\xfa\x21\x3d"
SMALL_LIMITS = Limits(
    head_bytes=1024,
    headers=8,
    target_bytes=256,
    body_bytes=512,
    chunk_line_bytes=32,
    chunk_extension_bytes=48,
    trailer_bytes=64,
    buffer_bytes=4096,
)


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """Return `data` in pieces, cut at those of `places` that lie inside."""
    at = [0, *sorted({place for place in places if 0 < place < len(data)}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(at)]


def serve(pieces: Sequence[bytes], limits: Limits = SMALL_LIMITS) -> tuple[list[http.Event], bytes, bool]:
    """Let a server that accepts and echoes everything read `pieces` and the end of the stream.

    Returns the events, what was sent, and whether it would close.
    """
    server = HttpServer(limits)
    events: list[http.Event] = []
    sent = b""

    def settle() -> None:
        nonlocal sent
        while news := server.events_received():
            events.extend(news)
            for event in news:
                answer(server, event)
        sent += server.data_to_send()

    for piece in pieces:
        server.receive_data(piece)
        settle()
    server.receive_eof()
    settle()
    return events, sent, server.should_close


def answer(server: HttpServer, event: http.Event) -> None:
    """Accept every body, echo it; where the path says so, as a stream."""
    match event:
        case HeadReceived():
            server.accept_body()
        case RequestReceived(request, body) if request.path.startswith("/stream"):
            server.start_stream(200, [])
            server.send_chunk(body)
            server.end_stream()
        case RequestReceived(request, body):
            server.send_response(200, [("X-Path", request.path)], body)
        case ProtocolFailed():
            assert server.should_close


def converse(pieces: Sequence[bytes], message_bytes: int = 512) -> tuple[list[websocket.Event], bytes, bool]:
    """Let a WebSocket that only listens read `pieces` and the end of the stream."""
    server = websocket.WebSocketServer(message_bytes)
    events: list[websocket.Event] = []
    for piece in pieces:
        server.receive_data(piece)
        events += server.events_received()
    server.receive_eof()
    events += server.events_received()
    return events, server.data_to_send(), server.should_close


def client_frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, mask: bytes = MASK, reserved: int = 0
) -> bytes:
    """Return a frame as a client sends it."""
    first = (0x80 if fin else 0) | reserved << 4 | opcode
    length = len(payload)
    if length < 126:
        header = bytes((first, 0x80 | length))
    elif length < 1 << 16:
        header = bytes((first, 0x80 | 126)) + length.to_bytes(2, "big")
    else:
        header = bytes((first, 0x80 | 127)) + length.to_bytes(8, "big")
    return header + mask + unmask(payload, mask)


def read_frames(data: bytes) -> list[tuple[Opcode, bytes]]:
    """Return the frames that a server sent; each must be whole, unmasked and final."""
    frames = []
    at = 0
    while at < len(data):
        first, length = data[at], data[at + 1]
        at += 2
        assert first & 0xF0 == 0x80
        assert length < 0x80
        if length >= 126:
            size = 2 if length == 126 else 8
            length = int.from_bytes(data[at : at + size], "big")
            at += size
        payload = data[at : at + length]
        assert len(payload) == length
        frames.append((Opcode(first & 0x0F), payload))
        at += length
    return frames


def head_of(data: bytes) -> Request:
    """Return the request that `data` begins with; it must be whole and good."""
    server = HttpServer()
    server.receive_data(data)
    (event,) = server.events_received()
    assert isinstance(event, HeadReceived)
    return event.request
