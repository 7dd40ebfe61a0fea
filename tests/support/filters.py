"""Devices and their filters in the namespaces of tests, by netlink."""

from __future__ import annotations

from typing import Any, Final

from pyroute2 import IPRoute
from support.namespaces import Namespace

CLSACT: Final = 0xFFFF0000
"""Handle of clsact; its filters' parents are INGRESS and EGRESS."""
INGRESS: Final = 0xFFFFFFF2
EGRESS: Final = 0xFFFFFFF3


def veth_pair(one: Namespace, other: Namespace) -> None:
    """Connect two namespaces: a device `veth` in each, with 10.77.0.1/24 and fd77::1/64, and the same with 2."""
    one.run("ip", "link", "add", "veth", "type", "veth", "peer", "name", "veth", "netns", other.path)
    for last, namespace in enumerate((one, other), start=1):
        namespace.run("ip", "address", "add", f"10.77.0.{last}/24", "dev", "veth")
        namespace.run("ip", "address", "add", f"fd77::{last}/64", "dev", "veth", "nodad")
        namespace.run("ip", "link", "set", "veth", "up")


def add_filter(namespace: Namespace, device: str, parent: int, program_fd: int, *, priority: int = 1) -> None:
    """Attach a program as a directly acting filter of a device; adds clsact where there is none."""
    with namespace, IPRoute() as netlink:
        (index,) = netlink.link_lookup(ifname=device)
        if not any(one["handle"] == CLSACT for one in netlink.get_qdiscs(index)):
            netlink.tc("add", "clsact", index, CLSACT)
        options: dict[str, Any] = {"fd": program_fd, "name": "seedance_test", "parent": parent, "direct_action": True}
        netlink.tc("add-filter", "bpf", index, prio=priority, **options)
