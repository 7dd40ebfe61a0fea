"""A stand-in for pynvml, with GPUs of the test's making: the calls that are used here, and how they fail."""

# ruff: noqa: N802 - the names are the library's

from __future__ import annotations

from types import SimpleNamespace

import msgspec


class FakeInstance(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str
    memory_bytes: int


class FakeGpu(msgspec.Struct, frozen=True, kw_only=True):
    """`instances` are by place; None is a place without one. Without `mig` the GPU cannot be divided."""

    name: str
    uuid: str
    memory_bytes: int = 80 << 30
    used_bytes: int = 8 << 30
    busy_percent: int | None = 50
    mig: bool | None = None
    instances: tuple[FakeInstance | None, ...] = ()


class FakeNvml:
    """`pynvml` as a module is used; `is_open` says whether the library is loaded."""

    class NVMLError(Exception):
        pass

    def __init__(self, *gpus: FakeGpu, error: str = "", lost: str = "") -> None:
        """`error` is what loading the driver's library says, `lost` what each GPU says."""
        self._gpus = gpus
        self._error = error
        self._lost = lost
        self.is_open = False

    def nvmlInit(self) -> None:
        if self._error:
            raise self.NVMLError(self._error)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        assert self.is_open
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        assert self.is_open
        return "615.10"

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if self._lost:
            raise self.NVMLError(self._lost)
        return self._gpus[index]

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return handle.name

    def nvmlDeviceGetUUID(self, handle: FakeGpu | FakeInstance) -> str:
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu | FakeInstance) -> SimpleNamespace:
        return SimpleNamespace(total=handle.memory_bytes, used=getattr(handle, "used_bytes", 0))

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> SimpleNamespace:
        if handle.busy_percent is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=handle.busy_percent, memory=0)

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        if handle.mig is None:
            raise self.NVMLError("Not Supported")
        return [int(handle.mig), int(handle.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return len(handle.instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeInstance:
        instance = handle.instances[index]
        if instance is None:
            raise self.NVMLError("Not Found")
        return instance
