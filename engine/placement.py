"""Where the engine of a new model comes up: beside the one that serves, or instead of it once it has gone.

Beside costs no pause, and memory for two. What is free is measured: on a processor by the kernel's own estimate and by
the limits of the control groups that we are in, on a GPU by NVML.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from seedance.engine.model_load import Place
from seedance.engine.settings import EngineSettings
from seedance.qos import gpu

_CPU_KV_BYTES: Final = 1 << 30  # what the CPU build reserves when nothing is said
_PROCESS_BYTES: Final = 512 << 20  # an engine's own, forked from one that has everything imported
_GPU_BYTES: Final = 2 << 30  # a CUDA context, graphs, and what a step needs
_NVIDIA_DEVICE: Final = Path("/dev/nvidiactl")
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def has_gpu() -> bool:
    """Return whether there is an NVIDIA device, which is what an engine then takes."""
    return _NVIDIA_DEVICE.exists()


def needed_bytes(settings: EngineSettings, weight_bytes: int, *, on_gpu: bool) -> int | None:
    """Return what an engine with such weights takes of its device's memory, None for all that there is."""
    if settings.kind == "synthetic":
        return 0
    if on_gpu:
        return weight_bytes + settings.kv_bytes + _GPU_BYTES if settings.kv_bytes else None
    return weight_bytes + (settings.kv_bytes or _CPU_KV_BYTES) + _PROCESS_BYTES


def choose(wish: Place, needed: int | None, free: int | None) -> Place:
    """Return where an engine comes up; `free` is None where nobody knows."""
    if wish != "auto":
        return wish
    if needed is None:
        return "instead"
    return "beside" if free is None or needed <= free else "instead"


def free_bytes(settings: EngineSettings, *, on_gpu: bool) -> int | None:
    """Return how much memory is free for one more engine, None where that is not known; may take a while on a GPU."""
    return (
        _free_of_gpu(settings.gpu.device)
        if on_gpu
        else min(_free_of_machine(_MEMINFO, _CGROUP, _CGROUPS), default=None)
    )


def _free_of_gpu(device: str) -> int | None:
    found = gpu.read().gpus
    if device.startswith("MIG-"):
        return None
    chosen = [one for number, one in enumerate(found) if device in ("", str(number), one.uuid)][:1]
    for one in chosen:
        if one.memory_bytes is not None and one.used_bytes is not None:
            return one.memory_bytes - one.used_bytes
    return None


def _free_of_machine(meminfo: Path, cgroup: Path, cgroups: Path) -> Iterator[int]:
    """Yield what is free by each that bounds it."""
    for line in _text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10
    place = next((line[3:] for line in _text(cgroup).splitlines() if line.startswith("0::/")), None)
    if place is None:
        return
    group = cgroups / place.lstrip("/")
    for folder in (group, *group.parents):
        limit, used = (_text(folder / f"memory.{name}").strip() for name in ("max", "current"))
        if limit.isdigit() and used.isdigit():
            # Pages of files count as used, and go when room is needed.
            files = next(
                (int(line[5:]) for line in _text(folder / "memory.stat").splitlines() if line[:5] == "file "), 0
            )
            yield max(0, int(limit) - int(used) + files)
        if folder == cgroups:
            return


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
