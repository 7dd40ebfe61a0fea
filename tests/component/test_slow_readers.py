"""Clients that read slowly or not at all: what is kept for them is bounded, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import DRIVERS, Daemon, part_of, running, wait_until
from support.live import LiveStreams, percentile
from support.raw_http import Connection, request
from support.synthetic import MODEL, expected_text
from websockets.frames import Frame, Opcode

SLOW = 50
FAST = 5
TOKENS_PER_S = 400
MAX_BACKLOG_BYTES = 64 << 10
COMPLETIONS = "/v1/completions"
RECEIVE_BUFFER_BYTES = 4096
"""Of slow clients, so that their backlog is soon the server's."""


@pytest.fixture(scope="module", params=DRIVERS)
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    tables = {
        "engine.synthetic": {"tokens_per_s": TOKENS_PER_S, "prompt_tokens_per_s": 0},
        "worker": {"max_backlog": f"{MAX_BACKLOG_BYTES}B"},
        "http": {"idle_timeout": "1s", "ping_interval": "1s"},
    }
    with running(tmp_path_factory.mktemp("d"), "acme", io=request.param, tables=tables) as daemon:
        daemon.text("acme")
        yield daemon
        daemon.stop()


@pytest.fixture(autouse=True)
def at_rest(daemon: Daemon) -> Iterator[None]:
    yield
    wait_until(daemon.is_at_rest)


def stream(daemon: Daemon, *, receive_buffer_bytes: int = 0, **fields: Any) -> Connection:
    """Ask for a stream, and read its head."""
    connection = Connection(daemon.address, receive_buffer_bytes=receive_buffer_bytes)
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 30_000, "stream": True, **fields}
    connection.send(request("POST", COMPLETIONS, daemon.keys["acme"], body))
    return connection


def resident_bytes(daemon: Daemon) -> int:
    return int(Path(f"/proc/{daemon.tenant('acme').worker_pid}/statm").read_text().split()[1]) * 4096


def _sip(connection: Connection) -> None:
    connection.sock.setblocking(False)
    with contextlib.suppress(OSError):
        connection.sock.recv(10)


def test_readers_at_a_trickle_harm_only_themselves(daemon: Daemon) -> None:
    clients = part_of(SLOW, daemon.tenant("acme").driver)
    live = LiveStreams([stream(daemon, seed=number) for number in range(FAST)])
    slow: list[Connection] = []
    try:
        live.watch(lambda seconds: seconds > 0.5)
        alone, _ = live.watch(lambda seconds: seconds > 1.5)
        before_bytes = resident_bytes(daemon)
        slow += [stream(daemon, receive_buffer_bytes=RECEIVE_BUFFER_BYTES, seed=number) for number in range(clients)]
        begun = time.monotonic()
        most_bytes = before_bytes

        def see_them_cut_off() -> None:
            nonlocal most_bytes
            while daemon.tenant("acme").used.streams > FAST:
                most_bytes = max(most_bytes, resident_bytes(daemon))
                time.sleep(0.05)

        def are_cut_off(seconds: float) -> bool:
            assert seconds < 60
            for connection in slow[: clients // 2]:  # the other half is not read at all
                _sip(connection)
            return not watcher.is_alive()

        watcher = threading.Thread(target=see_them_cut_off)
        watcher.start()
        beside, _ = live.watch(are_cut_off, 0.1)
        gone_after_s = time.monotonic() - begun
        after, _ = live.watch(lambda seconds: seconds > 1.5)
        p99 = [1000 * percentile(gaps, 0.99) for gaps in (alone, beside, after)]
        print(
            f"{clients} slow readers were gone after {gone_after_s:.1f} s; time between tokens, p99:"
            f" {p99[0]:.1f} ms before, {p99[1]:.1f} ms beside, {p99[2]:.1f} ms after them;"
            f" worker's memory {before_bytes >> 20} MiB before, {most_bytes >> 20} MiB at most"
        )
        assert most_bytes - before_bytes < clients * 2 * MAX_BACKLOG_BYTES + (8 << 20)
        assert p99[1] < max(4 * max(p99[0], p99[2]), 40)
    finally:
        live.close()
        for connection in slow:
            connection.close()


def test_a_slow_reader_sees_the_connection_end_and_no_broken_event(daemon: Daemon) -> None:
    with stream(daemon, receive_buffer_bytes=RECEIVE_BUFFER_BYTES) as connection:
        wait_until(lambda: daemon.tenant("acme").used.streams == 1)
        wait_until(lambda: daemon.tenant("acme").used.streams == 0)
        data = b""
        with pytest.raises(ConnectionResetError):
            while piece := connection.sock.recv(65536):
                data += piece
        # Cut, and visibly so: neither a last chunk nor a last event.
        assert not data.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in data


def test_a_websocket_client_that_does_not_read_is_cut_off(daemon: Daemon) -> None:
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Version": "13",
    }
    frames = [
        Frame(Opcode.TEXT, json.dumps({"id": str(number), "prompt": "Once", "max_tokens": 20_000}).encode())
        for number in range(20)
    ]
    with Connection(daemon.address, receive_buffer_bytes=RECEIVE_BUFFER_BYTES) as connection:
        connection.send(request("GET", "/v2/infer", daemon.keys["acme"], fields=upgrade))
        connection.send(*(frame.serialize(mask=True) for frame in frames))
        wait_until(lambda: daemon.tenant("acme").used.streams == len(frames))
        wait_until(daemon.is_at_rest)


def test_a_websocket_client_that_only_sends_is_cut_off(daemon: Daemon) -> None:
    """Each message gets an answer, and each ping a pong, which nobody reads."""
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Version": "13",
    }
    ping = Frame(Opcode.PING, b"x" * 125).serialize(mask=True) * 100
    bad = Frame(Opcode.TEXT, b"no request").serialize(mask=True) * 100
    for flood in (ping, bad):
        with Connection(daemon.address, receive_buffer_bytes=RECEIVE_BUFFER_BYTES) as connection:
            connection.send(request("GET", "/v2/infer", daemon.keys["acme"], fields=upgrade))
            with pytest.raises(ConnectionError):
                for _ in range(100_000):
                    connection.send(flood)
        wait_until(daemon.is_at_rest)


def test_a_client_that_asks_and_asks_and_reads_nothing(daemon: Daemon) -> None:
    """Whole answers are not more than one ahead of their reader: it is not read from either."""
    before_bytes = resident_bytes(daemon)
    flood = request("GET", "/v1/models", daemon.keys["acme"]) * 200
    with Connection(daemon.address, receive_buffer_bytes=RECEIVE_BUFFER_BYTES) as connection:
        connection.sock.settimeout(0.5)
        sent_bytes = 0
        with pytest.raises(OSError, match="timed out|reset|Broken pipe"):
            while True:
                connection.sock.sendall(flood)
                sent_bytes += len(flood)
        # What fits into the buffers of two sockets, and not what a client is able to send.
        assert sent_bytes < 32 << 20
        assert resident_bytes(daemon) - before_bytes < 8 << 20
        # It was slow, not lost: it can read now what it asked for, unless its time was up.
        connection.sock.settimeout(10)
        assert connection.response().status == 200


def test_a_large_answer_waits_for_its_reader_but_not_for_ever(daemon: Daemon) -> None:
    """`idle_timeout` is 1 s; the answer is far larger than all buffers, and larger than what a stream may leave."""
    body = {"model": MODEL, "prompt": ["Once"] * 16, "n": 4, "max_tokens": 60, "logprobs": 20}
    whole = request("POST", COMPLETIONS, daemon.keys["acme"], body)
    with Connection(daemon.address, receive_buffer_bytes=RECEIVE_BUFFER_BYTES) as connection:
        made = daemon.tenant("acme").used.output_tokens
        connection.send(whole)
        wait_until(lambda: daemon.tenant("acme").used.output_tokens == made + 64 * 60)
        # Nobody reads: the connection goes.
        wait_until(daemon.is_at_rest)
    with Connection(daemon.address) as connection:
        connection.send(whole)
        status, fields = connection.head()
        assert status == 200
        left = int(fields["content-length"])
        assert left > 10 * MAX_BACKLOG_BYTES
        data = b""
        begun = time.monotonic()
        while left > len(data):
            data += connection.read(min(left - len(data), left // 12 + 1))
            if time.monotonic() - begun < 2.4:
                time.sleep(0.2)  # slower than `idle_timeout` in all, but it goes on
        texts = [choice["text"] for choice in json.loads(data)["choices"]]
        assert texts[0] == expected_text("Once", 60)


def test_a_connection_on_its_way_to_another_tenant_does_not_wait_for_ever(daemon: Daemon) -> None:
    """It is handed back once its answers are out, which they never are."""
    body = {"model": MODEL, "prompt": ["Once"] * 16, "n": 4, "max_tokens": 60, "logprobs": 20}
    with Connection(daemon.address, receive_buffer_bytes=RECEIVE_BUFFER_BYTES) as connection:
        made = daemon.tenant("acme").used.output_tokens
        connection.send(request("POST", COMPLETIONS, daemon.keys["acme"], body) + request("GET", "/", "sk-seed-other"))
        wait_until(lambda: daemon.tenant("acme").used.output_tokens == made + 64 * 60)
        wait_until(daemon.is_at_rest)


def test_the_others_go_on_while_one_answer_is_stuck(daemon: Daemon) -> None:
    with stream(daemon, receive_buffer_bytes=RECEIVE_BUFFER_BYTES):
        for seed in range(20):
            with stream(daemon, seed=seed, max_tokens=3) as other:
                assert other.response().status == 200
