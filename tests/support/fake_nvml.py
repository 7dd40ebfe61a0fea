"""A stand-in for pynvml, with GPUs of the test's making: the calls that are used here, and how they fail."""

# ruff: noqa: N802 - the names are the library's

from __future__ import annotations

from types import SimpleNamespace

import msgspec


class FakeInstance(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str
    memory_bytes: int | None


class FakeGpu(msgspec.Struct, frozen=True, kw_only=True):
    """`instances` are by place; None is a place without one. Without `mig` the GPU cannot be divided.

    `lost` is what NVML says instead of a handle, `silent` whether it says nothing of a GPU whose handle it gives.
    """

    name: str
    uuid: str
    lost: str = ""
    silent: bool = False
    memory_bytes: int | None = 80 << 30
    used_bytes: int = 8 << 30
    busy_percent: int | None = 50
    mig: bool | None = None
    instances: tuple[FakeInstance | None, ...] = ()


class FakeNvml:
    """`pynvml` as a module is used; `is_open` says whether the library is loaded."""

    class NVMLError(Exception):
        pass

    def __init__(
        self, *gpus: FakeGpu, error: str = "", driver: str = "615.10", uncounted: str = "", unclosed: str = ""
    ) -> None:
        """`error` is what loading the driver's library says, `uncounted` what counting does, `unclosed` what closing.

        Without `driver` its version is not known.
        """
        self._gpus = gpus
        self._error = error
        self._driver = driver
        self._uncounted = uncounted
        self._unclosed = unclosed
        self.is_open = False

    def _fail(self, error: str) -> None:
        if error:
            raise self.NVMLError(error)

    def _ask(self, handle: FakeGpu | FakeInstance) -> None:
        self._fail("Not Supported" if getattr(handle, "silent", False) else "")

    def nvmlInit(self) -> None:
        self._fail(self._error)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        assert self.is_open
        self.is_open = False
        self._fail(self._unclosed)

    def nvmlSystemGetDriverVersion(self) -> str:
        assert self.is_open
        self._fail("" if self._driver else "Unknown Error")
        return self._driver

    def nvmlDeviceGetCount(self) -> int:
        self._fail(self._uncounted)
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        gpu = self._gpus[index]
        self._fail(gpu.lost)
        return gpu

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        self._ask(handle)
        return handle.name

    def nvmlDeviceGetUUID(self, handle: FakeGpu | FakeInstance) -> str:
        self._ask(handle)
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu | FakeInstance) -> SimpleNamespace:
        self._ask(handle)
        self._fail("Not Supported" if handle.memory_bytes is None else "")
        return SimpleNamespace(total=handle.memory_bytes, used=getattr(handle, "used_bytes", 0))

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> SimpleNamespace:
        self._ask(handle)
        self._fail("Not Supported" if handle.busy_percent is None else "")
        return SimpleNamespace(gpu=handle.busy_percent, memory=0)

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        self._ask(handle)
        if handle.mig is None:
            raise self.NVMLError("Not Supported")
        return [int(handle.mig), int(handle.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        self._ask(handle)
        return len(handle.instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeInstance:
        instance = handle.instances[index]
        if instance is None:
            raise self.NVMLError("Not Found")
        return instance
