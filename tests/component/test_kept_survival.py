"""Deaths of processes under load, and restarts of all: streams of SSE and JSON clients go on with the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.event_client import EventClient, Events, Refused
from support.fd_store import FdStore
from support.json_client import JsonClient, JsonStream
from support.survival import both_ends, managed, serving, worker
from support.synthetic import MODEL, expected_text, whole_tokens

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TIMEOUT_S = 60.0
READERS = 12
"""Clients of SSE, with a stream each."""
CLIENTS = 3
STREAMS = 5
"""Of each client of JSON messages."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(tmp_path_factory.mktemp("d")) as daemon:
        yield daemon


class Reading:
    """A stream of events that is read to its end, whatever happens to connections and processes."""

    def __init__(self, daemon: Daemon, number: int, tokens: int) -> None:
        self.events = Events()
        self.client = EventClient(daemon.address, daemon.keys["acme"])
        self._is_chat = number % 2 == 0
        prompt: Any = MESSAGES if self._is_chat else PROMPT
        # An end in the middle of a character would be told as a replacement, of which nothing is known here.
        self.tokens = whole_tokens(prompt, tokens + number, number)
        self.expected = expected_text(prompt, self.tokens, number)
        self.path = CHAT if self._is_chat else COMPLETIONS
        asked = {"messages": MESSAGES} if self._is_chat else {"prompt": PROMPT}
        self.body = {
            **{"model": MODEL, "seed": number, "max_tokens": self.tokens, "stream": True, "resumable": True},
            **{"stream_options": {"include_usage": True}, **asked},
        }
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self.client.ask(self.events, self.path, self.body)
            await self.client.read(self.events)
        except (OSError, asyncio.IncompleteReadError):
            self.client.drop()
            assert self.events.token
        while not self.events.is_done:
            try:
                await self.client.resume(self.events, self.path)
                await self.client.read(self.events)
            except (OSError, asyncio.IncompleteReadError):
                self.client.drop()
                await asyncio.sleep(0.02)
            except Refused as refused:  # the service is being stopped
                assert refused.status == 503
                self.client.drop()
                await asyncio.sleep(0.02)
        self.client.drop()

    async def reach(self, seq: int) -> None:
        while self.events.seq < seq:
            assert not self.task.done()
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        await self.task
        assert self.events.text() == self.expected
        assert self.events.finish_reasons() == {0: "length"}
        assert self.events.usage["completion_tokens"] == self.tokens
        assert len({(chunk["id"], chunk["created"]) for chunk in self.events.chunks}) == 1


class Load:
    """All that runs."""

    def __init__(self, daemon: Daemon, clients: list[JsonClient], tokens: int) -> None:
        self.clients = clients
        self.readings = [Reading(daemon, number, tokens) for number in range(READERS)]
        self._streams: list[tuple[JsonStream, int, int]] = []
        for place, client in enumerate(clients):
            for number in range(STREAMS):
                seed = place * STREAMS + number
                count = whole_tokens(PROMPT, tokens + seed, seed)
                self._streams.append((client.ask(PROMPT, seed=seed, max_tokens=count), seed, count))

    async def more(self) -> None:
        """Wait until every stream has some more."""
        sizes = [len(stream.text) for stream, _, _ in self._streams]
        seqs = [reading.events.seq for reading in self.readings]
        for (stream, _, _), size in zip(self._streams, sizes, strict=True):
            await stream.wait(lambda stream, size=size: len(stream.text) > size + 10)  # type: ignore[misc]
        for reading, seq in zip(self.readings, seqs, strict=True):
            await reading.reach(seq + 10)

    async def end(self) -> None:
        """Wait for all to end, and see that nothing was lost and nothing came twice."""
        for stream, seed, count in self._streams:
            last = await stream.end()
            assert stream.text == expected_text(PROMPT, count, seed)
            assert (last["finish_reason"], last["usage"]["completion_tokens"]) == ("length", count)
        for reading in self.readings:
            await reading.end()


@contextlib.asynccontextmanager
async def load(daemon: Daemon, tokens: int = 150) -> AsyncIterator[Load]:
    """Run streams of both doors."""
    async with asyncio.timeout(TIMEOUT_S), contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(JsonClient(daemon.address, daemon.keys["acme"], name=f"c{number}"))
            for number in range(CLIENTS)
        ]
        found = Load(daemon, clients, tokens)
        await found.more()
        yield found
        await found.end()


def test_a_worker_is_killed_twice(daemon: Daemon) -> None:
    async def run() -> None:
        async with load(daemon) as all_streams:
            for _ in range(2):
                await asyncio.to_thread(wait_until, lambda: worker(daemon))
                await asyncio.to_thread(lambda: daemon.kill(worker(daemon)))
                await all_streams.more()
        assert all(reading.client.connections >= 3 for reading in all_streams.readings)
        assert all(client.connections >= 3 for client in all_streams.clients)

    asyncio.run(run())


def test_a_worker_that_died_is_followed_although_nobody_comes(daemon: Daemon) -> None:
    """The engine goes on for a stream whose client is away, in a new worker that no connection has asked for."""

    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            client, events = EventClient(daemon.address, daemon.keys["acme"]), Events()
            tokens = whole_tokens(PROMPT, 200)
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "stream": True, "resumable": True}
            await client.ask(events, COMPLETIONS, body, "key")
            await client.read(events, 5)
            client.drop()
            pid = await asyncio.to_thread(worker, daemon)
            await asyncio.to_thread(daemon.kill, pid)
            await asyncio.to_thread(wait_until, lambda: worker(daemon) not in (0, pid))
            await asyncio.to_thread(wait_until, lambda: not daemon.tenant("acme").used.streams)
            again = Events()
            await client.ask(again, COMPLETIONS, body, "key")  # the key leads to it, too
            await client.read(again)
            client.drop()
            await client.resume(events, COMPLETIONS)
            await client.read(events)
            client.drop()
            assert events.text() == expected_text(PROMPT, tokens)
            assert (again.token, again.chunks) == (events.token, events.chunks)

    asyncio.run(run())


def test_a_stream_that_is_cancelled_stays_so(daemon: Daemon) -> None:
    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S), JsonClient(daemon.address, daemon.keys["acme"]) as client:
            cancelled, going = (client.ask(PROMPT, max_tokens=5000) for _ in range(2))
            await going.wait(lambda stream: len(stream.text) > 20)
            client.send({"cancel": cancelled.request["id"]})
            assert (await cancelled.end())["finish_reason"] == "abort"
            await asyncio.to_thread(lambda: daemon.kill(worker(daemon)))
            size = len(going.text)
            await going.wait(lambda stream: len(stream.text) > size + 20)
            assert daemon.tenant("acme").used.streams == 1
            client.send({"cancel": going.request["id"]})
            assert (await going.end())["finish_reason"] == "abort"

    asyncio.run(run())


# -- the whole service, with a service manager that keeps its descriptors --------------------------------------------


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Daemon, FdStore]]:
    with managed(tmp_path) as found:
        yield found


@both_ends
def test_the_service_is_restarted(service: tuple[Daemon, FdStore], end: Callable[[Daemon], Awaitable[None]]) -> None:
    daemon, store = service

    async def run() -> None:
        async with load(daemon, 300) as all_streams:
            await end(daemon)
            assert list(store.fds) == ["sessions-acme"]
            await asyncio.to_thread(daemon.start)
            await all_streams.more()

    asyncio.run(run())
    wait_until(daemon.is_at_rest)
    daemon.stop()
