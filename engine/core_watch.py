"""Looks at the processes of a host's engines, and has those that hang taken for dead (`progress` says what that is)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

from seedance.engine.adapter import EngineAdapter
from seedance.engine.gpu_watch import GpuWatch
from seedance.engine.ledger import Ledger
from seedance.engine.progress import LOOK_EVERY_S, Progress, Sight

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
# Behind the process's name, which may contain anything: state, and the ticks in user and kernel mode.
_STATE, _USER, _SYSTEM = 0, 11, 12


class Watched(Protocol):
    """An engine as far as it is watched; `ledger` is that of its row."""

    adapter: EngineAdapter
    ledger: Ledger


class CoreWatch:
    """The watch over engines that are up; `engines` returns them. The GPU's watch stays its owner's.

    `proc` is where the kernel tells of processes.
    """

    def __init__(
        self, engines: Callable[[], Iterable[Watched]], gpu: GpuWatch | None = None, proc: Path = Path("/proc")
    ) -> None:
        self._engines = engines
        self._gpu = gpu
        self._proc = proc
        self._known: dict[Watched, Progress] = {}

    async def run(self) -> None:
        """Look at them until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self.look(loop.time())
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self, now_s: float) -> None:
        """Look once; what hangs is given up."""
        engines = [engine for engine in self._engines() if engine.adapter.core_pid is not None]
        self._known = {engine: self._known.get(engine) or Progress() for engine in engines}
        for engine, progress in list(self._known.items()):
            sight = self._sight(engine, now_s)
            reason = progress.look(sight) if sight is not None else ""
            if reason:
                engine.adapter.give_up(reason)

    def _sight(self, engine: Watched, now_s: float) -> Sight | None:
        """Look at an engine; None when it has just ended, of which others tell."""
        try:
            text = (self._proc / str(engine.adapter.core_pid) / "stat").read_text()
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()
        record = engine.ledger.engine(engine.ledger.engine_row)
        return Sight(
            now_s=now_s,
            sign=None if record is None else record.beat_s,
            cpu_s=(int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK_S,
            process_state=fields[_STATE],
            gpu_busy=None if self._gpu is None else self._gpu.is_busy(time.monotonic()),
        )
