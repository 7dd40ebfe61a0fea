"""The BPF programs that keep the network limits, with their maps: loaded, attached to our cgroup, or taken over.

What a former run left pinned is taken over: maps with all that was counted and every tenant's index, and the links
that hold programs in our cgroup, in which the new program takes the old one's place at once. Maps of another layout,
left by another version, cannot be: they are removed and made anew.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

from seedance.bpf.abi import ConnectionCounts, TenantLimit, TenantPace, TenantTraffic
from seedance.bpf.loader import BpfObject, Link, Program, open_link
from seedance.bpf.maps import HashMap, PerCpuArrayMap, PerCpuHashMap
from seedance.errors import BpfLoadError, KernelError
from seedance.qos.devices import DevicePrograms
from seedance.qos.pins import PinFolder
from seedance.qos.plan import Rates

INGRESS_LINK: Final = "ingress_link"
WINDOW_LINK: Final = "egress_window_link"
_MAPS: Final = ("tenant_limits", "tenant_pace", "tenant_traffic")


class TenantPrograms:
    """Egress and ingress programs, which share the maps of tenants."""

    def __init__(self, pins: PinFolder, horizon_s: float) -> None:
        """Load the egress programs, and take over or make the maps. Raises KernelError."""
        self.is_anew = False
        """What a former version left did not fit, and was made anew."""
        self._pins = pins
        rodata = {"egress_horizon_ns": round(horizon_s * 1e9)}
        try:
            self._egress = BpfObject("egress", pins=pins.path, rodata=rodata)
        except BpfLoadError:
            raise
        except KernelError as exc:
            left = [name for name in _MAPS if name in pins.names()]
            if exc.errno != errno.EINVAL or not left:
                raise
            for name in left:
                pins.unpin(name)
            self._egress = BpfObject("egress", pins=pins.path, rodata=rodata)
            self.is_anew = True
        self._limits = HashMap(self._egress.map("tenant_limits"), ctypes.c_uint32, TenantLimit)
        self._pace = HashMap(self._egress.map("tenant_pace"), ctypes.c_uint32, TenantPace)
        self._traffic: PerCpuHashMap[int, TenantTraffic] = PerCpuHashMap(
            self._egress.map("tenant_traffic"), ctypes.c_uint32, TenantTraffic
        )
        self._ingress: BpfObject | None = None
        self._links: list[Link] = []
        self.attachments: list[str] = []
        """A line for each program that is attached to a cgroup."""

    def for_devices(self) -> DevicePrograms:
        """Return the egress programs; they stay loaded while this object or a filter holds them."""
        return DevicePrograms(
            pace=self._egress.program("egress_pace").fd, police=self._egress.program("egress_police").fd
        )

    def attach_ingress(self, group: Path) -> None:
        """Load the ingress program and attach it to a cgroup, in place of a former run's. Raises KernelError."""
        self._ingress = BpfObject("ingress", pins=self._pins.path)
        self._attach(self._ingress.program("ingress_police"), group, INGRESS_LINK)
        self.attachments.append(f"{group}: ingress policed by 'ingress_police'")

    def attach_window(self, group: Path) -> None:
        """Attach the program that bounds congestion windows to a cgroup, likewise. Raises KernelError."""
        self._attach(self._egress.program("egress_window"), group, WINDOW_LINK)
        self.attachments.append(f"{group}: congestion windows bound by 'egress_window'")

    def _attach(self, program: Program, group: Path, name: str) -> None:
        pin = self._pins.path / name
        if pin.exists():
            link = open_link(pin)
            if link_group(link) == group.stat().st_ino:
                link.update(program)
                self._links.append(link)
                return
            # Its group is gone, or not ours any more.
            link.close()
            self._pins.unpin(name)
        try:
            descriptor = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise KernelError(f"open the group '{group}'", exc.errno or errno.EIO) from exc
        try:
            link = program.attach_cgroup(descriptor)
        finally:
            os.close(descriptor)
        self._links.append(link)
        link.pin(pin)

    def read_rates(self) -> dict[int, Rates]:
        """Return every tenant's row. Raises KernelError."""
        return {index: _rates(row) for index, row in self._limits.items()}

    def read_rate(self, index: int) -> Rates | None:
        """Return one tenant's row. Raises KernelError."""
        row = self._limits.get(index)
        return None if row is None else _rates(row)

    def set_rates(self, index: int, rates: Rates) -> None:
        """Write a tenant's row, and make those that go with it. Raises KernelError.

        With another rate, the tenant owes nothing any more: a debt at a low rate would last for long at a higher one.
        """
        if self._traffic.get(index) is None:
            self._traffic.set(index, TenantTraffic())
        if self.read_rate(index) != rates or self._pace.get(index) is None:
            self._pace.set(index, TenantPace())
        row = TenantLimit(rates.tenant.encode(), rates.egress_bytes_per_s, rates.ingress_bytes_per_s)
        self._limits.set(index, row)

    def remove_rates(self, index: int) -> None:
        """Remove a tenant's row, and what was counted for it. Raises KernelError."""
        # The row of limits first: as long as it is there, the programs need the others.
        for table in (self._limits, self._pace, self._traffic):
            table.delete(index)

    def traffic(self, index: int) -> TenantTraffic:
        """Return what was counted for a tenant; zeros before its first packet. Raises KernelError."""
        return self._traffic.get(index) or TenantTraffic()

    def close(self) -> None:
        """Let go of everything; what is pinned or attached to a device stays in force."""
        while self._links:
            self._links.pop().close()
        for loaded in (self._ingress, self._egress):
            if loaded is not None:
                loaded.close()
        self._ingress = None


class ConnectionProgram:
    """The program that polices new connections by their source."""

    def __init__(self, per_s: float, burst: int) -> None:
        """Load it. Raises KernelError."""
        interval_ns = round(1e9 / per_s)
        rodata = {
            "connections_interval_ns": interval_ns,
            # The first of a burst passes in any case.
            "connections_ahead_ns": max(0, burst - 1) * interval_ns,
        }
        self._object = BpfObject("connections", rodata=rodata)
        self._ports = HashMap(self._object.map("listen_ports"), ctypes.c_uint16, ctypes.c_uint8)
        self._counts = PerCpuArrayMap(self._object.map("connection_counts"), ConnectionCounts)

    @property
    def fd(self) -> int:
        """The program's descriptor."""
        return self._object.program("connections_police").fd

    def set_ports(self, ports: frozenset[int]) -> None:
        """Say which ports we listen on: connections to others are nobody's business here. Raises KernelError."""
        for port in set(self._ports.keys()) - ports:
            self._ports.delete(port)
        for port in ports:
            self._ports.set(port, ctypes.c_uint8(1))

    def counts(self) -> ConnectionCounts:
        """Return how many requests passed and were dropped. Raises KernelError."""
        return self._counts.get(0) or ConnectionCounts()

    def close(self) -> None:
        """Let go of it; where it is attached, it stays."""
        self._object.close()


def link_group(link: Link) -> int:
    """Return the number (inode) of the cgroup to which a link attaches its program; 0 when the group is gone.

    /proc/self/fdinfo tells it since v5.8.
    """
    with open(f"/proc/self/fdinfo/{link.fd}", encoding="ascii") as lines:
        words = [line.split() for line in lines]
    return next((int(value) for name, value, *_ in words if name == "cgroup_id:"), 0)


def _rates(row: TenantLimit) -> Rates:
    return Rates(row.name.decode(errors="replace"), row.egress_bytes_per_s, row.ingress_bytes_per_s)
