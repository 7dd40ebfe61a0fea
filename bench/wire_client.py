"""Clients that count every byte of one answer: of server-sent events, of JSON over a WebSocket, and of FM frames.

What is parsed is pure; a connection is a plain socket, as libraries do not tell what they received.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from bench.openai_servers import ServerProcess
from bench.processes import BenchError
from seedance.daemon.doors.infer import SUBPROTOCOL as JSON
from seedance.daemon.protocol.fm_client import ClientSession
from seedance.daemon.protocol.fm_frame import SUBPROTOCOL as FM
from seedance.daemon.protocol.fm_messages import End, Error, Infer, Tokens
from seedance.daemon.protocol.fm_session import Welcomed

PATIENCE_S: Final = 120.0
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10
# Where struct tcp_info has tcpi_data_segs_in (Linux 4.6): u32.
_DATA_SEGS_IN: Final = 152


class Answer(msgspec.Struct, frozen=True):
    """One answer: its text, what carried it, and what the client sent from its request on (the request left out)."""

    text: str
    events: int
    received_bytes: int
    segments: int
    sent_bytes: int


class Connection:
    """A socket that counts what comes and goes."""

    def __init__(self, server: ServerProcess) -> None:
        host, port = server.target.split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._segments_before = 0
        self.received_bytes = 0
        self.sent_bytes = 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self._socket.sendall(data)
        self.sent_bytes += len(data)

    def receive(self, timeout_s: float = PATIENCE_S) -> bytes:
        """Return what has come; raises TimeoutError, and BenchError at the end of the connection."""
        self._socket.settimeout(max(timeout_s, 0.001))
        data = self._socket.recv(1 << 16)
        if not data:
            raise BenchError("cannot go on: the server ended a connection before its answer")
        self.received_bytes += len(data)
        return data

    def begin(self) -> None:
        """Count from here on."""
        self.received_bytes = self.sent_bytes = 0
        self._segments_before = self._segments()

    def answer(self, text: str, events: int) -> Answer:
        """Return an answer with what was counted."""
        segments = self._segments() - self._segments_before
        return Answer(text, events, self.received_bytes, segments, self.sent_bytes)

    def _segments(self) -> int:
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int(struct.unpack_from("=I", info, _DATA_SEGS_IN)[0])


def dechunked(body: bytes) -> bytes | None:
    """Return the body that HTTP chunks carry; None while the last one has not come."""
    out, at = b"", 0
    while (end := body.find(b"\r\n", at)) >= 0:
        size = int(body[at:end].split(b";")[0], 16)
        if size == 0:
            return out
        out += body[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return None


def event_data(body: bytes) -> list[str]:
    """Return the data of server-sent events, the last one (`[DONE]`) left out."""
    lines = body.decode().splitlines()
    found = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    if not found or found[-1] != "[DONE]":
        raise BenchError("cannot use the answer: it does not end with [DONE]")
    return found[:-1]


def completion_text(data: str) -> str:
    """Return the text in one event of /v1/completions."""
    return "".join(choice["text"] for choice in json.loads(data)["choices"])


def ask_sse(server: ServerProcess, body: Mapping[str, Any]) -> Answer:
    """Ask /v1/completions for a streamed answer. Events without text (the last one) do not count as events."""
    with Connection(server) as connection:
        connection.begin()
        connection.send(server.request(body))
        connection.sent_bytes = 0
        received = b""
        while (head_end := received.find(b"\r\n\r\n")) < 0:
            received += connection.receive()
        while (whole := dechunked(received[head_end + 4 :])) is None:
            received += connection.receive()
        texts = [completion_text(data) for data in event_data(whole)]
        return connection.answer("".join(texts), sum(map(bool, texts)))


def client_frame(opcode: int, payload: bytes) -> bytes:
    """Return a WebSocket frame of a client; a masking key of zero leaves the payload as it is."""
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else bytes([0x80 | 126]) + size.to_bytes(2)
    return bytes([0x80 | opcode]) + length + bytes(4) + payload


def server_frames(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Return the whole frames in what a server has sent, as opcode and payload, and what is left of it."""
    frames, at = [], 0
    while len(data) - at >= 2:
        head, size = 2, data[at + 1]
        if size >= 126:
            head = 4 if size == 126 else 10
            size = int.from_bytes(data[at + 2 : at + head])
        if len(data) - at < head + size:
            break
        frames.append((data[at] & 0x0F, data[at + head : at + head + size]))
        at += head + size
    return frames, data[at:]


class WebSocket:
    """A client's WebSocket on a counting connection, upgraded; counting begins behind the handshake."""

    def __init__(self, connection: Connection, server: ServerProcess, path: str, protocol: str) -> None:
        self._connection = connection
        fields = {
            "Host": "localhost",
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Protocol": protocol,
            **server.headers(),
        }
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        connection.send("\r\n".join([*lines, "", ""]).encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.receive()
        if not head.startswith(b"HTTP/1.1 101"):
            raise BenchError(f"cannot upgrade: the server answered {head[:200]!r}")
        self._rest = head.split(b"\r\n\r\n", 1)[1]
        connection.begin()

    def send(self, opcode: int, payload: bytes) -> None:
        """Send one message."""
        self._connection.send(client_frame(opcode, payload))

    def messages(self, timeout_s: float = PATIENCE_S) -> Iterator[bytes]:
        """Wait for more of the server's messages and yield them; pings are answered."""
        frames, self._rest = server_frames(self._rest + self._connection.receive(timeout_s))
        for opcode, payload in frames:
            if opcode in (_TEXT, _BINARY):
                yield payload
            elif opcode == _PING:
                self.send(_PONG, payload)
            elif opcode == _CLOSE:
                raise BenchError(f"cannot go on: the server closed the WebSocket with {payload!r}")


def ask_json(server: ServerProcess, body: Mapping[str, Any]) -> Answer:
    """Ask /v2/infer."""
    with Connection(server) as connection:
        socket_ = WebSocket(connection, server, "/v2/infer", JSON)
        socket_.send(_TEXT, json.dumps(body).encode())
        connection.sent_bytes = 0
        texts: list[str] = []
        while True:
            for message in socket_.messages():
                part = json.loads(message)
                if "error" in part:
                    raise BenchError(f"cannot go on: /v2/infer answered {part['error']}")
                texts += [part["delta"]] if part.get("delta") else []
                if "finish_reason" in part:
                    return connection.answer("".join(texts), len(texts))


def ask_fm(server: ServerProcess, body: Mapping[str, Any]) -> Answer:
    """Ask /v2/stream, in a session of its own; the client's ACKs count as sent, its HELLO and INFER do not."""
    sampling = {key: value for key, value in body.items() if key not in ("model", "prompt", "stream")}
    infer = Infer(stream=1, model=body["model"], prompt=body["prompt"], sampling=sampling)
    with Connection(server) as connection:
        socket_ = WebSocket(connection, server, "/v2/stream", FM)
        session = ClientSession("bench-wire")
        session.connect(time.monotonic())
        data: list[bytes] = []
        while True:
            for event in fm_events(session, socket_):
                if isinstance(event, Welcomed):
                    session.infer(infer)
                    flush(session, socket_)
                    connection.sent_bytes = 0
                elif isinstance(event, Tokens):
                    data.append(event.data)
                elif isinstance(event, End):
                    return connection.answer(b"".join(data).decode(), len(data))
                elif isinstance(event, Error):
                    raise BenchError(f"cannot go on: /v2/stream answered {event.code}: {event.message}")


def flush(session: ClientSession, socket_: WebSocket) -> None:
    """Send what the session has to send."""
    for message in session.data_to_send(time.monotonic()):
        socket_.send(_BINARY, message)


def fm_events(session: ClientSession, socket_: WebSocket) -> list[Any]:
    """Send what is due, wait for something to come or a timer, and return the events."""
    flush(session, socket_)
    try:
        for message in socket_.messages(session.next_timer() - time.monotonic()):
            session.receive_data(message, time.monotonic())
    except TimeoutError:
        session.timer_fired(time.monotonic())
    return list(session.events_received())
