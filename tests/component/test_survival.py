"""Deaths of every process under load, and restarts of all: streams of FM sessions go on with the same text."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.fd_store import FdStore
from support.fm_stream import FmClient, FmStream
from support.survival import both_ends, managed, serving, stop, worker
from support.synthetic import MODEL, expected_text, whole_tokens

PROMPT = "Once upon a time"
TIMEOUT_S = 60.0
SESSIONS = 5
STREAMS = 10
"""Of each session."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(tmp_path_factory.mktemp("d")) as daemon:
        yield daemon


async def _grown(stream: FmStream, size: int) -> None:
    """Wait for so much text, or for all of it: what did not have to stand still may be over by now."""
    await stream.wait(lambda stream: len(stream.data) >= size or stream.last is not None)


class Load:
    """Clients with streams, each of which must end with its own text and count."""

    def __init__(self, daemon: Daemon, clients: list[FmClient], tokens: int) -> None:
        self.daemon = daemon
        self.clients = clients
        self._streams: list[tuple[FmStream, int, int]] = []
        for place, client in enumerate(clients):
            for number in range(STREAMS):
                seed = place * STREAMS + number
                count = whole_tokens(PROMPT, tokens + seed, seed)
                stream = client.ask(PROMPT, model=MODEL, seed=seed, max_tokens=count)
                self._streams.append((stream, seed, count))

    async def more(self, characters: int) -> None:
        """Wait until every stream has so much more text."""
        sizes = [len(stream.data) for stream, _, _ in self._streams]
        for (stream, _, _), size in zip(self._streams, sizes, strict=True):
            await _grown(stream, size + characters)

    async def end(self) -> None:
        """Wait for all to end, and see that nothing was lost and nothing came twice."""
        for stream, seed, count in self._streams:
            end = await stream.end()
            assert stream.text == expected_text(PROMPT, count, seed)
            assert (end.finish_reason, end.usage["completion_tokens"]) == ("length", count)
        assert all(len(client.welcomes) == client.connections for client in self.clients)
        assert all(welcome.continued for client in self.clients for welcome in client.welcomes[1:])


@contextlib.asynccontextmanager
async def load(daemon: Daemon, tokens: int = 150, **options: Any) -> AsyncIterator[Load]:
    """Run 50 streams of five clients."""
    async with asyncio.timeout(TIMEOUT_S), contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                FmClient(daemon.address, daemon.keys["acme"], client_id=str(number), **options)
            )
            for number in range(SESSIONS)
        ]
        found = Load(daemon, clients, tokens)
        await found.more(10)
        yield found
        await found.end()


def child(name: str) -> Callable[[Daemon], int]:
    return lambda daemon: daemon.child(name).pid


@pytest.mark.parametrize(
    ("pid_of", "connections"),
    [(worker, 3), (child("gateway"), 1), (child("engine host"), 1), (child("zygote"), 1)],
    ids=["worker", "gateway", "engine host", "zygote"],
)
def test_a_process_is_killed_twice_under_fifty_streams(
    daemon: Daemon, pid_of: Callable[[Daemon], int], connections: int
) -> None:
    async def run() -> None:
        async with load(daemon) as all_streams:
            for _ in range(2):
                await asyncio.to_thread(wait_until, lambda: pid_of(daemon))
                await asyncio.to_thread(lambda: daemon.kill(pid_of(daemon)))
                await all_streams.more(15)
        assert [client.connections for client in all_streams.clients] == [connections] * SESSIONS

    asyncio.run(run())


def test_a_worker_that_died_is_followed_although_nobody_comes(daemon: Daemon) -> None:
    """The engine goes on for a session whose client is away, in a new worker that no connection has asked for."""

    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S), FmClient(daemon.address, daemon.keys["acme"]) as fm:
            tokens = whole_tokens(PROMPT, 200)
            stream = fm.ask(PROMPT, max_tokens=tokens)
            await stream.wait(lambda stream: len(stream.data) > 20)
            await fm.leave()
            pid = await asyncio.to_thread(worker, daemon)
            await asyncio.to_thread(daemon.kill, pid)
            await asyncio.to_thread(wait_until, lambda: worker(daemon) not in (0, pid))
            before = daemon.tenant("acme").used.output_tokens
            await asyncio.to_thread(wait_until, lambda: not daemon.tenant("acme").used.streams)
            assert daemon.tenant("acme").used.output_tokens > before
            fm.task = asyncio.create_task(fm._run())
            end = await stream.end()
            assert stream.text == expected_text(PROMPT, tokens)
            assert end.usage["completion_tokens"] == tokens

    asyncio.run(run())


def test_an_ordinary_stream_outlives_the_engine_host(daemon: Daemon) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tokens = whole_tokens(messages, 100)
    stream = daemon.client("acme").chat(messages, model=MODEL, max_tokens=tokens)
    text = next(stream)
    daemon.kill(daemon.child("engine host").pid)
    assert text + "".join(stream) == expected_text(messages, tokens)


def test_a_stream_that_is_cancelled_stays_so(daemon: Daemon) -> None:
    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S), FmClient(daemon.address, daemon.keys["acme"]) as fm:
            cancelled, going = (fm.ask(PROMPT, max_tokens=5000) for _ in range(2))
            await going.wait(lambda stream: len(stream.data) > 20)
            fm.cancel(cancelled.number)
            assert (await cancelled.end()).finish_reason == "abort"
            await asyncio.to_thread(daemon.kill, worker(daemon))
            size = len(going.data)
            await going.wait(lambda stream: len(stream.data) > size + 20)
            assert daemon.tenant("acme").used.streams == 1
            fm.cancel(going.number)
            assert (await going.end()).finish_reason == "abort"

    asyncio.run(run())


# -- the whole service, with a service manager that keeps its descriptors --------------------------------------------


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Daemon, FdStore]]:
    with managed(tmp_path) as found:
        yield found


@both_ends
def test_the_service_is_restarted_under_fifty_streams(
    service: tuple[Daemon, FdStore], end: Callable[[Daemon], Awaitable[None]]
) -> None:
    daemon, store = service

    async def run() -> None:
        async with load(daemon, 300) as all_streams:
            began_s = time.monotonic()
            await end(daemon)
            assert list(store.fds) == ["sessions-acme"]
            await asyncio.to_thread(daemon.start)
            await all_streams.more(15)
            print(f"stall: {time.monotonic() - began_s:.1f} s")
            if end is stop:
                assert all("draining" in client.notes for client in all_streams.clients)

    asyncio.run(run())
    wait_until(daemon.is_at_rest)
    daemon.stop()
    wait_until(lambda: not store.fds)
