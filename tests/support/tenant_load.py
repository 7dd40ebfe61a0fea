"""Clients of one tenant as a process of their own: many connections, one thread, no work but what they send and read.

    python -m support.tenant_load KIND ADDRESS KEY CONNECTIONS

KIND is what each connection does, again and again, until SIGTERM ends the process:

    answers   ask for an answer of 60 kB that costs the server little (MODEL), without waiting for the one before
    prompts   ask for one token after a prompt of 32 kB, likewise
    bodies    send a body of 100 kB that is no JSON, likewise
    huge      send a body of 4 MB that is no JSON, likewise
    hoard     send a body of 7 MB but for its last byte, and wait
    tokens    ask for a long text over a WebSocket and take down when each message arrives, as the kernel saw it

It prints READY once all connections are open, and tokens come on those that wait for them; and a JSON object at the end
(Outcome).
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import selectors
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec
from support.raw_http import request
from support.wire import SO_TIMESTAMPNS

READY: Final = "ready"
MODEL: Final = "synthetic-" + 60_000 * "x"
"""What the engine's model is to be called: who asks which models there are gets a big answer for little work."""

LONG_TOKENS: Final = 30_000

_READ_BYTES: Final = 1 << 18
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_STATUS_BYTES: Final = len(b"HTTP/1.1 200 ")
_LATE: Final = "🌙".encode()
"""The only text of the synthetic engine before which a token has none, so that this message is of two tokens' time."""

# First bytes of WebSocket frames that are whole messages.
_TEXT: Final = 0x81
_PING: Final = 0x89
_PONG: Final = 0x8A
_TIMESPEC: Final = struct.Struct("qq")
_PAUSE_S: Final = 0.2


class Outcome(msgspec.Struct):
    """What a load saw.

    `statuses` counts the answers by HTTP status, `ended` the connections that the server ended: "closed" or an errno's
    text. `arrivals` has, by connection, when each token of its stream arrived (seconds of CLOCK_REALTIME).
    """

    received_bytes: int = 0
    statuses: dict[str, int] = {}
    ended: dict[str, int] = {}
    arrivals: list[list[float]] = []


class Client:
    """One connection that sends `content` over and over, as far as the socket takes it; opened anew when it ends."""

    def __init__(self, load: Load, content: bytes, *, repeats: bool, stamps: bool = False) -> None:
        self._load = load
        self._content = content
        self._repeats = repeats
        self._stamps = stamps
        self.arrivals: list[float] = []
        self.open()

    def open(self) -> None:
        self.sock = socket.create_connection(self._load.address, timeout=60)
        self.sock.setblocking(False)
        if self._stamps:
            self.sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._sent = 0
        self._tail = b""
        self._load.selector.register(self.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def ready(self, events: int) -> None:
        """Do what the socket is ready for."""
        try:
            if events & selectors.EVENT_READ:
                self._receive()
            elif events & selectors.EVENT_WRITE:
                self._send()
        except OSError as exc:
            self._end(exc.strerror or str(exc))

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._sent += self.sock.send(memoryview(self._content)[self._sent : self._sent + _READ_BYTES])
        if self._sent < len(self._content):
            return
        if self._repeats:
            self._sent = 0
        else:
            self._load.selector.modify(self.sock, selectors.EVENT_READ, self)

    def _receive(self) -> None:
        data, ancillary, _flags, _address = self.sock.recvmsg(_READ_BYTES, 64 if self._stamps else 0)
        if not data:
            self._end("closed")
            return
        outcome = self._load.outcome
        outcome.received_bytes += len(data)
        seen = self._tail + data
        for status in _STATUS.findall(seen):
            self._load.statuses[status.decode()] += 1
        self._tail = seen[-_STATUS_BYTES + 1 :]
        for _level, kind, stamp in ancillary:
            if kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(stamp)
                self._read_messages(data, seconds + nanoseconds / 1e9)

    def _read_messages(self, data: bytes, at: float) -> None:
        """Take down the tokens among frames, which are short and come whole, and answer pings."""
        while data and data[0] in (_TEXT, _PING):
            payload = data[2 : 2 + data[1]]
            if data[0] == _PING:
                self.sock.send(bytes((_PONG, 0x80 | data[1])) + bytes(4) + payload)
            elif _LATE in payload and self.arrivals:
                self.arrivals += [(self.arrivals[-1] + at) / 2, at]
            else:
                self.arrivals.append(at)
            data = data[2 + data[1] :]

    def _end(self, how: str) -> None:
        self._load.ended[how] += 1
        self._load.selector.unregister(self.sock)
        self.sock.close()
        self._load.reopen_at.append((time.monotonic() + _PAUSE_S, self))


class Load:
    """All connections of a load."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.address = host, int(port)
        self.selector = selectors.DefaultSelector()
        self.outcome = Outcome()
        self.statuses: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.reopen_at: list[tuple[float, Client]] = []
        self.clients: list[Client] = []

    def run(self, stopped: Callable[[], bool]) -> Outcome:
        """Serve the connections until `stopped`."""
        while not stopped():
            for key, events in self.selector.select(0.1):
                key.data.ready(events)
            self._reopen()
        self.outcome.statuses = dict(self.statuses)
        self.outcome.ended = dict(self.ended)
        self.outcome.arrivals = [client.arrivals for client in self.clients if client.arrivals]
        return self.outcome

    def _reopen(self) -> None:
        now = time.monotonic()
        while self.reopen_at and self.reopen_at[0][0] <= now:
            _, client = self.reopen_at.pop(0)
            try:
                client.open()
            except OSError as exc:
                self.ended[exc.strerror or str(exc)] += 1
                self.reopen_at.append((now + _PAUSE_S, client))


def content(kind: str, key: str, number: int) -> bytes:
    """Return what a connection sends."""
    if kind == "answers":
        return request("GET", "/v1/models", key)
    if kind == "tokens":
        opened = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        opened["Sec-WebSocket-Key"] = base64.b64encode(bytes(16)).decode()
        body = {"model": MODEL, "prompt": f"Client {number}", "max_tokens": LONG_TOKENS, "ignore_eos": True}
        return request("GET", "/v2/infer", key, fields=opened) + text_message(json.dumps(body).encode())
    bodies: dict[str, Any] = {
        "prompts": {"model": MODEL, "prompt": "a big prompt " * 2500, "max_tokens": 1},
        "bodies": b"x" * 100_000,
        "huge": b"x" * 4_000_000,
        "hoard": {"model": MODEL, "prompt": "x" * 7_000_000},
    }
    whole = request("POST", "/v1/completions", key, bodies[kind])
    return whole[:-1] if kind == "hoard" else whole


def text_message(text: bytes) -> bytes:
    """Return a WebSocket message of a client's (RFC 6455, 5.2), of at least 126 bytes, masked with zeros."""
    short = len(text) < 1 << 16
    head = struct.pack("!BBH" if short else "!BBQ", _TEXT, 0x80 | (126 if short else 127), len(text))
    return head + bytes(4) + text


def main() -> None:
    """Run a load until SIGTERM."""
    kind, address, key, connections = sys.argv[1:]
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ending.append(number))
    load = Load(address)
    for number in range(int(connections)):
        repeats = kind in ("answers", "prompts", "bodies", "huge")
        load.clients.append(Client(load, content(kind, key, number), repeats=repeats, stamps=kind == "tokens"))
    load.run(lambda: bool(ending) or kind != "tokens" or all(client.arrivals for client in load.clients))
    print(READY, flush=True)
    outcome = load.run(lambda: bool(ending))
    print(json.dumps(msgspec.to_builtins(outcome)), flush=True)


if __name__ == "__main__":
    main()
