"""The programs that keep limits, loaded with maps of their own, for tests."""

from __future__ import annotations

import ctypes
import time
from typing import Final, Self

from seedance.bpf.abi import MARK_BASE, TenantLimit, TenantPace, TenantTraffic
from seedance.bpf.loader import BpfObject, Program
from seedance.bpf.maps import HashMap, PerCpuHashMap

MAPS: Final = ("tenant_limits", "tenant_pace", "tenant_traffic")
NS_PER_S: Final = 1_000_000_000


class LoadedLimits:
    """An object with the maps of tenants, and those maps."""

    def __init__(self, name: str, sharing: LoadedLimits | None = None, **rodata: int) -> None:
        shared = {one: sharing.object.map(one) for one in MAPS} if sharing is not None else {}
        self.object: BpfObject = BpfObject(name, maps=shared, rodata=rodata)
        self.limits = HashMap(self.object.map("tenant_limits"), ctypes.c_uint32, TenantLimit)
        self.pace = HashMap(self.object.map("tenant_pace"), ctypes.c_uint32, TenantPace)
        self._traffic: PerCpuHashMap[int, TenantTraffic] = PerCpuHashMap(
            self.object.map("tenant_traffic"), ctypes.c_uint32, TenantTraffic
        )

    def program(self, name: str) -> Program:
        return self.object.program(name)

    def set_limit(self, index: int, *, egress: int = 0, ingress: int = 0) -> None:
        """Grant a tenant so many bytes a second, and begin to count."""
        if self.pace.get(index) is None:
            self.pace.set(index, TenantPace())
        if self._traffic.get(index) is None:
            self._traffic.set(index, TenantTraffic())
        self.limits.set(index, TenantLimit(f"tenant-{index}".encode(), egress, ingress))

    def traffic(self, index: int) -> dict[str, int]:
        """Return what was counted for a tenant, without the zeros."""
        counted = self._traffic.get(index)
        names = [field[0] for field in TenantTraffic._fields_]
        return {name: getattr(counted, name) for name in names if counted is not None and getattr(counted, name)}

    def close(self) -> None:
        self.object.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mark_of(index: int) -> int:
    """Return SO_MARK of a tenant's sockets."""
    return MARK_BASE | index


def now_ns() -> int:
    """Return the time as the programs see it."""
    return time.monotonic_ns()
