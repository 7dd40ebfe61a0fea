"""Restarts of the loaded service: sessions and their streams go on, as systemd keeps their journals meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable

import pytest
from support.fm_stream import FmClient, FmStream
from support.synthetic import MODEL, expected_text, whole_tokens
from support.system_service import PORT, TIMEOUT_S, UNIT, Service, systemctl, wait_until

PROMPT = "Once upon a time"
SESSIONS = 4
STREAMS = 25
"""Of each session."""
TOKENS = 120
ENGINE = {"engine.synthetic": {"tokens_per_s": 4, "step": "250ms"}}


def restart(service: Service) -> None:
    systemctl("restart", UNIT)


def kill_the_supervisor(service: Service) -> None:
    restarts = int(service.show("NRestarts"))
    os.kill(service.pid, signal.SIGKILL)
    wait_until(lambda: int(service.show("NRestarts")) > restarts, "systemd starts it again")
    wait_until(lambda: service.show("ActiveState") == "active", "it serves again")


def stored(service: Service) -> int:
    return int(service.show("NFileDescriptorStore"))


@pytest.mark.parametrize("end", [restart, kill_the_supervisor])
def test_a_hundred_streams_go_on(service: Service, end: Callable[[Service], None]) -> None:
    service.configure(ENGINE)
    service.add_tenant("acme", f"[tokens]\nstreams = {SESSIONS * STREAMS}\n")
    systemctl("start", "seedanced.socket")
    service.start()

    async def run() -> None:
        async with asyncio.timeout(4 * TIMEOUT_S), contextlib.AsyncExitStack() as stack:
            address = f"127.0.0.1:{PORT}"
            clients = [
                await stack.enter_async_context(
                    FmClient(address, service.keys["acme"], client_id=str(number), open_timeout=TIMEOUT_S)
                )
                for number in range(SESSIONS)
            ]
            streams: list[tuple[FmStream, int, int]] = []
            for seed in range(SESSIONS * STREAMS):
                tokens = whole_tokens(PROMPT, TOKENS, seed)
                stream = clients[seed % SESSIONS].ask(PROMPT, model=MODEL, seed=seed, max_tokens=tokens)
                streams.append((stream, seed, tokens))
            for stream, _, _ in streams:
                await stream.wait(lambda stream: len(stream.data) > 0)
            assert await asyncio.to_thread(stored, service) == 1
            sizes = [len(stream.data) for stream, _, _ in streams]
            began_s = time.monotonic()
            await asyncio.to_thread(end, service)
            for (stream, _, _), size in zip(streams, sizes, strict=True):
                await stream.wait(lambda stream, size=size: len(stream.data) > size)
            print(f"stall: {time.monotonic() - began_s:.1f} s")
            for stream, seed, tokens in streams:
                last = await stream.end()
                assert stream.text == expected_text(PROMPT, tokens, seed)
                assert last.usage["completion_tokens"] == tokens
            assert all(welcome.continued for client in clients for welcome in client.welcomes[1:])

    asyncio.run(run())


def test_a_stop_keeps_nothing(service: Service) -> None:
    service.add_tenant("acme")
    service.start()

    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            client = FmClient(
                f"127.0.0.1:{PORT}", service.keys["acme"], keeps_trying=False, open_timeout=TIMEOUT_S
            )
            async with client:
                stream = client.ask(PROMPT, model=MODEL, max_tokens=5000)
                await stream.wait(lambda stream: len(stream.data) > 0)
                assert await asyncio.to_thread(stored, service) == 1
                await asyncio.to_thread(service.stop)
                assert "draining" in client.notes

    asyncio.run(run())
    assert stored(service) == 0
