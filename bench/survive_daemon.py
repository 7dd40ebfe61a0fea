"""Deaths of the daemon's processes under streams of its doors, for `bench.survive`; with the synthetic engine.

A service manager's store for descriptors is played by `support.fd_store`: what is started anew gets what it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from support.daemon import Daemon, wait_until
from support.event_client import EventClient, Events
from support.fd_store import FdStore
from support.fm_stream import FmClient, SessionLost
from support.json_client import JsonClient
from support.stall import watch
from support.synthetic import MODEL, expected_text, whole_tokens

from bench.exactly_once import differences
from bench.report import say
from bench.survive_engine import Sample

TENANT: Final = "acme"
PATH: Final = "/v1/completions"
PROMPT: Final = "Once upon a time"
SESSIONS: Final = 5
STREAMS: Final = 10
"""Of each session."""
OTHERS: Final = 10
"""Streams of each other door, where it keeps them."""
TOKENS_PER_S: Final = 50
LIMIT_S: Final = 120.0
LIMITS: Final = "[tokens]\nstreams = 512\n[requests]\nqueue = 512\n"


class One:
    """A stream of any door: what is to come, and what has."""

    def __init__(self, seed: int, tokens: int, text: Callable[[], str], size: Callable[[], int]) -> None:
        self.expected = expected_text(PROMPT, tokens, seed)
        self.text = text
        self.size = size
        self.is_over = False

    async def until(self, end: Awaitable[Any]) -> None:
        """Wait for the end; one that is an error leaves the stream as it is."""
        try:
            await end
        except SessionLost as exc:
            say(f"a stream ended: {exc}")
        self.is_over = True


@contextlib.contextmanager
def managed(folder: Path, tokens_per_s: int = TOKENS_PER_S) -> Iterator[Daemon]:
    """Run a daemon with what a service manager keeps for it."""
    synthetic = {"tokens_per_s": tokens_per_s, "prompt_tokens_per_s": 20_000}
    tables: dict[str, dict[str, Any]] = {"engine": {"max_model_len": 8192}, "engine.synthetic": synthetic}
    folder.mkdir(parents=True, exist_ok=True)
    store = FdStore(folder / "notify.sock")
    daemon = Daemon(folder / "d", tables=tables, store=store)
    try:
        daemon.add_tenant(TENANT, LIMITS)
        daemon.start()
        yield daemon
        wait_until(daemon.is_at_rest)
        daemon.stop()
    finally:
        daemon.close()
        store.close()


class Load:
    """Fifty streams of FM sessions, and of the other doors when they are asked for; all of one length or nearly so."""

    def __init__(self, daemon: Daemon, tokens: int) -> None:
        self.streams: list[One] = []
        self.clients: list[FmClient] = []
        self._daemon = daemon
        self._tokens = tokens
        self._key = daemon.keys[TENANT]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Begin all; they must be over at the end."""
        async with asyncio.timeout(LIMIT_S), contextlib.AsyncExitStack() as stack:
            for number in range(SESSIONS):
                client = FmClient(self._daemon.address, self._key, client_id=str(number))
                self.clients.append(await stack.enter_async_context(client))
            messages = await stack.enter_async_context(JsonClient(self._daemon.address, self._key))
            async with asyncio.TaskGroup() as group:
                for place in range(SESSIONS * STREAMS):
                    group.create_task(self._frames(place, self.clients[place % SESSIONS]))
                for place in range(OTHERS):
                    group.create_task(self._messages(100 + place, messages))
                    group.create_task(self._events(200 + place))
                await self.wait_more(20)
                yield

    async def wait_more(self, size: int) -> None:
        """Wait until something has come of all, and so much of each."""
        while not self.streams or min(one.size() for one in self.streams) < size:
            await asyncio.sleep(0.01)

    def is_over(self) -> bool:
        """Return whether all streams are."""
        return all(one.is_over for one in self.streams)

    async def _frames(self, seed: int, client: FmClient) -> None:
        tokens = whole_tokens(PROMPT, self._tokens, seed)
        stream = client.ask(PROMPT, model=MODEL, seed=seed, max_tokens=tokens)
        await self._run(One(seed, tokens, lambda: stream.text, lambda: len(stream.data)), stream.end())

    async def _messages(self, seed: int, client: JsonClient) -> None:
        tokens = whole_tokens(PROMPT, self._tokens, seed)
        stream = client.ask(PROMPT, model=MODEL, seed=seed, max_tokens=tokens)
        await self._run(One(seed, tokens, lambda: stream.text, lambda: len(stream.text)), stream.end())

    async def _events(self, seed: int) -> None:
        tokens = whole_tokens(PROMPT, self._tokens, seed)
        client, events = EventClient(self._daemon.address, self._key), Events()
        reading = client.stream(PATH, completion(tokens, seed), f"k{time.monotonic_ns()}", events)
        await self._run(One(seed, tokens, events.text, lambda: 4 * events.seq), reading)
        client.drop()

    async def _run(self, one: One, end: Awaitable[Any]) -> None:
        self.streams.append(one)
        await one.until(end)


def completion(tokens: int, seed: int) -> dict[str, Any]:
    """Return the body of a request for a resumable stream of events."""
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "seed": seed}


async def _kill(daemon: Daemon, pid_of: Callable[[Daemon], int]) -> None:
    def kill() -> None:
        wait_until(lambda: pid_of(daemon))
        daemon.kill(pid_of(daemon))

    await asyncio.to_thread(kill)


async def _kill_worker(daemon: Daemon) -> None:
    await _kill(daemon, lambda daemon: daemon.tenant(TENANT).worker_pid)


async def _kill_gateway(daemon: Daemon) -> None:
    await _kill(daemon, lambda daemon: daemon.child("gateway").pid)


async def _kill_host(daemon: Daemon) -> None:
    await _kill(daemon, lambda daemon: daemon.child("engine host").pid)


async def _kill_supervisor(daemon: Daemon) -> None:
    """Kill it; a service manager ends what is left, and starts it anew."""
    daemon.signal(signal.SIGKILL)
    await asyncio.to_thread(daemon.close)
    await asyncio.to_thread(daemon.start)


async def _restart(daemon: Daemon) -> None:
    await asyncio.to_thread(daemon.stop)
    await asyncio.to_thread(daemon.start)


DAEMON_DEATHS: Final[dict[str, Callable[[Daemon], Coroutine[Any, Any, None]]]] = {
    "gateway": _kill_gateway,
    "host": _kill_host,
    "worker": _kill_worker,
    "supervisor": _kill_supervisor,
    "restart": _restart,
}


async def death(daemon: Daemon, name: str, tokens: int) -> Sample:
    """Have something die under all streams."""
    load = Load(daemon, tokens)
    async with load.running():
        dying = asyncio.create_task(DAEMON_DEATHS[name](daemon))
        stall = await watch(lambda: [one.size() for one in load.streams], load.is_over, LIMIT_S)
        await dying
    compared = [differences(one.expected.encode(), one.text().encode()) for one in load.streams]
    again = sum(welcome.frames_resent for client in load.clients for welcome in client.welcomes)
    lost, doubled = sum(missing for missing, _ in compared), sum(beyond for _, beyond in compared)
    return Sample(name, len(load.streams), stall, lost, doubled, again)


def daemon_deaths(folder: Path, rounds: int, deaths: Sequence[str], tokens: int) -> list[Sample]:
    """Run each death so many times, on one daemon."""
    samples = []
    with managed(folder) as daemon:
        for _ in range(rounds):
            for name in deaths:
                samples.append(asyncio.run(death(daemon, name, tokens)))
                say(samples[-1].said())
                wait_until(daemon.is_at_rest)
    return samples
