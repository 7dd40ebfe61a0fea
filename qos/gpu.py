"""NVIDIA GPUs: what there is and how busy it is, by NVML, and the part of one that an engine may have, by MPS and MIG.

Not seen on hardware: written by NVIDIA's documentation, tested against a stand-in for NVML.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shlex
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

MPS_DIRECTORY: Final = "/run/nvidia-mps"
"""Where MPS is looked for: not in its own default below /tmp, of which a service has one to itself."""

_MPS_SOCKET: Final = "control"  # in CUDA_MPS_PIPE_DIRECTORY; SOCK_SEQPACKET
_MIB: Final = 1 << 20


class GpuPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a GPU that an engine may have; everything without limits.

    `device` is an index, a GPU's UUID or a MIG instance's, "" for what the driver shows first. `threads` is the part of
    its execution resources and `memory_bytes` of its memory that MPS gives out, both of them only where an MPS control
    daemon listens in `mps_directory`.
    """

    device: str = ""
    threads: float | None = None
    memory_bytes: int | None = None
    mps_directory: str = MPS_DIRECTORY

    @property
    def needs_mps(self) -> bool:
        """Whether there is a limit that only MPS keeps."""
        return self.threads is not None or self.memory_bytes is not None

    def environment(self) -> dict[str, str]:
        """Return what tells CUDA so, in the environment of the engine's processes."""
        values = {"CUDA_MPS_PIPE_DIRECTORY": self.mps_directory}
        if self.device:
            values["CUDA_VISIBLE_DEVICES"] = self.device
        if self.threads is not None:
            values["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{self.threads * 100:g}"
        if self.memory_bytes is not None:
            # Device 0 is the first that the process sees.
            values["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={max(1, self.memory_bytes // _MIB)}M"
        return values


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a GPU that MIG has made, with memory and processors of its own; None is what NVML does not say."""

    uuid: str
    memory_bytes: int | None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU now. `busy` is the part of the last moment in which it ran something, `has_mig` says whether MIG is on.

    None, or "" for a text, is what NVML does not say of this one.
    """

    name: str
    uuid: str
    memory_bytes: int | None
    used_bytes: int | None
    busy: float | None
    has_mig: bool | None
    instances: tuple[MigInstance, ...] = ()


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """All of this machine; `error` says why there is none, or why no more is known, "" where all is well."""

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def read(nvml: Any = None) -> Gpus:
    """Ask the driver; `nvml` is pynvml, which is imported when it is not given. Raises nothing of NVML's."""
    nvml = nvml or importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        return Gpus(error=str(exc))
    try:
        driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion)
        gpus, error = _gpus(nvml)
        return Gpus(driver=str(driver or ""), gpus=gpus, error=error)
    finally:
        _ask(nvml, nvml.nvmlShutdown)


def _ask(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer, None where NVML does not know: what it does not say of one GPU it may say of the others."""
    with contextlib.suppress(nvml.NVMLError):
        return question(*arguments)
    return None


def _gpus(nvml: Any) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that can be asked, and why others cannot, or why there is none."""
    gpus, error = [], ""
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as exc:
        return (), str(exc)
    for number in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
        except nvml.NVMLError as exc:
            error = str(exc)
        else:
            gpus.append(_gpu(nvml, handle))
    return tuple(gpus), error if count else "the driver knows none"


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)  # not known of a GPU that MIG has divided
    mig = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)  # not every kind of GPU can be divided
    return Gpu(
        name=str(_ask(nvml, nvml.nvmlDeviceGetName, handle) or ""),
        uuid=str(_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or ""),
        memory_bytes=memory and memory.total,
        used_bytes=memory and memory.used,
        busy=rates and rates.gpu / 100,
        has_mig=mig and bool(mig[0]),
        instances=tuple(_instances(nvml, handle)) if mig and mig[0] else (),
    )


def _instances(nvml: Any, handle: Any) -> Iterator[MigInstance]:
    for number in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        instance = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        uuid = instance and _ask(nvml, nvml.nvmlDeviceGetUUID, instance)
        if uuid:  # else a place that no instance has
            memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, instance)
            yield MigInstance(uuid=str(uuid), memory_bytes=memory and memory.total)


def mps_error(directory: str) -> str:
    """Return why CUDA would not find MPS by this CUDA_MPS_PIPE_DIRECTORY, "" where its control daemon listens there.

    It is asked as CUDA does, and as this process sees the directory: a service does not see all of the machine's
    files, nor everybody's processes. Never waits.
    """
    path = os.path.join(directory, _MPS_SOCKET)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except OSError as exc:
            # A full queue, or another kind of socket: either way somebody listens.
            if exc.errno not in (errno.EAGAIN, errno.EPROTOTYPE):
                return f"no MPS control daemon can be reached at '{path}': {exc.strerror or exc}"
    return ""


def mps_command(directory: str) -> str:
    """Return what root types to start MPS's control daemon there."""
    where = shlex.quote(directory)
    return f"install -d -m 0755 {where} && CUDA_MPS_PIPE_DIRECTORY={where} nvidia-cuda-mps-control -d"
