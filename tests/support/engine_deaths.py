"""A host with real EngineCores of the tiny model, streams on them, and ways to kill or stop the cores.

A second engine stands by. Where both are killed, the fork server makes the next; where that is killed and does not
start again, another one takes the place of the processor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from support.host import HostProcess, WorkerEnd, running_host
from support.stall import Stall, watch
from support.tiny_model import tiny_model

from seedance.engine.channel import Submit, encode
from seedance.engine.failover import CONTINUED, ON_CPU, STABLE_S
from seedance.engine.request import FinishReason, Sampling
from seedance.engine.settings import EngineSettings, FailoverSettings

STREAMS = 50
TOKENS = 120
LIMIT_S = 120.0
_LONGER = 1500


def prompt(stream: int) -> list[int]:
    return random.Random(stream).choices(range(3, 4096), k=16)


def cores(host: HostProcess) -> list[int]:
    """Return the EngineCores' processes, the one that has been up for longest first."""
    return [core for zygote in children(host.process.pid) for core in children(zygote)]


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


async def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S, every_s: float = 0.05) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(every_s)


async def wait_standby(host: HostProcess) -> None:
    """Wait until the second engine would take over at once."""
    async with asyncio.timeout(LIMIT_S):
        while not (await host.statistics()).standing_by:
            await asyncio.sleep(0.1)


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
    """All streams on one worker's channel."""

    def __init__(self, worker: WorkerEnd) -> None:
        self.worker = worker
        self.stall = Stall(0.0, 0.0)

    async def begin(self, **sampling: Any) -> None:
        fields = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
        for stream in range(STREAMS):
            await self.worker.send(encode(Submit(stream, prompt(stream), Sampling(**fields))))

    async def wait_tokens(self, count: int) -> None:
        """Wait until every stream has so many tokens."""
        await wait_until(lambda: len(self.worker.token_ids) == STREAMS and self.least() >= count)

    def least(self) -> int:
        return min(map(len, self.worker.token_ids.values()))

    async def rest(self) -> None:
        """Wait for all ends."""
        await wait_until(lambda: len(self.worker.finished) == STREAMS)

    async def watch(self, until: Callable[[], bool]) -> None:
        """Wait until something is so, and note how long streams stood still."""
        self.stall = await watch(lambda: [len(self.worker.token_ids[at]) for at in range(STREAMS)], until, LIMIT_S)


class EngineDeaths:
    """A host under deaths: each runs all streams, on a channel of its own, and returns them with their stall."""

    def __init__(self, host: HostProcess, run_dir: Path) -> None:
        self.host = host
        self._run_dir = run_dir
        self._channels = itertools.count(1)

    def streams(self) -> Streams:
        return Streams(self.host.attach(next(self._channels)))

    async def undisturbed(self) -> dict[int, list[int]]:
        """Return the tokens of each stream."""
        streams = self.streams()
        await streams.begin()
        await streams.rest()
        return dict(streams.worker.token_ids)

    async def disturbed(self, disturb: Callable[[list[int]], None], **sampling: Any) -> Streams:
        """Do something to the cores, the active one first, in the middle of all streams."""
        await wait_standby(self.host)
        streams = self.streams()
        await streams.begin(**sampling)
        await streams.wait_tokens(TOKENS // 8)
        disturb(cores(self.host))
        await streams.watch(lambda: len(streams.worker.finished) == STREAMS)
        return streams

    async def standby(self) -> Streams:
        """Kill the active engine."""
        return await self.disturbed(kill_first)

    async def hang(self) -> Streams:
        """Stop the active engine."""
        return await self.disturbed(stop_first)

    async def fork_server(self) -> Streams:
        """Kill both engines, once they are so old that the next one is started at once."""
        await wait_standby(self.host)
        await asyncio.sleep(STABLE_S)
        return await self.disturbed(kill_all)

    async def cpu(self) -> Streams:
        """Kill the fork server, and have none start again until the streams have gone on without, and gone back."""
        await wait_standby(self.host)
        streams = self.streams()
        worker = streams.worker
        # Long enough to see the way back, too.
        await streams.begin(max_tokens=_LONGER)
        await streams.wait_tokens(TOKENS // 8)
        with self._broken_interpreter():
            os.kill(os.getsid(cores(self.host)[0]), signal.SIGKILL)
            counts: dict[int, int] = {}

            def went_on() -> bool:
                # What the dead engine has sent comes before the note.
                if ON_CPU in [state.note for state in worker.states] and not counts:
                    counts.update({stream: len(worker.token_ids[stream]) for stream in range(STREAMS)})
                return bool(counts) and all(len(worker.token_ids[stream]) > counts[stream] for stream in counts)

            await streams.watch(went_on)
        await wait_until(lambda: worker.states[-1].note == CONTINUED)
        seen = streams.least()
        await wait_until(lambda: streams.least() > seen)
        await worker.abort(*range(STREAMS))
        return streams

    @contextlib.contextmanager
    def _broken_interpreter(self) -> Iterator[None]:
        path = interpreter(self._run_dir)
        whole = path.read_text()
        path.write_text("#!/bin/sh\nexit 1\n")
        try:
            yield
        finally:
            path.write_text(whole)


def kill_first(pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGKILL)


def stop_first(pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGSTOP)


def kill_all(pids: list[int]) -> None:
    for pid in reversed(pids):
        os.kill(pid, signal.SIGKILL)


def ended(streams: Streams, reason: FinishReason) -> bool:
    """Whether all streams have ended, for this reason."""
    return len(streams.worker.finished) == STREAMS and set(streams.worker.finished.values()) == {reason}
