"""An engine at saturation in virtual time, under the host's watch: its steps, its pauses, and what the kernel tells.

The scheduler and the ledger are the real ones, and so is the watch. The process is a file in a folder that stands for
/proc: how long a step takes, what uses the processor meanwhile and which state the main thread is in is the script's.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from support.virtual_time import VirtualTimeLoop
from support.workloads import settings

from seedance.engine.core_watch import CoreWatch
from seedance.engine.ledger import Ledger
from seedance.engine.token_scheduler import TokenScheduler

PID: Final = 4711
SLOTS: Final = 8
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_KV_BLOCKS: Final = 100_000
_LENGTH: Final = 200


class Span(NamedTuple):
    """A step, or what comes between two: how long, what part of a processor it uses, the main thread's state.

    `rests` is for time in which there is nothing to do, and the engine gives its signs of life as it does then.
    """

    seconds: float
    cpu: float = 1.0
    state: str = "R"
    gpu_busy: bool | None = None
    rests: bool = False


class Adapter:
    """What the watch knows of the engine."""

    def __init__(self) -> None:
        self.core_pid: int | None = PID
        self.given_up: list[str] = []

    def give_up(self, reason: str) -> None:
        """Be taken for dead."""
        self.given_up.append(reason)
        self.core_pid = None


class WatchedEngine:
    """An engine that does what its spans say, one after the other; also the GPU's watch as far as that is asked."""

    def __init__(self, proc: Path) -> None:
        self.loop = VirtualTimeLoop()
        self.ledger = Ledger.create().for_engine(3)
        self.adapter = Adapter()
        self.steps = 0
        self._scheduler = TokenScheduler(settings(slots=SLOTS, kv_blocks=_KV_BLOCKS), self.ledger, 0.0)
        self._requests = itertools.count()
        self._left: dict[str, int] = {}
        self._unread: dict[str, int] = {}
        self._stat = proc / str(PID) / "stat"
        self._stat.parent.mkdir()
        self._cpu_s = 0.0
        self._span = Span(0.0)
        self._began_s = 0.0
        self._watch = CoreWatch(lambda: [self], self, proc)  # type: ignore[arg-type, list-item]

    def is_busy(self, now_s: float) -> bool | None:
        """See `GpuWatch.is_busy`; asked once at every look, just after the process was looked at."""
        return self._span.gpu_busy

    def run(self, spans: Iterable[Span]) -> float | None:
        """Live through the spans under the watch; returns when it gave the engine up, None if it never did."""
        return self.loop.run_until_complete(self._run(spans))

    def close(self) -> None:
        """Release the loop and the ledger."""
        self.loop.close()
        self.ledger.close()

    async def _run(self, spans: Iterable[Span]) -> float | None:
        self._show()
        watching = asyncio.create_task(self._look())
        for span in spans:
            self._begin(span)
            if span.rests:
                await self._rest(span.seconds)
            else:
                await self._step(span.seconds)
            if watching.done():
                return watching.result()
        watching.cancel()
        return None

    async def _look(self) -> float:
        """Look as `CoreWatch.run` does, at a process whose time has gone on meanwhile."""
        while not self.adapter.given_up:
            self._show()
            self._watch.look(self.loop.time())
            await asyncio.sleep(1.0)
        return self.loop.time()

    def _begin(self, span: Span) -> None:
        now_s = self.loop.time()
        self._cpu_s += (now_s - self._began_s) * self._span.cpu
        self._span, self._began_s = span, now_s

    def _show(self) -> None:
        cpu_s = self._cpu_s + (self.loop.time() - self._began_s) * self._span.cpu
        numbers = " ".join(["0"] * 10)
        self._stat.write_text(f"{PID} (a) b) {self._span.state} {numbers} {int(cpu_s * TICKS_PER_S)} 0 0\n")

    async def _step(self, seconds: float) -> None:
        """Make a step of a full batch."""
        scheduler, now_s = self._scheduler, self.loop.time()
        while len(self._left) < 2 * SLOTS:
            key = f"r{next(self._requests)}"
            scheduler.submitted(key, 1 + len(self._left) % 3, len(self._left), 10, _LENGTH, now_s)
            self._left[key], self._unread[key] = _LENGTH, 10
        running = [key for key in self._left if not self._unread[key]]
        step = scheduler.step_begins(now_s, _KV_BLOCKS, SLOTS - len(running))
        scheduled = dict.fromkeys(running, 1) | step.prefill
        for key, tokens in step.prefill.items():
            self._unread[key] -= tokens
        scheduler.step_scheduled(scheduled, now_s)
        await asyncio.sleep(seconds)
        scheduler.step_ended(self.loop.time())
        self.steps += 1
        for key in running:
            self._left[key] -= 1
            if not self._left[key]:
                del self._left[key], self._unread[key]
                scheduler.finished(key, self.loop.time())

    async def _rest(self, seconds: float) -> None:
        ends_s = self.loop.time() + seconds
        while (now_s := self.loop.time()) < ends_s:
            await asyncio.sleep(min(self._scheduler.rest(now_s), ends_s - now_s))


def at_saturation(choose: Random, left_s: float, *, on_gpu: bool) -> Iterator[Span]:
    """Yield so long a time at saturation, with all that keeps an engine from its steps and is no hang.

    On a GPU the main thread sleeps while that computes; on the processor other threads do, or it does itself.
    """
    pauses = [
        Span(2.0),  # the garbage collector, and a graph that is captured
        Span(15.0, cpu=0.6, state="S"),  # a kernel that is compiled in other threads
        Span(20.0, cpu=0.0, state="D"),  # weights or swapped pages that come from a disk
        Span(30.0, cpu=0.0),  # a machine so busy that it does not get its turn
        Span(120.0, cpu=0.3, state="S", gpu_busy=True) if on_gpu else Span(120.0, cpu=4.0, state="S"),  # a long prompt
        Span(120.0, cpu=0.0, state="S", gpu_busy=True) if on_gpu else Span(120.0),
        Span(5.0, cpu=0.0, state="S", gpu_busy=on_gpu or None),  # it waits for something, but not for long
        Span(90.0, cpu=0.001, state="S", gpu_busy=False if on_gpu else None, rests=True),
    ]
    while left_s > 0:
        if choose.random() < 0.004:
            span = choose.choice(pauses)
        else:
            seconds = choose.lognormvariate(-2.0, 0.8)
            span = Span(seconds, cpu=0.2, state="S", gpu_busy=True) if on_gpu else Span(seconds)
        left_s -= span.seconds
        yield span
