"""What `kernel` needs of a machine, and how it is opened; tests put others in their place.

Each method raises KernelError with the reason why this machine has none of it for us.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from seedance.bpf.abi import TenantTraffic
from seedance.bpf.observe import ObservedUsage, Observer
from seedance.qos.cgroup import CgroupTree, remove_tree
from seedance.qos.cgroup_site import find_site
from seedance.qos.network import NetworkLimits, remove_leftovers
from seedance.qos.plan import Rates
from seedance.qos.settings import KernelSettings
from seedance.qos.socket_groups import socket_groups


class NetworkSide(Protocol):
    """See `network.NetworkLimits`."""

    @property
    def off(self) -> dict[str, str]: ...
    @property
    def notes(self) -> dict[str, str]: ...
    @property
    def pins(self) -> Path: ...
    def fileno(self) -> int: ...
    def devices_changed(self) -> None: ...
    def update_devices(self) -> None: ...
    def set_ports(self, ports: Collection[int]) -> None: ...
    def read_rates(self) -> dict[int, Rates]: ...
    def read_rate(self, index: int) -> Rates | None: ...
    def set_rates(self, index: int, rates: Rates) -> None: ...
    def remove_rates(self, index: int) -> None: ...
    def traffic(self, index: int) -> TenantTraffic: ...
    def attachments(self) -> list[str]: ...
    def remove(self) -> list[str]: ...


class ObserverSide(Protocol):
    """See `bpf.observe.Observer`."""

    off: dict[str, str]

    def tenants_changed(self, cgroup_ids: Mapping[int, int]) -> None: ...
    def forget(self, index: int) -> None: ...
    def usage(self) -> dict[int, ObservedUsage]: ...
    def usage_of(self, index: int) -> ObservedUsage | None: ...
    def close(self) -> None: ...


class Machine:
    """The machine on which this process runs."""

    def tree(self, settings: KernelSettings) -> CgroupTree | str:
        """Take our part of the cgroup tree, or say why there is none."""
        site = find_site(settings.cgroup, settings.name)
        return site if isinstance(site, str) else CgroupTree(site)

    def network(self, settings: KernelSettings, sockets: Path | str) -> NetworkSide:
        """Set the network limits up; see `NetworkLimits` for `sockets`."""
        return NetworkLimits(settings, sockets)

    def observer(self, settings: KernelSettings, sockets: Path | None, pins: Path) -> ObserverSide:
        """Attach the observing programs."""
        return Observer(cgroup=sockets, pins=pins, cuda_library=settings.cuda_library)

    def socket_groups(self, descriptors: Collection[int]) -> dict[str, int]:
        """Return in which group each of these TCP sockets was made; see `socket_groups`."""
        return socket_groups(descriptors)

    def has_leftovers(self, settings: KernelSettings) -> bool:
        """Say whether a former run left anything pinned, as every one does that has network limits."""
        try:
            return bool(os.listdir(os.path.join(settings.bpffs, settings.name)))
        except OSError:
            return False

    def remove_leftovers(self, settings: KernelSettings) -> list[str]:
        """Remove what a daemon left that runs no more; returns what was removed, as lines for people.

        The group of a systemd unit is not ours to remove, and goes with the unit.
        """
        site = find_site(settings.cgroup, settings.name)
        groups: list[str] = []
        if not isinstance(site, str):
            groups = remove_tree(site.top if settings.cgroup else site.mount / settings.name)
        return remove_leftovers(settings) + groups
