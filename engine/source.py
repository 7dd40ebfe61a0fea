"""Where the engines of a host come from: adapters that have in common what is costly to start."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Protocol

from seedance.engine.adapter import EngineAdapter
from seedance.engine.ledger import Ledger
from seedance.engine.settings import EngineSettings

if TYPE_CHECKING:
    from seedance.engine.vllm_control import VllmSettings
    from seedance.engine.vllm_fork_server import ForkServer


class EngineSource(Protocol):
    """A maker of engines."""

    def create(self, settings: EngineSettings, ledger: Ledger) -> EngineAdapter:
        """Return an engine that is not started; `ledger` is that of its row, and stays its owner's."""

    async def stop(self) -> None:
        """End what the engines have in common; they have been stopped before."""


def create_source(settings: EngineSettings, ledger: Ledger, loop: asyncio.AbstractEventLoop) -> EngineSource:
    """Return the source for a kind of engine; only its own modules are imported."""
    return SyntheticSource(loop) if settings.kind == "synthetic" else VllmSource(ledger)


class SyntheticSource:
    """Engines without a model."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def create(self, settings: EngineSettings, ledger: Ledger) -> EngineAdapter:
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

    def create(self, settings: EngineSettings, ledger: Ledger) -> EngineAdapter:
        """Return one more."""
        from seedance.engine.vllm import VllmAdapter  # noqa: PLC0415
        from seedance.engine.vllm_fork_server import ForkServer  # noqa: PLC0415

        vllm = vllm_settings(settings)
        server = self._servers.get(vllm.run_dir)
        if server is None:
            server = self._servers[vllm.run_dir] = ForkServer(vllm, self._ledger)
        return VllmAdapter(vllm, ledger, server)

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
