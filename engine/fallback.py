"""What an engine needs of the machine, and which one serves on the processor where a GPU's does not start."""

from __future__ import annotations

from typing import Final

import msgspec

from seedance.engine.settings import EngineSettings
from seedance.errors import EngineDead
from seedance.qos.gpu import GpuPart, mps_command, mps_error

_FALLBACK_RUN_DIR: Final = "cpu"


def fallback_settings(settings: EngineSettings) -> EngineSettings:
    """Return the settings of the engine on the processor: the same model, without the GPU's part and sizes."""
    return msgspec.structs.replace(
        settings,
        python=settings.failover.cpu_python,
        kv_bytes=settings.failover.cpu_kv_bytes,
        run_dir=f"{settings.run_dir}/{_FALLBACK_RUN_DIR}",
        enforce_eager=None,
        gpu=GpuPart(),
    )


def require_mps(part: GpuPart) -> None:
    """Raise EngineDead where nothing keeps an engine to its part of a GPU: CUDA would run it without limits."""
    error = mps_error(part.mps_directory) if part.needs_mps else ""
    if error:
        raise EngineDead(
            f"cannot keep the engine within engine.gpu.threads and engine.gpu.memory: {error}; "
            f"start it by `{mps_command(part.mps_directory)}`, or leave them out"
        )
