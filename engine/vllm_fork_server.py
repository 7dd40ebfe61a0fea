"""The fork server that the EngineCores of one host have in common, as their adapters use it.

It is started with the first core, and again with the next one after its end. Each core is a launch, by number, and has
a client that hears of it. All cores end with the fork server. It outlives its host, and is taken over by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from seedance.engine import vllm_control as control
from seedance.engine.ledger import Ledger
from seedance.engine.vllm_control import VllmSettings
from seedance.engine.vllm_process import ZygoteProcess, exit_text, identity_of, last_line
from seedance.errors import EngineDead

_STOP_GRACE_S: Final = 8.0  # above the fork server's own grace for the EngineCores
_KILL_GRACE_S: Final = 5.0
_SOCKET_PATH_BYTES: Final = 107

logger = logging.getLogger(__name__)


class CoreClient(Protocol):
    """Who hears of one core."""

    def core_launched(self, pid: int) -> None:
        """Its process is there."""

    def core_resolved(self, resolved: control.Resolved) -> None:
        """Take what its model turned out to be."""

    def core_ended(self, reason: str) -> None:
        """It is gone; told once, and nothing after it."""


class _Core:
    def __init__(self, client: CoreClient | None) -> None:
        self.client = client
        self.reason = ""
        self.ended = asyncio.Event()


class ForkServer:
    """One fork server and its log; the ledger stays its owner's.

    `settings` are the host's, with whole paths; those of a core may differ in what is not the environment's. `hosts`
    counts those that it had before this one.
    """

    def __init__(self, settings: VllmSettings, ledger: Ledger) -> None:
        run_dir = Path(settings.run_dir).absolute()
        cache_dir = str(Path(settings.cache_dir).absolute()) if settings.cache_dir else str(run_dir / "cache")
        self.settings = msgspec.structs.replace(settings, run_dir=str(run_dir), cache_dir=cache_dir)
        self.log_path = run_dir / "log" / "engine-core.log"
        self._run_dir = run_dir
        self._ledger = ledger
        self._process: ZygoteProcess | None = None
        self._settled = asyncio.Event()  # it listens, or is gone
        self._reason = ""
        self._taking_over = asyncio.Lock()
        self._launches = 0
        self.hosts = 0
        self._cores: dict[int, _Core] = {}

    async def take_over(
        self, choose: Callable[[Sequence[control.LeftCore]], list[control.LeftCore]]
    ) -> list[control.LeftCore]:
        """Go on with the fork server of a dead host; returns which of its cores were chosen, and ends the others.

        Who uses one says so by `adopt`.
        """
        async with self._taking_over:
            if self._process is not None:
                return []
            identity = identity_of(self.settings, self._ledger)
            found = await ZygoteProcess.take_over(self._address, identity, self._received, self._gone)
            if found is None:
                return []
            self._process, left = found
            self._settled = asyncio.Event()
            self._settled.set()
            self._launches, self.hosts = left.launches, left.hosts
            self._cores = {core.launch.launch: _Core(None) for core in left.cores}
            chosen = choose(left.cores)
            for core in left.cores:
                if core not in chosen:
                    self.kill(core.launch.launch)
            return chosen

    def adopt(self, launch: int, client: CoreClient) -> None:
        """Tell a client of a core that was taken over. Raises EngineDead when it has ended since."""
        if launch not in self._cores:
            raise EngineDead("it ended when its host had died")
        self._cores[launch].client = client

    async def ready(self) -> None:
        """Return once it can fork. Raises EngineDead when it ends instead, OSError when it cannot even be started."""
        if self._process is None:
            await self.take_over(lambda _: [])
        if self._process is None:
            self._start()
        process = self._process
        await self._settled.wait()
        if self._process is not process:
            raise EngineDead(self._reason)

    def admit(self, client: CoreClient) -> int:
        """Return the number of a new launch."""
        self._launches += 1
        self._cores[self._launches] = _Core(client)
        return self._launches

    def launch(self, launch: int, settings: VllmSettings, addresses: tuple[str, str], engine_row: int) -> None:
        """Fork a core that was admitted; its client hears of it."""
        if self._process is not None:
            self._process.send(control.Launch(launch, settings, *addresses, engine_row))

    def serves(self, news: control.Serving | control.Reloading) -> None:
        """Have it remember what a core serves, for the next host, or that it serves nothing now."""
        if self._process is not None:
            self._process.send(news)

    def kill(self, launch: int) -> None:
        """End a core at once; its client hears nothing more."""
        core = self._cores.get(launch)
        if core is not None:
            core.client = None
            if self._process is not None:
                self._process.send(control.Kill(launch))

    async def wait_ended(self, launch: int) -> None:
        """Wait until a core that was killed is gone; one that the kernel cannot end is not waited for."""
        core = self._cores.get(launch)
        if core is not None and self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_GRACE_S):
                    await core.ended.wait()

    @property
    def _address(self) -> str:
        """Where the next host finds it."""
        return str(self._run_dir / "fork-server")

    def socket_path(self, launch: int, direction: str) -> str:
        """Return the path of a core's socket."""
        return str(self._run_dir / f"core-{launch}.{direction}")

    async def stop(self) -> None:
        """End all cores, then the process; idempotent."""
        if self._process is not None:
            await self._process.stop(_STOP_GRACE_S)
            Path(self._address).unlink(missing_ok=True)
        shutil.rmtree(self._run_dir / "tmp", ignore_errors=True)

    def _start(self) -> None:
        self._prepare_run_dir()
        self._settled = asyncio.Event()
        self._reason = ""
        self._process = ZygoteProcess.start(
            self.settings, self._ledger, self._address, self.log_path, self._received, self._gone
        )

    def _prepare_run_dir(self) -> None:
        if len(os.fsencode(self.socket_path(999_999, "out"))) > _SOCKET_PATH_BYTES:
            raise OSError(0, "run_dir is too long for the path of a Unix socket", self.settings.run_dir)
        shutil.rmtree(self._run_dir / "tmp", ignore_errors=True)
        for left_over in (*self._run_dir.glob("core-*.*"), Path(self._address)):  # of one that was killed
            left_over.unlink(missing_ok=True)
        for directory in (self._run_dir / "tmp", self.log_path.parent):
            directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.log_path.replace(self.log_path.with_suffix(".log.1"))

    def _received(self, message: control.ToAdapter) -> None:
        match message:
            case control.Preloaded():
                logger.info("vLLM %s imported in %.1f s", message.vllm_version, message.seconds)
                self._settled.set()
            case control.Failed(0, reason):
                self._reason = reason
            case control.Left():
                pass  # it was read before
            case _ if message.launch in self._cores:
                self._core_news(message, self._cores[message.launch])

    def _core_news(self, message: control.CoreNews, core: _Core) -> None:
        client = core.client
        match message:
            case control.Failed(_, reason):
                core.reason = reason
            case control.Launched(_, pid) if client is not None:
                client.core_launched(pid)
            case control.Resolved() if client is not None:
                client.core_resolved(message)
            case control.Exited(launch, _, status):
                self._core_ended(launch, core.reason or exit_text(status))

    def _core_ended(self, launch: int, reason: str) -> None:
        core = self._cores.pop(launch)
        core.ended.set()
        if core.client is not None:
            core.client.core_ended(reason)

    def _gone(self) -> None:
        self._process = None
        self._reason = self._reason or f"its fork server ended: {last_line(self.log_path)}"
        self._settled.set()
        # The youngest first: who stands by is younger than whom it stands by for, and would be asked to take over.
        for launch in sorted(self._cores, reverse=True):
            if launch in self._cores:
                self._core_ended(launch, self._reason)
