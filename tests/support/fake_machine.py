"""A machine whose cgroups, network side and observer are in memory, and outlive the daemon that uses them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from support.fake_cgroup import MOUNT, FakeFolders, site

from seedance.bpf.abi import TenantTraffic
from seedance.bpf.observe import ObservedUsage
from seedance.errors import KernelError
from seedance.qos.cgroup import CgroupTree
from seedance.qos.machine import Machine, NetworkSide, ObserverSide
from seedance.qos.plan import Rates
from seedance.qos.settings import KernelSettings


class FakeNetworkSide:
    """Rows and counts in memory. `failing` is raised by every write while it is set."""

    def __init__(self) -> None:
        self.off: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self.pins = Path("/fake/bpf/seedance")
        self.rates: dict[int, Rates] = {}
        self.counts: dict[int, TenantTraffic] = {}
        self.ports: set[int] = set()
        self.failing: KernelError | None = None
        self.descriptor = 7
        self.is_removed = False
        self.changes = 0

    def fileno(self) -> int:
        return self.descriptor

    def devices_changed(self) -> None:
        self.changes += 1

    def update_devices(self) -> None:
        self.notes["eth0"] = "looked at"

    def set_ports(self, ports: Collection[int]) -> None:
        self.ports = set(ports)

    def read_rates(self) -> dict[int, Rates]:
        return dict(self.rates)

    def read_rate(self, index: int) -> Rates | None:
        return self.rates.get(index)

    def set_rates(self, index: int, rates: Rates) -> None:
        if self.failing is not None:
            raise self.failing
        self.rates[index] = rates

    def remove_rates(self, index: int) -> None:
        if self.failing is not None:
            raise self.failing
        del self.rates[index]

    def traffic(self, index: int) -> TenantTraffic:
        return self.counts.get(index, TenantTraffic())

    def attachments(self) -> list[str]:
        return ["eth0: attached"]

    def remove(self) -> list[str]:
        if self.failing is not None:
            raise self.failing
        self.is_removed = True
        return []


class FakeObserver:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.off = {"observe_network": "no sock_ops", "observe_cuda": "no CUDA driver library is configured"}
        self.groups: dict[int, int] = {}
        self.forgotten: list[int] = []
        self.seen: dict[int, ObservedUsage] = {}
        self.is_closed = False

    def tenants_changed(self, cgroup_ids: Mapping[int, int]) -> None:
        self.groups = dict(cgroup_ids)

    def forget(self, index: int) -> None:
        self.forgotten.append(index)

    def usage(self) -> dict[int, ObservedUsage]:
        return self.seen

    def usage_of(self, index: int) -> ObservedUsage | None:
        return self.seen.get(index)

    def close(self) -> None:
        self.is_closed = True


class FakeMachine(Machine):
    """`no_cgroups` and `no_network` are the reasons why there is no such thing.

    `made_in` has the group of each listening socket, `leftovers` what a former run left.
    """

    def __init__(self, no_cgroups: str = "", no_network: KernelError | None = None) -> None:
        self.folders = FakeFolders()
        self.network_side = FakeNetworkSide()
        self.observer_side = FakeObserver()
        self.no_cgroups = no_cgroups
        self.no_network = no_network
        self.sockets: Path | str | None = None
        self.made_in: dict[str, Path] = {}
        self.leftovers: list[str] = []

    def restart(self) -> None:
        """Let the next daemon begin where this one, which has been killed, began too."""
        self.folders.processes[os.getpid()] = MOUNT

    def tree(self, settings: KernelSettings) -> CgroupTree | str:
        return self.no_cgroups or CgroupTree(site(settings.name), self.folders)

    def network(self, settings: KernelSettings, sockets: Path | str) -> NetworkSide:
        if self.no_network is not None:
            raise self.no_network
        self.sockets = sockets
        return self.network_side

    def observer(self, settings: KernelSettings, sockets: Path | None, pins: Path) -> ObserverSide:
        return self.observer_side

    def socket_groups(self, descriptors: Collection[int]) -> dict[str, int]:
        return {name: self.folders.number(group) for name, group in self.made_in.items()}

    def has_leftovers(self, settings: KernelSettings) -> bool:
        return bool(self.leftovers)

    def remove_leftovers(self, settings: KernelSettings) -> list[str]:
        if self.no_network is not None:
            raise self.no_network
        removed, self.leftovers = self.leftovers, []
        return removed
