"""A thousand clients that go away after about a second: the ledger has what the engine made, and nothing is left.

Most of them have a slot by then, some wait for one; they close, reset, or only say that they send no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator

import pytest
from support.daemon import Daemon, wait_until, working
from support.raw_http import request
from support.synthetic import MODEL

CLIENTS = 1000
TENANTS = ("one", "two", "three", "four")
SLOTS = 400
TIMEOUT_S = 60.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    tables = {
        "engine": {"max_streams": SLOTS},
        "engine.synthetic": {"tokens_per_s": 20, "prompt_tokens_per_s": 20_000},
    }
    limits = dict.fromkeys(TENANTS, "[tokens]\nstreams = 256\n[requests]\nqueue = 256\n")
    with working(tmp_path_factory.mktemp("d"), limits, tables=tables) as daemon:
        yield daemon


class Vanishing:
    """Clients that ask, read for about a second, and are gone."""

    def __init__(self, daemon: Daemon) -> None:
        host, _, port = daemon.address.rpartition(":")
        self._where = host, int(port)
        self._keys = [daemon.keys[tenant] for tenant in TENANTS]
        self._random = random.Random(9)
        self.refused = self.served = 0

    async def run(self) -> None:
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(self._one(number, self._random.uniform(0, 4), self._random.uniform(0.6, 1.4)))

    async def _one(self, number: int, comes_s: float, stays_s: float) -> None:
        await asyncio.sleep(comes_s)
        body = {"model": MODEL, "prompt": [300] * (1 + number % 50), "max_tokens": 4000, "stream": True}
        reader, writer = await asyncio.open_connection(*self._where)
        writer.write(request("POST", "/v1/completions", self._keys[number % len(self._keys)], body))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(stays_s):
                head = await reader.readuntil(b"\r\n\r\n")
                self.refused += b" 200 " not in head
                while data := await reader.read(65536):
                    self.served += b"data: {" in data
        if number % 3 == 0:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        elif number % 3 == 1:
            writer.write_eof()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(5):  # a half-closed connection is the server's to close
                    while await reader.read(65536):
                        pass
        writer.transport.abort()


def counted(daemon: Daemon) -> tuple[int, int, int]:
    """Return the output tokens of all tenants by the ledger, by their workers, and by the engine."""
    status = daemon.status()
    assert status.engine.statistics is not None
    engines = [tenant.engine for tenant in status.tenants if tenant.engine is not None]
    charged = sum(tenant.used.output_tokens for tenant in status.tenants)
    return sum(entry.output_tokens for entry in engines), charged, status.engine.statistics.tokens


def test_a_thousand_clients_that_vanish_leave_nothing_and_no_token_uncounted(daemon: Daemon) -> None:
    wait_until(daemon.is_at_rest)
    clients = Vanishing(daemon)
    began_s = time.monotonic()
    asyncio.run(clients.run())
    wait_until(daemon.is_at_rest)
    took_s = time.monotonic() - began_s
    ledger, charged, made = counted(daemon)
    print(f"{CLIENTS} clients gone after {took_s:.1f} s: {made} tokens made, {ledger} in the ledger, {charged} charged")
    assert clients.refused == 0
    assert clients.served > CLIENTS
    assert ledger == made > 5 * CLIENTS
    # What was on its way when a client was seen to have gone is not charged to its tenant.
    assert 0 <= made - charged <= made / 10
    for tenant in TENANTS:
        entry = daemon.tenant(tenant).engine
        assert entry is not None
        assert (entry.running, entry.waiting, entry.kv_blocks) == (0, 0, 0), "no reservation is open"
