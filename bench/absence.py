"""Clients of each door that are away for long: while a long prompt is read, and nearly too long.

    python -m bench.absence [--prefill-seconds 60]

A part of `bench.survive`, too. Ends with exit status 1 at the first stream that is not as it has to be.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from support.daemon import Daemon, running, wait_until
from support.event_client import EventClient, Events, Refused
from support.fm_stream import FmClient, SessionLost
from support.json_client import JsonClient
from support.synthetic import MODEL, Prompt, expected_text, whole_tokens

from bench.exactly_once import NotOnce
from bench.report import say

PATH: Final = "/v1/completions"
GONE: Final = "gone"
RESUME_FOR_S: Final = 10
AWAY_S: Final = {"in_time": 9.0, "too_late": 11.0}
PREFILL_S: Final = 60.0
AWAY_PART: Final = 0.5
"""So much of it the clients are away for."""
PROMPT_TOKENS_PER_S: Final = 50
TOKENS: Final = 100
LIMIT_S: Final = 120.0
"""So long beyond the reading of the prompt all may take."""


class Absence(msgspec.Struct, frozen=True):
    """A stream whose client goes away once it has the stream's name."""

    tenant: str
    prompt: Prompt
    away_s: float
    tokens: int


class Seen(msgspec.Struct, frozen=True):
    """What its client got in the end, a text or an error's code; how much it had as it left, and when it had all."""

    result: str
    before: int
    whole_s: float


Talk = Callable[[Daemon, Absence], Awaitable[Seen]]


async def _frames(daemon: Daemon, absence: Absence) -> Seen:
    began_s = time.monotonic()
    async with FmClient(daemon.address, daemon.keys[absence.tenant], keeps_trying=False) as client:
        stream = client.ask(absence.prompt, model=MODEL, max_tokens=absence.tokens)
        await stream.wait(lambda stream: bool(stream.id))
        before = len(stream.data)
        client.drop()
        await asyncio.sleep(absence.away_s)
        client.reconnect()
        try:
            await client.wait(lambda _: stream.last is not None)
        except SessionLost as exc:
            return Seen(exc.error.code, before, time.monotonic() - began_s)
        return Seen(stream.text, before, time.monotonic() - began_s)


async def _messages(daemon: Daemon, absence: Absence) -> Seen:
    began_s = time.monotonic()
    async with JsonClient(daemon.address, daemon.keys[absence.tenant], keeps_trying=False) as client:
        stream = client.ask(absence.prompt, model=MODEL, max_tokens=absence.tokens)
        await stream.wait(lambda stream: bool(stream.token))
        before = len(stream.text)
        client.drop()
        await asyncio.sleep(absence.away_s)
        client.reconnect()
        last = await stream.end()
        result = last["error"]["code"] if "error" in last else stream.text
        return Seen(result, before, time.monotonic() - began_s)


async def _events(daemon: Daemon, absence: Absence) -> Seen:
    began_s = time.monotonic()
    client, events = EventClient(daemon.address, daemon.keys[absence.tenant]), Events()
    asked: Any = absence.prompt
    body = {"model": MODEL, "prompt": asked, "max_tokens": absence.tokens, "stream": True, "resumable": True}
    await client.ask(events, PATH, body)
    client.drop()
    await asyncio.sleep(absence.away_s)
    try:
        await client.resume(events)
        await client.read(events)
    except Refused as exc:
        return Seen(str(exc.error["code"]), 0, time.monotonic() - began_s)
    finally:
        client.drop()
    return Seen(events.text(), 0, time.monotonic() - began_s)


DOORS: Final[dict[str, Talk]] = {"fm": _frames, "json": _messages, "sse": _events}


async def in_prefill(daemon: Daemon, prefill_s: float) -> dict[str, float]:
    """Leave each door's stream while its prompt is read; return when its client had all. Raises NotOnce.

    Each has a tenant of its own, so that the engine reads all of them for as long.
    """
    prompt_tokens = int(prefill_s * PROMPT_TOKENS_PER_S) // len(DOORS)
    absences = {}
    for at, door in enumerate(DOORS):
        prompt = [300 + (at + index) % 50 for index in range(prompt_tokens)]
        absences[door] = Absence(door, prompt, AWAY_PART * prefill_s, whole_tokens(prompt, TOKENS))
    seen = await asyncio.gather(*(DOORS[door](daemon, absence) for door, absence in absences.items()))
    for (door, absence), one in zip(absences.items(), seen, strict=True):
        if one.before or one.whole_s < 0.9 * prefill_s:
            raise NotOnce(f"{door}: all was there after {one.whole_s:.0f} s: no long prompt was read")
        if one.result != expected_text(absence.prompt, absence.tokens):
            raise NotOnce(f"{door}: another text than from token 0 on: {one.result!r}")
    return {door: round(one.whole_s, 1) for door, one in zip(absences, seen, strict=True)}


async def for_too_long(daemon: Daemon) -> dict[str, dict[str, str]]:
    """Come back just in time, and just too late; return what became of the streams by door. Raises NotOnce."""
    prompt = "Once upon a time"
    tokens = whole_tokens(prompt, TOKENS)
    wanted = {"in_time": expected_text(prompt, tokens), "too_late": GONE}

    async def one(door: str, when: str) -> str:
        seen = await DOORS[door](daemon, Absence("brief", prompt, AWAY_S[when], tokens))
        if seen.result != wanted[when]:
            raise NotOnce(f"{door}, after {AWAY_S[when]:.0f} of {RESUME_FOR_S} s: {seen.result!r}")
        return GONE if seen.result == GONE else "whole"

    found = {}
    for door in DOORS:
        results = await asyncio.gather(*(one(door, when) for when in AWAY_S))
        found[door] = dict(zip(AWAY_S, results, strict=True))
    return found


def absences(folder: Path, prefill_s: float = PREFILL_S) -> dict[str, Any]:
    """Run both, at the same time, each with a daemon of its own. Raises NotOnce."""
    slow = {"engine": {"max_model_len": 8192}, "engine.synthetic": {"prompt_tokens_per_s": PROMPT_TOKENS_PER_S}}
    with running(folder / "slow", *DOORS, tables=slow) as reading, running(folder / "brief") as brief:
        brief.add_tenant("brief", f'[session]\nresume_for = "{RESUME_FOR_S}s"\n')
        brief.reload()

        async def both() -> tuple[dict[str, float], dict[str, dict[str, str]]]:
            async with asyncio.timeout(prefill_s + LIMIT_S):
                return await asyncio.gather(in_prefill(reading, prefill_s), for_too_long(brief))

        whole_s, too_long = asyncio.run(both())
        for daemon in (reading, brief):
            wait_until(daemon.is_at_rest)
            daemon.stop()
    say(f"away in a long prompt's reading: whole after {whole_s} s; away for long: {too_long}")
    return {"prefill_whole_s": whole_s, "resume_for": too_long}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Go away from streams, and come back; see bench/README.md.")
    parser.add_argument("--prefill-seconds", type=float, default=PREFILL_S)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seedance-") as name:
        print(msgspec.json.encode(absences(Path(name), options.prefill_seconds)).decode())
