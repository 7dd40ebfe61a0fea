"""Where the engines of a host come from: adapters that have in common what is costly to start."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from seedance.engine.adapter import EngineAdapter
from seedance.engine.ledger import Ledger
from seedance.engine.settings import EngineSettings
from seedance.errors import EngineDead

if TYPE_CHECKING:
    from seedance.engine.vllm_control import LeftCore, VllmSettings
    from seedance.engine.vllm_fork_server import ForkServer


class EngineSource(Protocol):
    """A maker of engines."""

    async def left(self, settings: EngineSettings, most: int) -> Sequence[LeftCore]:
        """Return engines like these that a dead host has left, the active one first; its others are ended."""

    def create(self, settings: EngineSettings, ledger: Ledger, left: LeftCore | None = None) -> EngineAdapter:
        """Return an engine that is not started; `ledger` is that of its row, and stays its owner's.

        With `left` its start is to go on with that one.
        """

    async def stop(self) -> None:
        """End what the engines have in common; they have been stopped before."""


def create_source(settings: EngineSettings, ledger: Ledger, loop: asyncio.AbstractEventLoop) -> EngineSource:
    """Return the source for a kind of engine; only its own modules are imported."""
    return SyntheticSource(loop) if settings.kind == "synthetic" else VllmSource(ledger)


class SyntheticSource:
    """Engines without a model."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def left(self, settings: EngineSettings, most: int) -> Sequence[LeftCore]:
        """They end with their host."""
        return ()

    def create(self, settings: EngineSettings, ledger: Ledger, left: LeftCore | None = None) -> EngineAdapter:
        """Return one more."""
        from seedance.engine.synthetic import SyntheticAdapter  # noqa: PLC0415

        return SyntheticAdapter(settings, ledger, self._loop)

    async def stop(self) -> None:
        """They have nothing in common."""


class VllmSource:
    """EngineCores of one fork server; those of another interpreter have another."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._servers: dict[str, ForkServer] = {}

    async def left(self, settings: EngineSettings, most: int) -> Sequence[LeftCore]:
        """Return what the fork server runs, if it is one that we would start."""
        from seedance.engine.vllm import core_settings  # noqa: PLC0415

        vllm = vllm_settings(settings)
        server = self._server(vllm)

        def of_use(cores: Sequence[LeftCore]) -> list[LeftCore]:
            try:
                ours = core_settings(vllm, server)
            except EngineDead:
                return []  # as its start will tell
            same = [core for core in cores if core.serving is not None and core.serving.settings == ours]
            return sorted(same, key=lambda core: core.engine_row != self._ledger.active_row)[:most]

        return await server.take_over(of_use)

    def create(self, settings: EngineSettings, ledger: Ledger, left: LeftCore | None = None) -> EngineAdapter:
        """Return one more."""
        from seedance.engine.vllm import VllmAdapter  # noqa: PLC0415

        vllm = vllm_settings(settings)
        return VllmAdapter(vllm, ledger, self._server(vllm), left)

    def _server(self, settings: VllmSettings) -> ForkServer:
        from seedance.engine.vllm_fork_server import ForkServer  # noqa: PLC0415

        server = self._servers.get(settings.run_dir)
        if server is None:
            server = self._servers[settings.run_dir] = ForkServer(settings, self._ledger)
        return server

    async def stop(self) -> None:
        """End the fork servers."""
        for server in self._servers.values():
            await server.stop()


def vllm_settings(settings: EngineSettings) -> VllmSettings:
    """Return an engine's settings as vLLM's adapter has them."""
    from seedance.engine.vllm_control import VllmSettings  # noqa: PLC0415

    return VllmSettings(
        model=settings.model,
        name=settings.name,
        run_dir=settings.run_dir,
        kv_bytes=settings.kv_bytes,
        max_model_len=settings.max_model_len or None,
        max_num_seqs=settings.max_streams,
        step_target_s=settings.step_target_s,
        threads=settings.threads,
        enforce_eager=settings.enforce_eager,
        dtype=settings.dtype,
        cache_dir=settings.cache_dir,
        offline=settings.offline,
        gpu=settings.gpu,
        python=settings.python or sys.executable,
    )
