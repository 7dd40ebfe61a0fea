"""What it takes to come back to a stream, and what is held of it meanwhile; for `bench.survive`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from support.daemon import Daemon, wait_until
from support.event_client import EventClient, Events
from support.fm_stream import FmClient
from support.json_client import JsonClient
from support.raw_http import Connection, request
from support.synthetic import MODEL, expected_text, whole_tokens

from bench.processes import private_bytes
from bench.survive_daemon import LIMIT_S, PATH, PROMPT, TENANT, completion

RESUMES: Final = 20
RESUMED_TOKENS_PER_S: Final = 500
ENDLESS_TOKENS: Final = 5000
KEPT_SESSIONS: Final = 20
KEPT_STREAMS: Final = 10
KEPT_TOKENS: Final = 200


class Now(random.Random):
    """Draws no wait before a client connects again."""

    def random(self) -> float:
        """Return the least number."""
        return 0.0


class Kept(msgspec.Struct, frozen=True):
    """What a worker holds for streams whose client is away: memory of its own, and of the journal; and their text."""

    streams: int
    private_bytes: int
    journal_bytes: int
    text_bytes: int


class Resumes(msgspec.Struct, frozen=True):
    """Times from a cut to the first text after it, by door; and FM's frames that were sent again, by cut."""

    ms: dict[str, list[float]]
    frames_resent: list[int]


# -- coming back ------------------------------------------------------------------------------------------------------


async def _came_back_ms(size: Callable[[], int], drop: Callable[[], None]) -> list[float]:
    """Cut a stream's connection again and again; return the times until more of it had come."""
    found = []
    for _ in range(RESUMES):
        await _grown(size, size())
        seen, began_s = size(), time.perf_counter()
        drop()
        await _grown(size, seen)
        found.append(1e3 * (time.perf_counter() - began_s))
    return found


async def _grown(size: Callable[[], int], seen: int) -> None:
    while size() == seen:
        await asyncio.sleep(0.0005)


async def resumes(daemon: Daemon) -> Resumes:
    """Cut the connection of a stream of each door; clients connect again without a wait."""
    address, key = daemon.address, daemon.keys[TENANT]
    found: dict[str, list[float]] = {}
    async with asyncio.timeout(LIMIT_S):
        async with FmClient(address, key, choose=Now()) as frames:
            stream = frames.ask(PROMPT, model=MODEL, max_tokens=ENDLESS_TOKENS)
            found["fm"] = await _came_back_ms(lambda: len(stream.data), frames.drop)
            resent = [welcome.frames_resent for welcome in frames.welcomes[1:]]
        async with JsonClient(address, key, choose=Now()) as messages:
            asked = messages.ask(PROMPT, model=MODEL, max_tokens=ENDLESS_TOKENS)
            found["json"] = await _came_back_ms(lambda: asked.seq, messages.drop)
        client, events = EventClient(address, key, Now()), Events()
        reading = asyncio.create_task(client.stream(PATH, completion(ENDLESS_TOKENS, 0), "", events))
        found["sse"] = await _came_back_ms(lambda: events.seq, client.drop)
        reading.cancel()
        client.drop()
    for stream_id in (asked.id, events.id):
        with Connection(address) as connection:
            connection.send(request("DELETE", f"/v2/streams/{stream_id}", key))
            connection.response(has_body=False)
    return Resumes(found, resent)


# -- what is held -----------------------------------------------------------------------------------------------------


def journal_bytes(smaps: str, tenant: str = TENANT) -> int:
    """Return the resident memory of a tenant's journal, from a worker's `/proc/PID/smaps`."""
    found, is_journal = 0, False
    for line in smaps.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_journal = f"/memfd:sessions-{tenant} " in line
        elif is_journal and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def _held(daemon: Daemon) -> tuple[int, int]:
    """Return a worker's private memory without its journal, and the journal's."""
    pid = daemon.tenant(TENANT).worker_pid
    journal = journal_bytes(Path(f"/proc/{pid}/smaps").read_text())
    return private_bytes(pid) - journal, journal


async def kept(daemon: Daemon) -> Kept:
    """Have clients go away from their streams, and weigh what is kept once the streams are over."""
    streams, text_bytes = KEPT_SESSIONS * KEPT_STREAMS, 0
    async with asyncio.timeout(LIMIT_S), contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                FmClient(
                    daemon.address, daemon.keys[TENANT], client_id=f"kept {number}", choose=Now(), keeps_trying=False
                )
            )
            for number in range(KEPT_SESSIONS)
        ]
        await clients[0].ask(PROMPT, model=MODEL, max_tokens=KEPT_TOKENS).end()
        before = await asyncio.to_thread(_held, daemon)
        asked = [
            client.ask(PROMPT, model=MODEL, seed=seed, max_tokens=whole_tokens(PROMPT, KEPT_TOKENS, seed))
            for client in clients
            for seed in range(KEPT_STREAMS)
        ]
        for one in asked:
            await one.wait(lambda one: bool(one.data))
        for client in clients:
            client.drop()
        await asyncio.to_thread(wait_until, lambda: not daemon.tenant(TENANT).used.streams)
        after = await asyncio.to_thread(_held, daemon)
        for seed in range(KEPT_STREAMS):
            text = expected_text(PROMPT, whole_tokens(PROMPT, KEPT_TOKENS, seed), seed)
            text_bytes += KEPT_SESSIONS * len(text.encode())
        for client in clients:  # to end their sessions well
            client.reconnect()
        for one in asked:
            await one.end()
    return Kept(streams, after[0] - before[0], after[1] - before[1], text_bytes)
