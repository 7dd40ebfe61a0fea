"""Devices, queues and filters of a network namespace, as the kernel tells of them and changes them."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shlex
import socket
from collections.abc import Iterator

import pytest
from support.namespaces import Namespace

from seedance.bpf import loader
from seedance.bpf.loader import BpfObject
from seedance.errors import KernelError
from seedance.qos.devices import fq_options
from seedance.qos.netlink import CLSACT, CLSACT_HANDLE, EGRESS, INGRESS, ROOT, Device, Filter, Monitor, Netlink, Qdisc

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

LO = 1
HANDLE = 0x5EED0000


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with contextlib.closing(Namespace()) as made:
        yield made


@pytest.fixture
def netlink(namespace: Namespace) -> Iterator[Netlink]:
    with namespace:
        opened = Netlink()
    with contextlib.closing(opened):
        yield opened


def test_devices(namespace: Namespace, netlink: Netlink) -> None:
    namespace.run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1")
    namespace.run("ip", "link", "set", "v0", "up")
    found = {device.name: device for device in netlink.devices()}
    assert found["lo"] == Device(LO, "lo", is_up=True, is_loopback=True)
    assert found["v0"].is_up
    assert not found["v1"].is_up
    assert not found["v0"].is_loopback


def test_a_port_knows_its_bridge(namespace: Namespace, netlink: Netlink) -> None:
    namespace.run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1")
    namespace.run("ip", "link", "add", "b0", "type", "bridge")
    namespace.run("ip", "link", "set", "v0", "master", "b0")
    found = {device.name: device for device in netlink.devices()}
    assert (found["b0"].kind, found["b0"].master) == ("bridge", 0)
    assert (found["v0"].kind, found["v0"].master) == ("veth", found["b0"].index)
    assert found["lo"].kind == ""


def test_filters_of_other_kinds(namespace: Namespace, netlink: Netlink) -> None:
    namespace.run("tc", "qdisc", "add", "dev", "lo", "clsact")
    namespace.run("tc", *shlex.split("filter add dev lo egress prio 3 u32 match u32 0 0 flowid 1:1"))
    found = netlink.filters(LO, EGRESS)
    assert found
    assert {(one.priority, one.name, one.kind) for one in found} == {(3, "", "u32")}


def test_clsact_and_filters(netlink: Netlink) -> None:
    if reason := loader.supported():
        pytest.skip(reason)
    assert netlink.filters(LO, EGRESS) == []
    netlink.replace_qdisc(LO, "clsact", CLSACT, CLSACT_HANDLE)
    assert netlink.qdiscs()[LO] == [Qdisc("noqueue", 0, ROOT), Qdisc("clsact", CLSACT_HANDLE, CLSACT)]
    with BpfObject("egress") as loaded:
        for program in ("egress_police", "egress_pace"):
            netlink.replace_filter(LO, EGRESS, Filter(77, 5, "ours"), loaded.program(program).fd)
            assert netlink.filters(LO, EGRESS) == [Filter(77, 5, "ours")]
        netlink.replace_filter(LO, EGRESS, Filter(77, 6, "theirs"), loaded.program("egress_pace").fd)
    assert netlink.filters(LO, INGRESS) == []
    netlink.delete_filter(LO, EGRESS, Filter(77, 5, "ours"))
    assert netlink.filters(LO, EGRESS) == [Filter(77, 6, "theirs")]
    netlink.delete_filter(LO, EGRESS, Filter(77, 6, "theirs"))
    assert netlink.filters(LO, EGRESS) == []
    netlink.delete_qdisc(LO, CLSACT, CLSACT_HANDLE)
    assert netlink.qdiscs()[LO] == [Qdisc("noqueue", 0, ROOT)]


def test_a_queue_at_the_root_is_replaced_and_the_kernels_own_comes_back(namespace: Namespace, netlink: Netlink) -> None:
    try:
        netlink.replace_qdisc(LO, "fq", ROOT, HANDLE, fq_options(2.0))
    except KernelError as exc:
        assert exc.errno == errno.ENOENT
        assert "Specified qdisc kind is unknown" in str(exc)
        pytest.skip("this kernel has no sch_fq")
    shown = namespace.run("tc", "qdisc", "show", "dev", "lo")
    for part in ("qdisc fq 5eed: root", "limit 100000p", "flow_limit 1000p", "horizon 10s"):
        assert part in shown
    netlink.replace_qdisc(LO, "fq", ROOT, HANDLE, fq_options(30.0))
    assert "horizon 60s" in namespace.run("tc", "qdisc", "show", "dev", "lo")
    netlink.delete_qdisc(LO, ROOT, HANDLE)
    assert netlink.qdiscs()[LO] == [Qdisc("noqueue", 0, ROOT)]


def test_an_error_has_the_kernels_own_words(netlink: Netlink) -> None:
    with pytest.raises(
        KernelError, match=r"cannot make a 'nonsense' queue on device 1 \(Specified qdisc kind is unknown"
    ):
        netlink.replace_qdisc(LO, "nonsense", ROOT, HANDLE)
    with pytest.raises(KernelError) as caught:
        netlink.delete_qdisc(99, ROOT, HANDLE)
    assert caught.value.errno == errno.ENODEV


def test_the_monitor_hears_of_every_change_and_is_quiet_then(namespace: Namespace, netlink: Netlink) -> None:
    with namespace:
        monitor = Monitor()
    with contextlib.closing(monitor):
        assert not select.select([monitor], [], [], 0)[0]
        namespace.run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1")
        assert select.select([monitor], [], [], 5)[0]
        monitor.drain()
        netlink.replace_qdisc(LO, "clsact", CLSACT, CLSACT_HANDLE)
        assert select.select([monitor], [], [], 5)[0]
        monitor.drain()
        assert not select.select([monitor], [], [], 0)[0]


def test_the_monitor_takes_more_changes_than_there_is_room_for(namespace: Namespace, netlink: Netlink) -> None:
    with namespace:
        monitor = Monitor()
    with contextlib.closing(monitor):
        with socket.socket(fileno=os.dup(monitor.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel makes it the least that there is
        for _ in range(20):
            netlink.replace_qdisc(LO, "clsact", CLSACT, CLSACT_HANDLE)
            netlink.delete_qdisc(LO, CLSACT, CLSACT_HANDLE)
        assert select.select([monitor], [], [], 5)[0]
        monitor.drain()
        assert not select.select([monitor], [], [], 0)[0]
