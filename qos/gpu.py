"""NVIDIA GPUs: what there is and how busy it is, by NVML, and the part of one that an engine may have, by MPS and MIG.

Not seen on hardware: written by NVIDIA's documentation, tested against a stand-in for NVML.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

_MPS_COMMAND: Final = "nvidia-cuda-mps"  # `comm` holds 15 characters of nvidia-cuda-mps-control
_MIB: Final = 1 << 20


class GpuPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a GPU that an engine may have; everything without limits.

    `device` is an index, a GPU's UUID or a MIG instance's, "" for what the driver shows first. `threads` is the part of
    its execution resources and `memory_bytes` of its memory that MPS gives out, both of them only where an MPS control
    daemon runs.
    """

    device: str = ""
    threads: float | None = None
    memory_bytes: int | None = None

    @property
    def needs_mps(self) -> bool:
        """Whether there is a limit that only MPS keeps."""
        return self.threads is not None or self.memory_bytes is not None

    def environment(self) -> dict[str, str]:
        """Return what tells CUDA so, in the environment of the engine's processes."""
        values = {}
        if self.device:
            values["CUDA_VISIBLE_DEVICES"] = self.device
        if self.threads is not None:
            values["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{self.threads * 100:g}"
        if self.memory_bytes is not None:
            # Device 0 is the first that the process sees.
            values["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={max(1, self.memory_bytes // _MIB)}M"
        return values


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a GPU that MIG has made, with memory and processors of its own."""

    uuid: str
    memory_bytes: int


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU now. `busy` is the part of the last moment in which it ran something, None where NVML does not say.

    `has_mig` says whether MIG is on, None where the GPU has none.
    """

    name: str
    uuid: str
    memory_bytes: int
    used_bytes: int
    busy: float | None
    has_mig: bool | None
    instances: tuple[MigInstance, ...] = ()


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """All of this machine; `error` says why there is none, or why no more is known, "" where all is well."""

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def read(nvml: Any = None) -> Gpus:
    """Ask the driver; `nvml` is pynvml, which is imported when it is not given. Never raises."""
    nvml = nvml or importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        return Gpus(error=str(exc))
    try:
        driver = str(nvml.nvmlSystemGetDriverVersion())
        gpus = tuple(_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(n)) for n in range(nvml.nvmlDeviceGetCount()))
        return Gpus(driver=driver, gpus=gpus, error="" if gpus else "the driver knows none")
    except nvml.NVMLError as exc:
        return Gpus(error=str(exc))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    busy = has_mig = None
    with contextlib.suppress(nvml.NVMLError):  # not known of a GPU that MIG has divided
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(nvml.NVMLError):  # not every kind of GPU can be divided
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
        has_mig = bool(current)
    return Gpu(
        name=str(nvml.nvmlDeviceGetName(handle)),
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=memory.total,
        used_bytes=memory.used,
        busy=busy,
        has_mig=has_mig,
        instances=tuple(_instances(nvml, handle)) if has_mig else (),
    )


def _instances(nvml: Any, handle: Any) -> Iterator[MigInstance]:
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # a place that no instance has
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            memory = nvml.nvmlDeviceGetMemoryInfo(instance)
            yield MigInstance(uuid=str(nvml.nvmlDeviceGetUUID(instance)), memory_bytes=memory.total)


def mps_runs(proc: Path = Path("/proc")) -> bool:
    """Return whether an MPS control daemon runs."""
    for path in proc.glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().strip() == _MPS_COMMAND:
                return True
    return False
