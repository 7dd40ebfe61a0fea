"""A mixed load under random deaths for a set time; every text is checked, byte by byte, as it comes.

    python -m bench.soak [--seconds 600] [--seed N] [--clients 3]

The whole daemon with its synthetic engine; clients of every door and of several tenants, behind a proxy that cuts every
connection after one to five seconds; meanwhile processes are killed. The seed decides what is asked and what dies next.
It ends at the first byte that is not the next one of its stream, with exit status 1. The last line of standard output
is one JSON object; `README.md` in this folder explains its keys.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from support.chaos_proxy import ChaosProxy
from support.daemon import Daemon, running, wait_until
from support.event_client import EventClient, Events, Refused
from support.fm_stream import FmClient, FmStream, SessionLost
from support.json_client import JsonClient, JsonStream
from support.synthetic import MODEL, expected_text, whole_tokens

from bench.exactly_once import Expected, NotOnce
from bench.processes import end_in_order
from bench.report import say
from seedance.daemon.protocol.fm_messages import Modality, Part

TENANTS: Final = ("acme", "globex")
PATH: Final = "/v1/completions"
LIFE_S: Final = (1.0, 5.0)
DEATH_EVERY_S: Final = (1.5, 5.0)
TOKENS: Final = (5, 200)
AT_ONCE: Final = 4
ROUNDS: Final = 5
"""So often a client asks for AT_ONCE streams before it ends its session or connection, and begins another one."""
LOGPROBS_PART: Final = 0.3
IN_PARTS_PART: Final = 0.3
STUCK_S: Final = 120.0
LATER: Final = ("overloaded", "engine_unavailable", "rate_limited")
"""With these a request may be refused before it has begun; it is asked again."""
LOG: Final = Path("build/soak.log")
LIMITS: Final = "[tokens]\nstreams = 512\n[requests]\nqueue = 512\n"
TABLES: Final = {
    "engine": {"max_model_len": 8192},
    "engine.synthetic": {"tokens_per_s": 50, "prompt_tokens_per_s": 20_000, "die_after_steps": 500},
}


class Tally(msgspec.Struct):
    """What has happened so far."""

    streams: dict[str, int] = {}
    deaths: dict[str, int] = {}
    tokens: int = 0
    text_bytes: int = 0
    refused: int = 0
    frames_resent: int = 0


class Case:
    """One stream to ask for; `fields` are what all doors call the same."""

    def __init__(self, name: str, choose: random.Random) -> None:
        prompt = " ".join(choose.choices(("once", "upon", "a", "time", "there", "was"), k=choose.randint(1, 40)))
        seed = choose.randrange(1 << 30)
        self.tokens = whole_tokens(prompt, choose.randint(*TOKENS), seed)
        self.prompt = prompt
        self.fields: dict[str, Any] = {"model": MODEL, "seed": seed, "max_tokens": self.tokens}
        self.name = f"{name}, seed {seed}"
        self.text = expected_text(prompt, self.tokens, seed)
        self.expected = Expected(self.name, self.text)

    def ended(self, reason: object, tokens: object) -> None:
        """Take how it ended and how many tokens were counted. Raises NotOnce."""
        self.expected.end()
        if (reason, tokens) != ("length", self.tokens):
            raise NotOnce(f"{self.name}: it ended by '{reason}' after {tokens} tokens, {self.tokens} were asked for")


class CheckedEvents(Events):
    """Events whose text is checked as they come."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case

    def take(self, block: bytes) -> None:
        """Take one event. Raises NotOnce."""
        known = len(self.chunks)
        try:
            super().take(block)
        except AssertionError as exc:
            raise NotOnce(f"{self._case.name}: {block!r} came after event {self.seq}") from exc
        for chunk in self.chunks[known:]:
            self._case.expected.advance("".join(entry["text"] for entry in chunk["choices"]).encode())


class Soak:
    """The clients, and what kills; `address` is the proxy's."""

    def __init__(self, daemon: Daemon, address: str, seed: int, seconds: float) -> None:
        self.tally = Tally()
        self._daemon = daemon
        self._address = address
        self._seed = seed
        self._ends_s = time.monotonic() + seconds
        self._clients: set[FmClient | JsonClient] = set()

    async def run(self, clients: int) -> None:
        """Run so many clients of each tenant and door until the time is over, and what they have begun then."""
        doors = {"fm": self._frames, "json": self._messages, "sse": self._events}
        async with asyncio.TaskGroup() as helpers:
            watching = [helpers.create_task(self._kill()), helpers.create_task(self._watch())]
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    for tenant in TENANTS:
                        for door, talk in doors.items():
                            group.create_task(self._talk(talk, door, tenant, number))
            for task in watching:
                task.cancel()

    # -- what kills, and what looks after clients ---------------------------------------------------------------------

    async def _kill(self) -> None:
        choose = random.Random(f"{self._seed} deaths")
        pids: dict[str, Callable[[], int]] = {
            "worker": lambda: self._daemon.tenant(choose.choice(TENANTS)).worker_pid,
            "gateway": lambda: self._daemon.child("gateway").pid,
            "host": lambda: self._daemon.child("engine host").pid,
            "zygote": lambda: self._daemon.child("zygote").pid,
        }
        while True:
            for name in choose.sample(list(pids), len(pids)):
                await asyncio.sleep(choose.uniform(*DEATH_EVERY_S))
                if pid := await asyncio.to_thread(pids[name]):
                    await asyncio.to_thread(self._daemon.kill, pid)
                    _count(self.tally.deaths, name)

    async def _watch(self) -> None:
        """Raise what a client has met, instead of waiting for what will not come."""
        while True:
            await asyncio.sleep(0.2)
            for client in self._clients:
                if client.task is not None and client.task.done():
                    client.task.result()
                    raise NotOnce("a client has ended")
                if isinstance(client, FmClient) and client.lost is not None:
                    raise NotOnce(f"a session was lost: {client.lost}")

    # -- clients ------------------------------------------------------------------------------------------------------

    async def _talk(self, talk: Callable[[str, str, random.Random], Any], door: str, tenant: str, number: int) -> None:
        choose = random.Random(f"{self._seed} {door} {tenant} {number}")
        turns = itertools.count()
        while time.monotonic() < self._ends_s:
            await talk(tenant, f"{door} of {tenant}, client {number}.{next(turns)}", choose)

    async def _rounds(self, one: Callable[[Case], Any], door: str, name: str, choose: random.Random) -> None:
        for _ in range(ROUNDS):
            if time.monotonic() < self._ends_s:
                await self._round(one, door, name, choose)

    async def _round(self, one: Callable[[Case], Any], door: str, name: str, choose: random.Random) -> None:
        """Run some streams at once, each again until it is not refused."""

        async def until_it_runs(case: Case) -> None:
            try:
                async with asyncio.timeout(STUCK_S):
                    while not await one(case):
                        self.tally.refused += 1
                        await asyncio.sleep(choose.uniform(0.1, 0.5))
            except TimeoutError:
                seen = case.expected.seen
                raise NotOnce(f"{case.name}: lost: nothing after byte {seen} for {STUCK_S:.0f} s") from None
            _count(self.tally.streams, door)
            self.tally.tokens += case.tokens
            self.tally.text_bytes += len(case.text.encode())

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(until_it_runs(Case(name, choose)))

    @contextlib.asynccontextmanager
    async def _using(self, client: FmClient | JsonClient) -> AsyncIterator[None]:
        async with client:
            self._clients.add(client)
            try:
                yield
            finally:
                self._clients.discard(client)

    async def _frames(self, tenant: str, name: str, choose: random.Random) -> None:
        client = FmClient(self._address, self._daemon.keys[tenant], client_id=name, choose=choose)

        async def one(case: Case) -> bool:
            stream, with_logprobs = _asked(client, case, choose)
            while stream.last is None:
                stream.changed.clear()
                await stream.changed.wait()
                _take_frames(case, stream)
            _take_frames(case, stream)
            try:
                end = await stream.end()
            except SessionLost as exc:
                return _is_refusal(case, exc.error.code)
            case.ended(end.finish_reason, end.usage["completion_tokens"])
            if len(stream.positions) != case.tokens * with_logprobs:
                raise NotOnce(f"{case.name}: {len(stream.positions)} log probabilities of {case.tokens} tokens")
            return True

        async with self._using(client):
            await self._rounds(one, "fm", name, choose)
        self.tally.frames_resent += sum(welcome.frames_resent for welcome in client.welcomes)

    async def _messages(self, tenant: str, name: str, choose: random.Random) -> None:
        client = JsonClient(self._address, self._daemon.keys[tenant], name=name, choose=choose)

        async def one(case: Case) -> bool:
            stream = client.ask(case.prompt, **case.fields)
            while stream.last is None:
                stream.changed.clear()
                await stream.changed.wait()
                _take_message(case, stream)
            _take_message(case, stream)
            if "error" in stream.last:
                return _is_refusal(case, stream.last["error"]["code"])
            case.ended(stream.last["finish_reason"], stream.last["usage"]["completion_tokens"])
            return True

        async with self._using(client):
            await self._rounds(one, "json", name, choose)

    async def _events(self, tenant: str, name: str, choose: random.Random) -> None:
        async def one(case: Case) -> bool:
            client, events = EventClient(self._address, self._daemon.keys[tenant], choose), CheckedEvents(case)
            body = {**case.fields, "prompt": case.prompt, "stream_options": {"include_usage": True}}
            try:
                await client.stream(PATH, body, case.name, events)
            except Refused as exc:
                return _is_refusal(case, str(exc.error["code"]))
            finally:
                client.drop()
            case.ended(events.finish_reasons()[0], events.usage["completion_tokens"])
            return True

        await self._round(one, "sse", name, choose)


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _asked(client: FmClient, case: Case, choose: random.Random) -> tuple[FmStream, bool]:
    """Ask in one of the ways that frames have, and tell whether with log probabilities."""
    with_logprobs = choose.random() < LOGPROBS_PART
    fields = case.fields | ({"logprobs": 1} if with_logprobs else {})
    if choose.random() >= IN_PARTS_PART:
        return client.ask(case.prompt, **fields), with_logprobs
    cut = choose.randint(0, len(case.prompt))
    stream = client.ask(case.prompt[:cut], more=True, **fields)
    client.part(Part(stream=stream.number, modality=Modality.TEXT, data=case.prompt[cut:].encode()))
    return stream, with_logprobs


def _take_frames(case: Case, stream: FmStream) -> None:
    case.expected.advance(bytes(stream.data[case.expected.seen :]))


def _take_message(case: Case, stream: JsonStream) -> None:
    case.expected.advance(stream.text.encode()[case.expected.seen :])


def _is_refusal(case: Case, code: str) -> bool:
    """Return False, for a request that may be sent again. Raises NotOnce when it had begun, or has no right to fail."""
    if code not in LATER or case.expected.seen:
        raise NotOnce(f"{case.name}: lost: it ended by '{code}' at byte {case.expected.seen}")
    return False


def soak(
    folder: Path, *, seconds: float, seed: int, clients: int, log: Path = LOG, limits: str = LIMITS
) -> dict[str, Any]:
    """Run it; returns the result, as `README.md` explains it. After a failure the daemon's log is at `log`."""
    result: dict[str, Any] = {"soak_s": 0.0, "seed": seed, "failure": ""}
    with running(folder / "d", tables=TABLES) as daemon:
        for tenant in TENANTS:
            daemon.add_tenant(tenant, limits)
        daemon.reload()
        began_s = time.monotonic()

        async def run() -> None:
            async with ChaosProxy(daemon.address, random.Random(seed), *LIFE_S) as proxy:
                one = Soak(daemon, proxy.address, seed, seconds)
                result["tally"] = one.tally
                try:
                    await one.run(clients)
                finally:
                    result["cuts"] = proxy.cuts

        try:
            asyncio.run(run())
            wait_until(daemon.is_at_rest)
            daemon.stop()
        except* (NotOnce, AssertionError, SessionLost) as group:
            result["failure"] = _first(group)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_bytes(daemon.log.read_bytes())
        tally = result.pop("tally")
        tally.deaths["engine"] = len(re.findall(r"engine \d+ \(active\) died", daemon.log.read_text()))
    return {**result, "soak_s": round(time.monotonic() - began_s, 1), **msgspec.structs.asdict(tally)}


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def main() -> None:
    """Run it and print the result."""
    end_in_order()
    parser = argparse.ArgumentParser(description="Let everything die under a mixed load; see bench/README.md.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--clients", type=int, default=3, help="of each door and tenant")
    options = parser.parse_args()
    say(f"soak: {options.seconds:g} s, --seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="seedance-") as name:
        result = soak(Path(name), seconds=options.seconds, seed=options.seed, clients=options.clients)
    print(msgspec.json.encode(result).decode(), flush=True)
    if result["failure"]:
        sys.exit(f"soak: {result['failure']}; the daemon's log is {LOG}, and to try again: --seed {options.seed}")


if __name__ == "__main__":
    main()
