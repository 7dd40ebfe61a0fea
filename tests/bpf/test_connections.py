"""connections.bpf.c, a packet for each branch."""

from __future__ import annotations

import ctypes
import ipaddress
from collections.abc import Iterator
from typing import Final

import pytest
from support import observed
from support.limits import NS_PER_S, now_ns
from support.packets import (
    ACK,
    DESTINATION,
    FIN,
    FRAGMENT,
    HOP_BY_HOP,
    ROUTING,
    RST,
    SYN,
    TCP,
    UDP,
    extended,
    ipv4,
    ipv6,
    tcp,
)

from seedance.bpf.abi import ConnectionCounts, SourcePace, SourcePrefix
from seedance.bpf.loader import BpfObject
from seedance.bpf.maps import HashMap, PerCpuArrayMap

observed.require_bpf()

INTERVAL_NS: Final = 10 * NS_PER_S
BURST: Final = 3
PORT: Final = 443
UNSPEC: Final = 0xFFFFFFFF
SHOT: Final = 2


class Police:
    """The program with a rate, or without one."""

    def __init__(self, interval_ns: int, burst: int = BURST) -> None:
        rodata = {"connections_interval_ns": interval_ns, "connections_ahead_ns": (burst - 1) * interval_ns}
        self.object = BpfObject("connections", rodata=rodata)
        self.sources = HashMap(self.object.map("source_connections"), SourcePrefix, SourcePace)
        self._counts = PerCpuArrayMap(self.object.map("connection_counts"), ConnectionCounts)
        HashMap(self.object.map("listen_ports"), ctypes.c_uint16, ctypes.c_uint8).set(PORT, ctypes.c_uint8(1))

    def takes(self, packet: bytes) -> bool:
        returned = self.object.program("connections_police").test_run(packet).returned
        assert returned in (UNSPEC, SHOT)
        return returned == UNSPEC

    def counts(self) -> tuple[int, int]:
        counts = self._counts.get(0)
        assert counts is not None
        return counts.requests, counts.dropped_requests


@pytest.fixture
def police() -> Iterator[Police]:
    made = Police(INTERVAL_NS)
    yield made
    made.object.close()


def requests_from(*sources: str) -> list[bytes]:
    made = []
    for source in sources:
        build = ipv6 if ":" in source else ipv4
        made.append(build(tcp(SYN, port=PORT), source=source))
    return made


@pytest.mark.parametrize("source", ["192.0.2.1", "2001:db8::1"])
def test_a_burst_passes_and_what_is_over_it_is_dropped(police: Police, source: str) -> None:
    (packet,) = requests_from(source)
    assert [police.takes(packet) for _ in range(BURST + 2)] == [True] * BURST + [False] * 2
    assert police.counts() == (BURST, 2)


def test_the_rate_comes_after_the_burst() -> None:
    police = Police(INTERVAL_NS)
    (packet,) = requests_from("192.0.2.1")
    while police.takes(packet):
        pass
    (key,) = police.sources.keys()
    # An interval later there is room for one.
    pace = police.sources.get(key)
    assert pace is not None
    police.sources.set(key, SourcePace(pace.arrival_ns - INTERVAL_NS))
    assert [police.takes(packet) for _ in range(2)] == [True, False]
    police.object.close()


def test_a_source_is_an_ipv4_address(police: Police) -> None:
    assert all(police.takes(packet) for packet in requests_from(*(f"192.0.2.{last}" for last in range(9))))
    keys = {bytes(key.address) for key in police.sources.keys()}  # noqa: SIM118  (not a dict)
    assert keys == {ipaddress.ip_address(f"::ffff:192.0.2.{last}").packed for last in range(9)}


def test_a_source_is_an_ipv6_network_of_64_bits(police: Police) -> None:
    packets = requests_from(*(f"2001:db8::{last:x}:1" for last in range(BURST + 1)))
    assert [police.takes(packet) for packet in packets] == [True] * BURST + [False]
    assert all(police.takes(packet) for packet in requests_from(*(f"2001:db8:0:{net}::1" for net in range(1, 9))))


REQUEST: Final = tcp(SYN, port=PORT)


def ipv6_extended(transport: bytes, *kinds: int, protocol: int = TCP, units: int = 0, fragment: int = 0) -> bytes:
    payload, first = extended(transport, *kinds, protocol=protocol, units=units, fragment=fragment)
    return ipv6(payload, protocol=first)


# BPF_PROG_TEST_RUN takes no packet that ends within its IP header.
UNTOUCHED: Final = [
    pytest.param(ipv4(tcp(SYN, port=PORT + 1)), id="another port"),
    pytest.param(ipv6(tcp(SYN, port=PORT + 1)), id="another port of IPv6"),
    pytest.param(ipv4(tcp(SYN | ACK, port=PORT)), id="an answer"),
    pytest.param(ipv4(tcp(ACK, port=PORT)), id="data"),
    pytest.param(ipv4(tcp(FIN | ACK, port=PORT)), id="an end"),
    pytest.param(ipv4(tcp(RST, port=PORT)), id="a reset"),
    pytest.param(ipv4(REQUEST, protocol=UDP), id="UDP"),
    pytest.param(ipv6_extended(tcp(ACK, port=PORT), HOP_BY_HOP), id="data behind an extension header"),
    pytest.param(ipv6_extended(REQUEST, HOP_BY_HOP, protocol=UDP), id="UDP behind an extension header"),
    pytest.param(ipv6_extended(tcp(ACK, port=PORT), FRAGMENT), id="a first fragment of data"),
    pytest.param(ipv6_extended(REQUEST, FRAGMENT, fragment=1), id="a later fragment of IPv6"),
    pytest.param(ipv6_extended(tcp(SYN, port=PORT + 1), ROUTING), id="another port behind an extension header"),
    pytest.param(ipv4(REQUEST, fragment=1), id="a later fragment"),
    pytest.param(ipv4(REQUEST)[:14] + b"\x44" + ipv4(REQUEST)[15:], id="a header that is too short"),
    pytest.param(ipv4(REQUEST)[:14] + b"\x55" + ipv4(REQUEST)[15:], id="another version of IP"),
    pytest.param(bytes(12) + b"\x08\x06" + bytes(46), id="ARP"),
]


@pytest.mark.parametrize("packet", UNTOUCHED)
def test_what_is_no_request_for_our_ports_is_not_touched(police: Police, packet: bytes) -> None:
    assert all(police.takes(packet) for _ in range(BURST + 2))
    assert police.counts() == (0, 0)
    assert not list(police.sources.keys())


MORE_FRAGMENTS: Final = 0x2000
HIDDEN: Final = [
    pytest.param(ipv6_extended(REQUEST, HOP_BY_HOP), id="behind an extension header"),
    pytest.param(ipv6_extended(REQUEST, DESTINATION, units=9), id="behind a long one"),
    pytest.param(ipv6_extended(REQUEST, HOP_BY_HOP, DESTINATION, ROUTING, FRAGMENT, DESTINATION, ROUTING), id="six"),
    pytest.param(ipv6_extended(REQUEST, *[DESTINATION] * 7), id="more than are followed"),
    pytest.param(ipv6_extended(REQUEST, FRAGMENT), id="in a first fragment"),
    pytest.param(ipv6_extended(REQUEST[:8], FRAGMENT), id="in a first fragment of IPv6 that ends before the flags"),
    pytest.param(ipv6_extended(b"", HOP_BY_HOP, DESTINATION)[:64], id="in headers that have no end"),
    pytest.param(ipv4(REQUEST, fragment=MORE_FRAGMENTS), id="in a first fragment of IPv4"),
    pytest.param(ipv4(REQUEST[:8], fragment=MORE_FRAGMENTS), id="in one that ends before the flags"),
]


@pytest.mark.parametrize("packet", HIDDEN)
def test_a_request_cannot_be_hidden(police: Police, packet: bytes) -> None:
    assert [police.takes(packet) for _ in range(BURST + 2)] == [True] * BURST + [False] * 2
    assert police.counts() == (BURST, 2)
    (key,) = police.sources.keys()
    assert any(key.address)


def test_options_of_ipv4_are_skipped(police: Police) -> None:
    packet = ipv4(REQUEST, options=bytes(40))
    assert [police.takes(packet) for _ in range(BURST + 1)] == [True] * BURST + [False]


def test_without_a_rate_requests_are_counted_only() -> None:
    police = Police(0)
    (packet,) = requests_from("192.0.2.1")
    assert all(police.takes(packet) for _ in range(100))
    assert police.counts() == (100, 0)
    police.object.close()


def test_a_source_that_was_away_begins_anew(police: Police) -> None:
    (packet,) = requests_from("192.0.2.1")
    police.takes(packet)
    (key,) = police.sources.keys()
    police.sources.set(key, SourcePace(now_ns() // 2))
    assert [police.takes(packet) for _ in range(BURST + 1)] == [True] * BURST + [False]
