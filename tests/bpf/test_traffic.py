"""The programs where they belong, with real sockets on loopback and between two namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from support import observed
from support.filters import EGRESS, INGRESS, add_filter, veth_pair
from support.limits import NS_PER_S, LoadedLimits, mark_of, now_ns
from support.namespaces import Namespace

from seedance.bpf.abi import TenantPace
from seedance.bpf.loader import BpfObject
from seedance.bpf.maps import ArrayMap, HashMap

observed.require_bpf()

SENDER: Final = 1
RECEIVER: Final = 2
ADDRESSES: Final = {"lo": ("127.0.0.1", "::1"), "veth": ("10.77.0.1", "fd77::1")}
HEADERS: Final = {socket.AF_INET: 14 + 20 + 8, socket.AF_INET6: 14 + 40 + 8}
"""Of a datagram: link, network and UDP."""
PAYLOAD: Final = 1000


class Net:
    """A server's and a client's namespace, connected by `device`; with loopback both are one."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.server = Namespace()
        self.client = self.server if device == "lo" else Namespace()
        if device != "lo":
            veth_pair(self.server, self.client)

    def opened(self, namespace: Namespace, family: int, kind: int, mark: int) -> socket.socket:
        with namespace:
            made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
        return made

    def address(self, family: int) -> str:
        """Return the server's."""
        return ADDRESSES[self.device][family == socket.AF_INET6]

    def bound(self, family: int, kind: int, mark: int) -> socket.socket:
        """Make a socket of the server's on a port of its own."""
        made = self.opened(self.server, family, kind, mark)
        made.bind((self.address(family), 0))
        made.settimeout(5)
        return made

    def close(self) -> None:
        self.server.close()
        if self.client is not self.server:
            self.client.close()


@pytest.fixture(params=["lo", "veth"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    made = Net(request.param)
    yield made
    made.close()


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def family(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@contextlib.contextmanager
def inside(group: Path) -> Iterator[None]:
    """Have this process in a group, so that the sockets that it makes are the group's."""
    own = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].split("\n")[0]
    mount = observed.cgroup2_mount()
    assert mount is not None
    (group / "cgroup.procs").write_text("0")
    try:
        yield
    finally:
        (mount / own.lstrip("/") / "cgroup.procs").write_text("0")


@contextlib.contextmanager
def ingress(sharing: LoadedLimits | None = None, **rodata: int) -> Iterator[LoadedLimits]:
    """Attach the ingress program to a new group, and be in it."""
    with observed.new_cgroup() as group, LoadedLimits("ingress", sharing, **rodata) as limits:
        descriptor = os.open(group, os.O_RDONLY)
        link = limits.program("ingress_police").attach_cgroup(descriptor)
        os.close(descriptor)
        try:
            with inside(group):
                yield limits
        finally:
            link.close()


def test_tenants_are_counted_apart_by_their_marks(net: Net, family: int) -> None:
    with LoadedLimits("egress") as limits:
        add_filter(net.client, net.device, EGRESS, limits.program("egress_pace").fd)
        target = net.bound(family, socket.SOCK_DGRAM, 0)
        for index, count in ((1, 5), (2, 3)):
            limits.set_limit(index)
            with net.opened(net.client, family, socket.SOCK_DGRAM, mark_of(index)) as sender:
                for _ in range(count):
                    sender.sendto(bytes(PAYLOAD), target.getsockname())
        with net.opened(net.client, family, socket.SOCK_DGRAM, 0) as sender:
            sender.sendto(bytes(PAYLOAD), target.getsockname())
        wire = PAYLOAD + HEADERS[socket.AddressFamily(family)]
        assert limits.traffic(1) == {"egress_bytes": 5 * wire, "egress_packets": 5}
        assert limits.traffic(2) == {"egress_bytes": 3 * wire, "egress_packets": 3}
        target.close()


def test_a_packet_over_the_horizon_is_not_sent(net: Net, family: int) -> None:
    with LoadedLimits("egress", egress_horizon_ns=NS_PER_S) as limits:
        add_filter(net.client, net.device, EGRESS, limits.program("egress_pace").fd)
        target = net.bound(family, socket.SOCK_DGRAM, 0)
        target.setblocking(False)
        limits.set_limit(1, egress=1000)
        limits.pace.set(1, TenantPace(now_ns() + 60 * NS_PER_S, 0))
        with net.opened(net.client, family, socket.SOCK_DGRAM, mark_of(1)) as sender:
            with contextlib.suppress(OSError):  # ENOBUFS where the socket asks to be told
                sender.sendto(bytes(PAYLOAD), target.getsockname())
            wire = PAYLOAD + HEADERS[socket.AddressFamily(family)]
            assert limits.traffic(1) == {"egress_dropped_bytes": wire, "egress_dropped_packets": 1}
            with pytest.raises(BlockingIOError):
                target.recv(1)
        target.close()


def test_what_arrives_is_counted_by_the_mark_of_its_socket_and_dropped_over_the_rate(net: Net, family: int) -> None:
    wire = PAYLOAD + HEADERS[socket.AddressFamily(family)]
    with ingress(ingress_burst_ns=NS_PER_S) as limits:
        # Three datagrams cost more than a second: the fourth comes too early.
        limits.set_limit(RECEIVER, ingress=5 * wire // 2)
        target = net.bound(family, socket.SOCK_DGRAM, mark_of(RECEIVER))
        unmarked = net.bound(family, socket.SOCK_DGRAM, 0)
        with net.opened(net.client, family, socket.SOCK_DGRAM, 0) as sender:
            for number in range(5):
                sender.sendto(bytes([number]) * PAYLOAD, target.getsockname())
                sender.sendto(bytes([number]) * PAYLOAD, unmarked.getsockname())
        assert [target.recv(2000)[0] for _ in range(3)] == [0, 1, 2]
        assert [unmarked.recv(2000)[0] for _ in range(5)] == [0, 1, 2, 3, 4]
        assert limits.traffic(RECEIVER) == {
            "ingress_bytes": 3 * wire,
            "ingress_packets": 3,
            "ingress_dropped_bytes": 2 * wire,
            "ingress_dropped_packets": 2,
        }
        target.close()
        unmarked.close()


def connected(net: Net, family: int) -> tuple[socket.socket, socket.socket]:
    """Return the client's and the server's end of a connection, marked once it is made."""
    listener = net.bound(family, socket.SOCK_STREAM, 0)
    listener.listen()
    client = net.opened(net.client, family, socket.SOCK_STREAM, 0)
    client.connect(listener.getsockname())
    server, _ = listener.accept()
    listener.close()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark_of(SENDER))
    server.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark_of(RECEIVER))
    return client, server


def transfer(senders: list[socket.socket], receivers: list[socket.socket], seconds: float) -> float:
    """Send as much as the sockets take, for so long; return how long it was."""
    began = time.monotonic()
    data = bytes(1 << 16)
    with selectors.DefaultSelector() as selector:
        for one in senders:
            one.setblocking(False)
            selector.register(one, selectors.EVENT_WRITE)
        for one in receivers:
            one.setblocking(False)
            selector.register(one, selectors.EVENT_READ)
        while (left := began + seconds - time.monotonic()) > 0:
            for key, events in selector.select(left):
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                with contextlib.suppress(BlockingIOError):
                    if events & selectors.EVENT_WRITE:
                        ready.send(data)
                    else:
                        ready.recv(1 << 20)
    return time.monotonic() - began


def test_both_directions_count_the_same_bytes_of_merged_and_segmented_packets(net: Net, family: int) -> None:
    with LoadedLimits("egress") as egress, ingress(egress) as limits:
        limits.set_limit(SENDER)
        limits.set_limit(RECEIVER)
        add_filter(net.client, net.device, EGRESS, egress.program("egress_pace").fd)
        client, server = connected(net, family)
        # On loopback, IPv6 puts a header of its own into segments over 64 KiB, and takes it out again.
        size, whole = 3_000_000, 1 << 15
        client.sendall(bytes(100))  # nothing before the marks
        received = len(server.recv(100))
        client.settimeout(5)
        data = memoryview(bytes(size))
        sent = 0
        while sent < size:
            sent += client.send(data[sent : sent + whole])
            while received < sent:
                received += len(server.recv(1 << 20))
        out, arrived = limits.traffic(SENDER), limits.traffic(RECEIVER)
        assert out["egress_bytes"] > size
        assert arrived["ingress_bytes"] == out["egress_bytes"]
        assert arrived["ingress_packets"] == out["egress_packets"]
        client.close()
        server.close()


@pytest.mark.parametrize("connections", [1, 20])
def test_egress_police_holds_the_rate_and_wastes_none(net: Net, connections: int) -> None:
    rate, burst_s, seconds = 1_000_000, 0.5, 3.0
    with LoadedLimits("egress", egress_burst_ns=round(burst_s * NS_PER_S)) as limits:
        add_filter(net.client, net.device, EGRESS, limits.program("egress_police").fd)
        limits.set_limit(SENDER, egress=rate)
        pairs = [connected(net, socket.AF_INET) for _ in range(connections)]
        took = transfer([pair[0] for pair in pairs], [pair[1] for pair in pairs], seconds)
        sent = limits.traffic(SENDER)["egress_bytes"]
        for pair in pairs:
            pair[0].close()
            pair[1].close()
    whole_packet = 1 << 16
    assert sent <= rate * (took + burst_s) + whole_packet
    # All of the rate and most of the burst is used, at whatever moment a retry stood when time was up.
    assert sent >= rate * took


def test_the_later_of_two_departure_times_holds(net: Net) -> None:
    """The socket's own time against the limit's, as a filter behind egress_pace sees it."""
    with LoadedLimits("egress") as limits, BpfObject("departure", path=Path(__file__).parent) as probe:
        add_filter(net.client, net.device, EGRESS, limits.program("egress_pace").fd, priority=1)
        add_filter(net.client, net.device, EGRESS, probe.program("departure").fd, priority=2)
        seen = ArrayMap(probe.map("departures"), ctypes.c_uint64)
        limits.set_limit(1, egress=1_000_000_000)
        target = net.bound(socket.AF_INET, socket.SOCK_DGRAM, 0)
        with net.opened(net.client, socket.AF_INET, socket.SOCK_DGRAM, mark_of(1)) as sender:
            sender.setsockopt(socket.SOL_SOCKET, SO_TXTIME, bytes(TxTime(time.CLOCK_MONOTONIC, 0)))
            for own_s, limit_s in ((0.5, 0.25), (0.25, 0.5)):
                now = now_ns()
                own_ns, limit_ns = now + round(own_s * NS_PER_S), now + round(limit_s * NS_PER_S)
                limits.pace.set(1, TenantPace(limit_ns, 0))
                when = bytes(ctypes.c_uint64(own_ns))
                sender.sendmsg([b"data"], [(socket.SOL_SOCKET, SCM_TXTIME, when)], 0, target.getsockname())
                departure = seen.get(0)
                assert departure is not None
                assert departure.value == max(own_ns, limit_ns)
        target.close()


SO_TXTIME: Final = 61
SCM_TXTIME: Final = 61


class TxTime(ctypes.Structure):
    """`struct sock_txtime` (linux/net_tstamp.h)."""

    _fields_ = (("clockid", ctypes.c_int32), ("flags", ctypes.c_uint32))


def test_the_window_that_is_offered_is_smaller_the_longer_the_queue(family: int) -> None:
    net, rate = Net("veth"), 1_000_000
    with LoadedLimits("egress") as limits:
        add_filter(net.server, "veth", EGRESS, limits.program("egress_pace").fd)
        client, server = connected(net, family)
        windows = {}
        for queue_s in (0.0, 0.01, 0.25, 1.0):
            limits.set_limit(RECEIVER, ingress=rate)
            limits.pace.set(RECEIVER, TenantPace(0, now_ns() + round(queue_s * NS_PER_S)))
            client.sendall(bytes(100))
            assert len(server.recv(1000)) == 100
            server.sendall(b"answer")
            assert client.recv(1000) == b"answer"
            windows[queue_s] = offered(client)
        client.close()
        server.close()
    net.close()
    assert windows[0.0] > 60_000
    for queue_s, window in windows.items():
        if queue_s:
            expected = min(rate * 0.05**1.5 / queue_s**0.5, windows[0.0])
            # The queue gets shorter while it is looked at; a header counts in units of up to 16 KiB, rounded down.
            assert expected - WINDOW_UNIT <= window <= expected * 1.05, queue_s


def test_without_a_queue_a_sender_may_have_under_way_what_its_path_holds_and_a_little(family: int) -> None:
    net, rate = Net("veth"), 200_000
    with LoadedLimits("egress") as limits:
        add_filter(net.server, "veth", EGRESS, limits.program("egress_pace").fd)
        client, server = connected(net, family)
        limits.set_limit(RECEIVER, ingress=rate)
        while (round_trip_s := round_trip_us(server) / 1e6) < 0.02:
            # Who has nothing to send acknowledges late, which makes the path a long one.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            server.sendall(b"token")
            assert client.recv(1000) == b"token"
            time.sleep(0.05)
        client.sendall(bytes(100))
        assert len(server.recv(1000)) == 100
        server.sendall(b"answer")
        assert client.recv(1000) == b"answer"
        expected = rate * (0.1 + round_trip_s)
        assert expected - WINDOW_UNIT <= offered(client) <= expected
        client.close()
        server.close()
    net.close()


WINDOW_UNIT: Final = 1024
_RTT: Final = slice(68, 72)
"""tcpi_rtt in `struct tcp_info` (linux/tcp.h), microseconds."""
_SND_WND: Final = slice(228, 232)
"""tcpi_snd_wnd in `struct tcp_info` (linux/tcp.h, v5.4)."""


def offered(sock: socket.socket) -> int:
    """Return the window that the peer offered last."""
    return int.from_bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[_SND_WND], "little")


def round_trip_us(sock: socket.socket) -> int:
    """Return the smoothed round-trip time that a socket has measured."""
    return int.from_bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[_RTT], "little")


def test_new_connections_over_the_rate_of_their_source_are_not_made(family: int) -> None:
    net = Net("veth")
    interval_ns, burst = 60 * NS_PER_S, 3
    rodata = {"connections_interval_ns": interval_ns, "connections_ahead_ns": (burst - 1) * interval_ns}
    with BpfObject("connections", rodata=rodata) as police, contextlib.ExitStack() as sockets:
        add_filter(net.server, "veth", INGRESS, police.program("connections_police").fd)
        listener = sockets.enter_context(net.bound(family, socket.SOCK_STREAM, 0))
        listener.listen()
        ports = HashMap(police.map("listen_ports"), ctypes.c_uint16, ctypes.c_uint8)
        ports.set(listener.getsockname()[1], ctypes.c_uint8(1))
        for _ in range(burst):
            client = sockets.enter_context(net.opened(net.client, family, socket.SOCK_STREAM, 0))
            client.settimeout(5)
            client.connect(listener.getsockname())
        refused = sockets.enter_context(net.opened(net.client, family, socket.SOCK_STREAM, 0))
        refused.settimeout(0.2)
        with pytest.raises(TimeoutError):
            refused.connect(listener.getsockname())
        # What is made goes on, and the host itself is nobody's source.
        here = sockets.enter_context(net.opened(net.server, family, socket.SOCK_STREAM, 0))
        here.settimeout(5)
        here.connect(listener.getsockname())
    net.close()
