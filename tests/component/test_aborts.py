"""Clients that leave at any time, in any way: nothing of their requests stays anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import socket
import statistics
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from support.daemon import Daemon, part_of, wait_until
from support.raw_http import Connection, request
from support.synthetic import MODEL, expected_text
from websockets.frames import Frame, Opcode

LONG_PROMPT = "a word or two " * 600
ABORTS = 2000
AT_ONCE = 64
TIMEOUT_S = 60.0
COMPLETIONS = "/v1/completions"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger
_UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    "Sec-WebSocket-Version": "13",
}


class Aborter:
    """Makes requests that are left; every choice comes from one seeded generator."""

    def __init__(self, daemon: Daemon, aborts: int) -> None:
        host, _, port = daemon.address.rpartition(":")
        self._where = host, int(port)
        self._keys = list(daemon.keys.values())
        self._random = random.Random(4)
        self._left = aborts
        self.received_bytes = 0

    async def run(self) -> None:
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while self._left:
            self._left -= 1
            await self._abort_one()

    async def _abort_one(self) -> None:
        choose = self._random
        data = self._message()
        whole = choose.random() < 0.8
        sent = data if whole else data[: choose.randrange(len(data))]
        stays_s = choose.choice((0.0, 0.001, choose.uniform(0, 0.02), choose.uniform(0, 0.15)))
        reader, writer = await asyncio.open_connection(*self._where)
        try:
            with contextlib.suppress(OSError):  # the server may be the one that closes
                writer.write(sent)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(stays_s):
                        while received := await reader.read(65536):
                            self.received_bytes += len(received)
                choose.choice((self._close, self._reset, self._half_close))(writer)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5):  # a half-closed connection is the server's to close
                        await reader.read()
        finally:
            writer.transport.abort()

    @staticmethod
    def _close(writer: asyncio.StreamWriter) -> None:
        writer.close()

    @staticmethod
    def _reset(writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        writer.transport.abort()

    @staticmethod
    def _half_close(writer: asyncio.StreamWriter) -> None:
        writer.write_eof()

    def _message(self) -> bytes:
        """Return a request: over each door, streamed or whole, with a prompt that takes tokenising, reading or none."""
        choose = self._random
        prompts = "Once", [300] * choose.randrange(1, 300), LONG_PROMPT
        (prompt,) = choose.choices(prompts, (6, 3, 1))
        body: dict[str, object] = {"model": MODEL, "prompt": prompt, "seed": 1, "stream": choose.random() < 0.6}
        body["max_tokens"] = choose.choice((1, 5, 20, 4000))
        key = choose.choice(self._keys)
        door = choose.choice((self._completion, self._chat, self._infer, self._pipelined))
        return door(key, body)

    @staticmethod
    def _completion(key: str, body: dict[str, object]) -> bytes:
        return request("POST", COMPLETIONS, key, {**body, "n": 2})

    @staticmethod
    def _chat(key: str, body: dict[str, object]) -> bytes:
        content = body.pop("prompt")
        message = {"role": "user", "content": content if isinstance(content, str) else "Hello"}
        return request("POST", "/v1/chat/completions", key, {**body, "messages": [message]})

    @staticmethod
    def _infer(key: str, body: dict[str, object]) -> bytes:
        frames = [
            Frame(Opcode.TEXT, msgspec.json.encode({**body, "id": str(number)})).serialize(mask=True)
            for number in range(3)
        ]
        return request("GET", "/v2/infer", key, fields=_UPGRADE) + b"".join(frames)

    def _pipelined(self, key: str, body: dict[str, object]) -> bytes:
        other = self._random.choice(self._keys)  # often another tenant's: the connection changes hands on the way
        last = request("POST", COMPLETIONS, other, {**body, "max_tokens": 4000})
        return request("GET", "/v1/models", key) + request("POST", COMPLETIONS, key, {**body, "max_tokens": 2}) + last


def first_token_s(daemon: Daemon) -> float:
    """Return the median time to the first token of a request on a new connection."""
    times = []
    for _ in range(15):
        with Connection(daemon.address) as connection:
            begun = time.perf_counter()
            body = {"model": MODEL, "prompt": "Once", "max_tokens": 2, "stream": True}
            connection.send(request("POST", COMPLETIONS, daemon.keys["acme"], body))
            assert connection.head()[0] == 200
            chunks = connection.chunks()
            assert b'"text"' in next(chunk for chunk in chunks if chunk.startswith(b"data: "))
            times.append(time.perf_counter() - begun)
            for _ in chunks:
                pass
    return statistics.median(times)


def ledger(daemon: Daemon) -> tuple[int, int]:
    """Return the tokens that all tenants were charged for, and those that the engine made."""
    status = daemon.status()
    assert status.engine.statistics is not None
    return sum(tenant.used.output_tokens for tenant in status.tenants), status.engine.statistics.tokens


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_aborts_leave_nothing(doors: Daemon) -> None:
    aborts = part_of(ABORTS, doors.tenant("acme").driver)
    for tenant in doors.keys:
        doors.text(tenant, content=LONG_PROMPT)  # there is a process for those from now on
    workers = [doors.tenant(tenant).worker_pid for tenant in doors.keys]
    before_s = first_token_s(doors)
    wait_until(doors.is_at_rest)
    descriptors = doors.descriptors()
    charged, made = ledger(doors)
    aborter = Aborter(doors, aborts)
    begun = time.monotonic()
    asyncio.run(aborter.run())
    took_s = time.monotonic() - begun
    wait_until(doors.is_at_rest)
    wait_until(lambda: _no_more_than(descriptors, doors.descriptors()))
    assert [doors.tenant(tenant).worker_pid for tenant in doors.keys] == workers
    assert aborter.received_bytes > 0
    charged, made = (after - before for after, before in zip(ledger(doors), (charged, made), strict=True))
    # What the engine made is charged, but for what was on its way when a client was seen to have gone.
    assert 0 <= made - charged < 20 * aborts
    after_s = first_token_s(doors)
    print(
        f"{aborts} aborts in {took_s:.1f} s; first token {1000 * before_s:.1f} ms before, {1000 * after_s:.1f} after;"
        f" {made} tokens made, {charged} charged;"
        f" workers' memory {[resident_bytes(pid) >> 20 for pid in workers]} MiB"
    )
    assert after_s < max(2 * before_s, before_s + 0.02)
    assert "cannot go on" not in doors.log.read_text()
    assert "Traceback" not in doors.log.read_text()


def _no_more_than(before: dict[str, int], after: dict[str, int]) -> bool:
    return all(after.get(name, 0) <= count for name, count in before.items())


def _has_made(daemon: Daemon, tokens: int) -> bool:
    return daemon.tenant("acme").used.output_tokens >= tokens


def test_an_abort_is_seen_within_a_step(doors: Daemon) -> None:
    """Of 500 tokens/s, hardly any is made after the client has gone."""
    leave: tuple[Callable[[Connection], None], ...] = (
        Connection.close,
        Connection.reset,
        Connection.finish_sending,
    )
    for stream in (True, False):
        for go in leave:
            before = doors.tenant("acme").used.output_tokens
            connection = Connection(doors.address)
            body = {"model": MODEL, "prompt": "Once", "max_tokens": 8000, "stream": stream}
            connection.send(request("POST", COMPLETIONS, doors.keys["acme"], body))
            wait_until(functools.partial(_has_made, doors, before + 20))
            seen = doors.tenant("acme").used.output_tokens
            begun = time.monotonic()
            go(connection)
            wait_until(doors.is_at_rest)
            took_s = time.monotonic() - begun
            after = doors.tenant("acme").used.output_tokens
            assert after - seen <= 500 * (took_s + 0.1), "it went on for longer than it took to look"
            connection.close()


def test_what_is_left_of_a_request_does_not_change_the_next_one(doors: Daemon) -> None:
    for number in range(20):
        with Connection(doors.address) as connection:
            body = {"model": MODEL, "prompt": "Once", "max_tokens": 4000, "stream": True}
            connection.send(request("POST", COMPLETIONS, doors.keys["acme"], body))
            assert connection.head()[0] == 200
        with Connection(doors.address) as connection:
            body = {"model": MODEL, "prompt": "Once", "max_tokens": 5, "seed": number}
            connection.send(request("POST", COMPLETIONS, doors.keys["acme"], body))
            assert connection.response().json()["choices"][0]["text"] == expected_text("Once", 5, number)
