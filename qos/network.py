"""The network limits of tenants in the kernel: programs, maps, devices and our cgroup put together."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from seedance.bpf.abi import TenantTraffic
from seedance.errors import KernelError
from seedance.qos.devices import DeviceLimits, DevicePrograms
from seedance.qos.pins import PinFolder
from seedance.qos.plan import Rates
from seedance.qos.programs import ConnectionProgram, TenantPrograms
from seedance.qos.settings import KernelSettings
from seedance.qos.teardown import run_all

if TYPE_CHECKING:
    from seedance.qos.netlink import Monitor, Netlink


class NetworkLimits:
    """Egress, ingress and new connections.

    sockets  the cgroup in or below which our sockets are made; or why there is none.
    """

    def __init__(self, settings: KernelSettings, sockets: Path | str) -> None:
        """Attach what can be, in place of what a former run left. Raises KernelError when nothing can be."""
        self._off: dict[str, str] = {}
        self._own_notes: dict[str, str] = {}
        self._connections: ConnectionProgram | None = None
        self._devices: DeviceLimits | None = None
        self._netlink: Netlink | None = None
        self._monitor: Monitor | None = None
        with contextlib.ExitStack() as undo:
            self._pins = PinFolder(Path(settings.bpffs), settings.name)
            undo.callback(self._pins.close)
            self._programs = TenantPrograms(self._pins, settings.horizon_s)
            undo.callback(self._programs.close)
            self._attach_ingress(sockets)
            self._attach_devices(settings)
            undo.pop_all()
        if self._programs.is_anew:
            self._own_notes["network"] = "what another version left did not fit, and was made anew"

    def _attach_ingress(self, sockets: Path | str) -> None:
        if isinstance(sockets, str):
            self._off["ingress"] = sockets
            return
        try:
            self._programs.attach_ingress(sockets)
        except KernelError as exc:
            self._off["ingress"] = str(exc)
        try:
            self._programs.attach_window(sockets)
        except KernelError as exc:
            self._own_notes["egress"] = f"many connections of one tenant fill its queue: {exc}"

    def _attach_devices(self, settings: KernelSettings) -> None:
        programs = self._programs.for_devices()
        if settings.connections_per_s is not None:
            try:
                self._connections = ConnectionProgram(settings.connections_per_s, settings.connections_burst)
                programs = msgspec.structs.replace(programs, connections=self._connections.fd)
            except KernelError as exc:
                self._off["new_connections"] = str(exc)
        try:
            self._open_devices(settings, programs)
        except KernelError as exc:
            self._off["egress"] = str(exc)
            if settings.connections_per_s is not None:
                self._off.setdefault("new_connections", str(exc))

    def _open_devices(self, settings: KernelSettings, programs: DevicePrograms) -> None:
        # What encodes netlink messages costs some 12 MiB, which a daemon without network limits need not pay.
        from seedance.qos.netlink import Monitor, Netlink  # noqa: PLC0415

        with contextlib.ExitStack() as undo:
            # The monitor first, so that no change is missed.
            monitor = Monitor()
            undo.callback(monitor.close)
            netlink = Netlink()
            undo.callback(netlink.close)
            devices = DeviceLimits(netlink, settings.name, settings.devices, settings.horizon_s, programs)
            devices.update()
            undo.pop_all()
        self._monitor, self._netlink, self._devices = monitor, netlink, devices

    @property
    def off(self) -> dict[str, str]:
        """What cannot be limited now, everywhere or on some device, and why."""
        return (self._devices.off if self._devices is not None else {}) | self._off

    @property
    def notes(self) -> dict[str, str]:
        """What is not as it should be, though limits hold: by device, or by limit."""
        return self._own_notes | (self._devices.notes if self._devices is not None else {})

    @property
    def pins(self) -> Path:
        """The folder in which maps are pinned."""
        return self._pins.path

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `devices_changed` is to be called; -1 for never."""
        return self._monitor.fileno() if self._monitor is not None else -1

    def devices_changed(self) -> None:
        """Take note that something about devices has changed: `update_devices` is to be called soon.

        Not at once, because where one thing changes, much does, and our own changes are heard of too.
        """
        if self._monitor is not None:
            try:
                self._monitor.drain()
            except KernelError as exc:
                self._own_notes["devices"] = str(exc)

    def update_devices(self) -> None:
        """Look at the devices anew."""
        if self._devices is None:
            return
        try:
            self._devices.update()
        except KernelError as exc:
            self._own_notes["devices"] = str(exc)
        else:
            self._own_notes.pop("devices", None)

    def set_ports(self, ports: Collection[int]) -> None:
        """Say which TCP ports are ours. Raises KernelError."""
        if self._connections is not None:
            self._connections.set_ports(frozenset(ports))

    def read_rates(self) -> dict[int, Rates]:
        """Return every tenant's row. Raises KernelError."""
        return self._programs.read_rates()

    def read_rate(self, index: int) -> Rates | None:
        """Return one tenant's row. Raises KernelError."""
        return self._programs.read_rate(index)

    def set_rates(self, index: int, rates: Rates) -> None:
        """Write a tenant's row. Raises KernelError."""
        self._programs.set_rates(index, rates)

    def remove_rates(self, index: int) -> None:
        """Remove a tenant's row, and what was counted for it. Raises KernelError."""
        self._programs.remove_rates(index)

    def traffic(self, index: int) -> TenantTraffic:
        """Return what was counted for a tenant. Raises KernelError."""
        return self._programs.traffic(index)

    def attachments(self) -> list[str]:
        """Return a line for each thing to which a program of ours is attached."""
        lines = self._devices.attachments() if self._devices is not None else []
        return [*lines, *self._programs.attachments]

    def remove(self) -> list[str]:
        """Take everything away; returns what was removed.

        What can be is removed in any case; raises KernelError that says what could not be.
        """
        steps = [self._devices.remove] if self._devices is not None else []
        return [line for lines in run_all([*steps, self._remove_pins]) for line in lines]

    def _remove_pins(self) -> list[str]:
        self.release()
        return self._pins.remove()

    def release(self) -> None:
        """Let go of everything; limits stay in force, for another run to take over."""
        for part in (self._monitor, self._netlink, self._connections, self._programs):
            if part is not None:
                part.close()
        self._pins.close()
        self._monitor = self._netlink = self._devices = self._connections = None


def remove_leftovers(settings: KernelSettings) -> list[str]:
    """Remove what a daemon that no longer runs left; returns what was removed. Raises KernelError."""
    from seedance.qos.netlink import Netlink  # noqa: PLC0415

    with contextlib.ExitStack() as stack:
        folder = Path(settings.bpffs) / settings.name
        pins = PinFolder(folder.parent, folder.name) if folder.is_dir() else None
        if pins is not None:
            stack.callback(pins.close)
        netlink = Netlink()
        stack.callback(netlink.close)
        steps = [DeviceLimits(netlink, settings.name).remove, *([pins.remove] if pins is not None else [])]
        return [line for lines in run_all(steps) for line in lines]
