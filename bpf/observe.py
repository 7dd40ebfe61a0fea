"""See what tenants get: round trips of their connections, time on processors and run queues, calls of the CUDA driver.

Three objects that do not need each other: `sockops` (on the cgroup of the listeners), `sched` and `cuda`. What this
machine cannot do is told in `Observer.off`, and the rest works. The programs stay attached while the Observer is open.
Their counts outlive it where the maps are pinned, so that they go on when the daemon has started anew.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from seedance.bpf.loader import BpfObject, Link
from seedance.bpf.maps import HashMap, PerCpuArrayMap
from seedance.bpf.observe_abi import CudaCalls, RunningSlice, TenantCpu, TenantNetwork
from seedance.errors import BpfLoadError, KernelError

NETWORK: Final = "observe_network"
CPU: Final = "observe_cpu"
CUDA: Final = "observe_cuda"

LAUNCH_FUNCTIONS: Final = (
    "cuLaunchKernel",
    "cuLaunchKernel_ptsz",
    "cuLaunchKernelEx",
    "cuLaunchKernelEx_ptsz",
    "cuGraphLaunch",
    "cuGraphLaunch_ptsz",
)
"""What counts as a launch, as far as a library has it; _ptsz are those for per-thread default streams."""
ALLOCATION_FUNCTIONS: Final = (
    "cuMemAlloc",
    "cuMemAlloc_v2",
    "cuMemAllocAsync",
    "cuMemAllocAsync_ptsz",
    "cuMemAllocManaged",
)
"""What counts as an allocation: functions whose second argument is the size, and which return 0 on success."""

_P = TypeVar("_P", bound="_Part")
_V = TypeVar("_V", bound=ctypes.Structure)


class ObservedUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a tenant. Counters and histograms run on since the tenant's first appearance.

    `rtt_us` (of smoothed RTTs) and `ack_interval_us` are means of what came since the last call of `Observer.usage`, or
    the last ones that there were; `min_rtt_us` is the least ever. Slots of histograms: see `observe_abi`.
    """

    rtt_us: int = 0
    min_rtt_us: int = 0
    ack_interval_us: int = 0
    retransmits: int = 0
    on_cpu_s: float = 0.0
    run_queue_s: float = 0.0
    cuda_launches: int = 0
    cuda_bytes: int = 0
    rtt_histogram: tuple[int, ...] = ()
    ack_interval_histogram: tuple[int, ...] = ()
    run_queue_histogram: tuple[int, ...] = ()


class CudaUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of the CUDA driver by one process. What it freed is not taken off `allocated_bytes`."""

    launches: int
    allocations: int
    allocated_bytes: int
    failed_allocations: int


class Observer:
    """Attaches the observing programs, tells them whose cgroup is whose, and reads what they have counted.

    cgroup        a cgroup v2 group in which, or below which, the listening sockets were made
    pins          folder in a BPF file system for the maps; they go with the Observer without it
    cuda_library  path of the driver library whose calls are counted
    """

    def __init__(self, *, cgroup: Path | None, pins: Path | None = None, cuda_library: str = "") -> None:
        self.off: dict[str, str] = {}
        """What is not observed, and why: `observe_network`, `observe_cpu`, `observe_cuda`."""
        self._tenants: frozenset[int] = frozenset()
        self._network: _Network | None = None
        self._cuda: _Cuda | None = None
        if cgroup is None:
            self.off[NETWORK] = "there is no cgroup v2 group for the sockets"
        else:
            self._network = self._started(NETWORK, lambda: _Network(pins, cgroup))
        self._cpu = self._started(CPU, lambda: _Cpu(pins))
        if not cuda_library:
            self.off[CUDA] = "no CUDA driver library is configured"
        else:
            self._cuda = self._started(CUDA, lambda: _Cuda(pins, cuda_library))

    def tenants_changed(self, cgroup_ids: Mapping[int, int]) -> None:
        """Take note of every tenant's cgroup now: the inode number of its folder → the tenant's index.

        What was counted of tenants that are gone is forgotten. Raises KernelError.
        """
        for part in (self._cpu, self._cuda):
            if part is not None:
                part.tenants_changed(cgroup_ids)
        tenants = frozenset(cgroup_ids.values())
        for index in self._tenants - tenants:
            self.forget(index)
        self._tenants = tenants

    def forget(self, index: int) -> None:
        """Drop what was counted of a tenant, so that another one can have its index. Raises KernelError."""
        for part in self._parts():
            part.forget(index)

    def usage(self) -> dict[int, ObservedUsage]:
        """Return what was seen of each tenant, by index; a tenant of whom nothing was seen is not in it."""
        return self._usage(None)

    def usage_of(self, index: int) -> ObservedUsage | None:
        """Return what was seen of one tenant, None where nothing was."""
        return self._usage(index).get(index)

    def _usage(self, only: int | None) -> dict[int, ObservedUsage]:
        found: dict[int, dict[str, object]] = {}
        for part in self._parts():
            for index, figures in part.figures(only):
                found.setdefault(index, {}).update(figures)
        return {index: msgspec.convert(figures, ObservedUsage) for index, figures in found.items()}

    def cuda_processes(self) -> dict[int, CudaUsage]:
        """Return the calls of each process that used the driver library, by process id; some have ended since."""
        return self._cuda.processes() if self._cuda is not None else {}

    def close(self) -> None:
        """Detach everything; maps that are pinned stay."""
        for part in self._parts():
            part.close()
        self._network = self._cpu = self._cuda = None

    def _parts(self) -> list[_Part]:
        return [part for part in (self._network, self._cpu, self._cuda) if part is not None]

    def _started(self, name: str, make: Callable[[], _P]) -> _P | None:
        try:
            part = make()
        except KernelError as error:
            self.off[name] = str(error)
            return None
        try:
            part.attach()
        except KernelError as error:
            self.off[name] = str(error)
            part.close()
            return None
        return part


class _Part:
    """An object that is loaded, and its programs when they are attached."""

    def __init__(self, name: str, pins: Path | None, maps: tuple[str, ...]) -> None:
        """Load; `maps` are those that no other object has."""
        self.object = _load(name, pins, maps)
        self._links: list[Link] = []

    def attach(self) -> None:
        raise NotImplementedError

    def figures(self, only: int | None) -> Iterator[tuple[int, dict[str, object]]]:
        """Yield what was counted of each tenant, or of one alone."""
        raise NotImplementedError

    def forget(self, index: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._links.clear()
        self.object.close()


def _load(name: str, pins: Path | None, maps: tuple[str, ...]) -> BpfObject:
    """Load an object. Where maps of another layout are pinned, those of another version, counting begins anew."""
    try:
        return BpfObject(name, pins=pins)
    except BpfLoadError:
        raise
    except KernelError as error:
        left = [pins / name for name in maps if (pins / name).exists()] if pins is not None else []
        if error.errno != errno.EINVAL or not left:
            raise
    for pin in left:
        pin.unlink()
    return BpfObject(name, pins=pins)


def _rows(table: HashMap[int, _V], only: int | None) -> Iterable[tuple[int, _V]]:
    if only is None:
        return table.items()
    row = table.get(only)
    return [] if row is None else [(only, row)]


class _Mean:
    """The mean of what came between two looks at a sum and a count that only grow, for each tenant."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int, int]] = {}

    def update(self, index: int, total: int, count: int) -> int:
        last_total, last_count, mean = self._last.get(index, (0, 0, 0))
        if count > last_count:
            mean = round((total - last_total) / (count - last_count))
        self._last[index] = (total, count, mean)
        return mean

    def forget(self, index: int) -> None:
        self._last.pop(index, None)


class _Network(_Part):
    def __init__(self, pins: Path | None, cgroup: Path) -> None:
        super().__init__("sockops", pins, ("socket_heard", "tenant_network"))
        self._cgroup = cgroup
        self._tenants = HashMap(self.object.map("tenant_network"), ctypes.c_uint32, TenantNetwork)
        self._rtt_us = _Mean()
        self._ack_interval_us = _Mean()

    def attach(self) -> None:
        try:
            descriptor = os.open(self._cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise KernelError(f"open the cgroup '{self._cgroup}'", error.errno or errno.ENOENT) from error
        try:
            self._links.append(self.object.program("observe_connections").attach_cgroup(descriptor))
        finally:
            os.close(descriptor)

    def figures(self, only: int | None) -> Iterator[tuple[int, dict[str, object]]]:
        for index, seen in _rows(self._tenants, only):
            yield (
                index,
                {
                    "rtt_us": self._rtt_us.update(index, seen.rtt_sum_us, seen.rtt_samples),
                    "min_rtt_us": seen.min_rtt_us,
                    "ack_interval_us": self._ack_interval_us.update(index, seen.ack_interval_sum_us, seen.acks),
                    "retransmits": seen.retransmits,
                    "rtt_histogram": tuple(seen.rtt_histogram),
                    "ack_interval_histogram": tuple(seen.ack_interval_histogram),
                },
            )

    def forget(self, index: int) -> None:
        self._tenants.delete(index)
        self._rtt_us.forget(index)
        self._ack_interval_us.forget(index)


class _InCgroups(_Part):
    """A part that knows tenants by their cgroups."""

    def __init__(self, name: str, pins: Path | None, maps: tuple[str, ...]) -> None:
        super().__init__(name, pins, maps)
        self._cgroups = HashMap(self.object.map("cgroup_tenants"), ctypes.c_uint64, ctypes.c_uint32)

    def prepare(self, index: int) -> None:
        """Make ready to count for a tenant."""

    def counted(self) -> list[int]:
        """Return the index of every tenant for whom something is kept."""
        raise NotImplementedError

    def tenants_changed(self, cgroup_ids: Mapping[int, int]) -> None:
        before = {cgroup: index.value for cgroup, index in self._cgroups.items()}
        for cgroup in before.keys() - cgroup_ids.keys():
            self._cgroups.delete(cgroup)
        for cgroup, index in cgroup_ids.items():
            self.prepare(index)
            if before.get(cgroup) != index:
                self._cgroups.set(cgroup, ctypes.c_uint32(index))
        for index in set(self.counted()) - set(cgroup_ids.values()):
            self.forget(index)


class _Cpu(_InCgroups):
    def __init__(self, pins: Path | None) -> None:
        super().__init__("sched", pins, ("cgroup_tenants", "running", "tenant_cpu", "waiting"))
        self._tenants = HashMap(self.object.map("tenant_cpu"), ctypes.c_uint32, TenantCpu)
        self._running = PerCpuArrayMap(self.object.map("running"), RunningSlice)
        self._on_cpu_ns: dict[int, int] = {}

    def attach(self) -> None:
        # What a former daemon left there was going on when it ended, and its time would count up to now.
        self._running.set(0, RunningSlice())
        HashMap(self.object.map("waiting"), ctypes.c_uint32, ctypes.c_uint64).clear()
        for program in self.object.programs():
            self._links.append(program.attach())

    def prepare(self, index: int) -> None:
        if self._tenants.get(index) is None:
            self._tenants.set(index, TenantCpu())

    def counted(self) -> list[int]:
        return list(self._tenants.keys())

    def figures(self, only: int | None) -> Iterator[tuple[int, dict[str, object]]]:
        counted = list(_rows(self._tenants, only))
        running_ns = self._running_ns(time.monotonic_ns())
        for index, seen in counted:
            # A switch since the counts were read may have taken a slice away that was still running in the last call.
            on_cpu_ns = max(seen.on_cpu_ns + running_ns.get(index, 0), self._on_cpu_ns.get(index, 0))
            self._on_cpu_ns[index] = on_cpu_ns
            yield (
                index,
                {
                    "on_cpu_s": on_cpu_ns / 1e9,
                    "run_queue_s": seen.run_queue_ns / 1e9,
                    "run_queue_histogram": tuple(seen.run_queue_histogram),
                },
            )

    def forget(self, index: int) -> None:
        self._tenants.delete(index)
        self._on_cpu_ns.pop(index, None)

    def _running_ns(self, now_ns: int) -> dict[int, int]:
        """Return for how long processors have been running each tenant's processes by now, since their last switch."""
        running: dict[int, int] = {}
        for slice in self._running.get_each(0) or ():
            if slice.tenant:
                running[slice.tenant] = running.get(slice.tenant, 0) + max(0, now_ns - slice.since_ns)
        return running


class _Cuda(_InCgroups):
    def __init__(self, pins: Path | None, library: str) -> None:
        super().__init__("cuda", pins, ("asked_bytes", "process_cuda", "tenant_cuda"))
        self._library = library
        self._tenants = HashMap(self.object.map("tenant_cuda"), ctypes.c_uint32, CudaCalls)
        self._processes = HashMap(self.object.map("process_cuda"), ctypes.c_uint32, CudaCalls)

    def attach(self) -> None:
        for function in LAUNCH_FUNCTIONS:
            self._attach_if_there("observe_launch", function)
        for function in ALLOCATION_FUNCTIONS:
            # What notes the size is attached last: its note is not left behind by a call that it alone has seen.
            if self._attach_if_there("observe_allocated", function, retprobe=True):
                self._attach_if_there("observe_allocation", function)
        if not self._links:
            raise KernelError(f"find a function of the CUDA driver in '{self._library}'", errno.ENOENT)

    def counted(self) -> list[int]:
        return [index for index, _ in self._tenants.items() if index]

    def figures(self, only: int | None) -> Iterator[tuple[int, dict[str, object]]]:
        for index, calls in _rows(self._tenants, only):
            if index:
                yield index, {"cuda_launches": calls.launches, "cuda_bytes": calls.allocated_bytes}

    def processes(self) -> dict[int, CudaUsage]:
        names = CudaUsage.__struct_fields__
        return {
            pid: CudaUsage(**{name: getattr(calls, name) for name in names}) for pid, calls in self._processes.items()
        }

    def forget(self, index: int) -> None:
        self._tenants.delete(index)

    def _attach_if_there(self, program: str, function: str, *, retprobe: bool = False) -> bool:
        try:
            link = self.object.program(program).attach_uprobe(self._library, function, retprobe=retprobe)
        except KernelError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        self._links.append(link)
        return True
