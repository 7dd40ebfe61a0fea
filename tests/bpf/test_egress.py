"""egress.bpf.c, a packet for each branch."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Final

import pytest
from support import observed
from support.limits import NS_PER_S, LoadedLimits, mark_of, now_ns
from support.packets import ACK, FIN, PSH, RST, SYN, UDP, SkBuff, ipv4, ipv6, tcp

from seedance.bpf.abi import TenantPace

observed.require_bpf()

TENANT: Final = 7
RATE: Final = 1_000_000
HORIZON_NS: Final = 2 * NS_PER_S
BURST_NS: Final = NS_PER_S // 2
UNSPEC: Final = 0xFFFFFFFF
"""TC_ACT_UNSPEC: the filters of others go on."""
SHOT: Final = 2
DATA: Final = ipv4(tcp(ACK | PSH, bytes(946)))
assert len(DATA) == 1000


@pytest.fixture
def limits() -> Iterator[LoadedLimits]:
    with LoadedLimits("egress", egress_horizon_ns=HORIZON_NS, egress_burst_ns=BURST_NS) as loaded:
        yield loaded


@dataclasses.dataclass(frozen=True)
class Case:
    """A packet of 1000 bytes, the state that it meets, and what becomes of it.

    paid_ns      how far the tenant's egress is ahead of its rate
    departs_ns   from now, when it is delayed
    """

    summary: str
    program: str = "egress_pace"
    mark: int = mark_of(TENANT)
    egress: int | None = RATE
    paid_ns: int = 0
    segments: int = 0
    wire_len: int = 0
    returned: int = UNSPEC
    departs_ns: int | None = None
    counted: dict[str, int] = dataclasses.field(default_factory=dict)


PASSED: Final = {"egress_bytes": 1000, "egress_packets": 1}
DROPPED: Final = {"egress_dropped_bytes": 1000, "egress_dropped_packets": 1}
CASES: Final = [
    Case("no mark", mark=0),
    Case("a mark of somebody else", mark=0x12340007),
    Case("a tenant that has no row", egress=None),
    Case("no limit", egress=0, paid_ns=NS_PER_S, counted=PASSED),
    Case("under the rate", counted=PASSED),
    Case("at the rate", paid_ns=NS_PER_S, departs_ns=NS_PER_S, counted={**PASSED, "egress_delayed_packets": 1}),
    Case("over the horizon", paid_ns=3 * NS_PER_S, returned=SHOT, counted=DROPPED),
    Case("segments", segments=3, wire_len=1108, counted={"egress_bytes": 1108, "egress_packets": 3}),
    Case(
        "segments over the horizon",
        segments=3,
        wire_len=1108,
        paid_ns=3 * NS_PER_S,
        returned=SHOT,
        counted={"egress_dropped_bytes": 1108, "egress_dropped_packets": 3},
    ),
    Case("police: no mark", "egress_police", mark=0),
    Case("police: a tenant that has no row", "egress_police", egress=None),
    Case("police: no limit", "egress_police", egress=0, paid_ns=NS_PER_S, counted=PASSED),
    Case("police: under the rate", "egress_police", counted=PASSED),
    Case("police: within the burst", "egress_police", paid_ns=NS_PER_S // 4, counted=PASSED),
    Case("police: over the burst", "egress_police", paid_ns=NS_PER_S, returned=SHOT, counted=DROPPED),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.summary)
def test_what_becomes_of_a_packet(limits: LoadedLimits, case: Case) -> None:
    if case.egress is not None:
        limits.set_limit(TENANT, egress=case.egress)
    before = now_ns()
    if case.paid_ns:
        limits.pace.set(TENANT, TenantPace(before + case.paid_ns, 0))
    context = SkBuff(mark=case.mark, gso_segs=case.segments, wire_len=case.wire_len)
    done = limits.program(case.program).test_run(DATA, bytes(context))
    assert done.returned == case.returned
    assert limits.traffic(TENANT) == case.counted
    departure = SkBuff.from_buffer_copy(done.context).tstamp
    assert departure == (before + case.departs_ns if case.departs_ns is not None else 0)


@pytest.mark.parametrize(("program", "ahead_ns"), [("egress_pace", HORIZON_NS), ("egress_police", BURST_NS)])
def test_each_packet_moves_the_next_by_its_time_at_the_rate(limits: LoadedLimits, program: str, ahead_ns: int) -> None:
    limits.set_limit(TENANT, egress=RATE)
    start = now_ns() + ahead_ns // 2
    limits.pace.set(TENANT, TenantPace(start, 0))
    for _ in range(3):
        limits.program(program).test_run(DATA, bytes(SkBuff(mark=mark_of(TENANT))))
    pace = limits.pace.get(TENANT)
    assert pace is not None
    assert pace.egress_departure_ns == start + 3 * (1000 * NS_PER_S // RATE)


def test_a_pause_earns_no_credit(limits: LoadedLimits) -> None:
    limits.set_limit(TENANT, egress=RATE)
    limits.pace.set(TENANT, TenantPace(now_ns() // 2, 0))
    before = now_ns()
    limits.program("egress_pace").test_run(DATA, bytes(SkBuff(mark=mark_of(TENANT))))
    pace = limits.pace.get(TENANT)
    assert pace is not None
    cost_ns = 1000 * NS_PER_S // RATE
    assert before + cost_ns <= pace.egress_departure_ns <= now_ns() + cost_ns


def test_processors_that_send_at_once_lose_nothing() -> None:
    each, horizon_ns = 500, 3600 * NS_PER_S
    limits = LoadedLimits("egress", egress_horizon_ns=horizon_ns)
    limits.set_limit(TENANT, egress=10**12)  # a packet costs a nanosecond
    start = now_ns() + horizon_ns
    limits.pace.set(TENANT, TenantPace(start, 0))
    program, context = limits.program("egress_pace"), bytes(SkBuff(mark=mark_of(TENANT)))

    def send() -> None:
        for _ in range(each):
            program.test_run(DATA, context)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pace = limits.pace.get(TENANT)
    assert pace is not None
    assert limits.traffic(TENANT)["egress_delayed_packets"] == len(threads) * each
    assert pace.egress_departure_ns == start + len(threads) * each
    limits.close()


@pytest.mark.parametrize("program", ["egress_pace", "egress_police"])
def test_a_packet_that_passes_several_devices_is_counted_once(limits: LoadedLimits, program: str) -> None:
    limits.set_limit(TENANT, egress=RATE)
    # The runs of one call have the same skb.
    limits.program(program).test_run(DATA, bytes(SkBuff(mark=mark_of(TENANT))), repeat=3)
    assert limits.traffic(TENANT) == PASSED


ACKNOWLEDGEMENTS: Final = [
    pytest.param(ipv4(tcp(ACK)), id="IPv4"),
    pytest.param(ipv6(tcp(ACK)), id="IPv6"),
    pytest.param(ipv4(tcp(ACK, options=bytes(40)), options=bytes(40)), id="with all options"),
    pytest.param(ipv4(tcp(ACK | PSH)), id="of data that was pushed"),
]
OTHERS: Final = [
    pytest.param(DATA, id="data"),
    pytest.param(ipv4(tcp(ACK, b"a")), id="one byte"),
    pytest.param(ipv6(tcp(ACK, b"a")), id="one byte of IPv6"),
    pytest.param(ipv4(tcp(SYN | ACK)), id="a handshake"),
    pytest.param(ipv4(tcp(FIN | ACK)), id="an end"),
    pytest.param(ipv4(tcp(RST | ACK)), id="a reset"),
    pytest.param(ipv4(bytes(8), protocol=UDP), id="UDP"),
    pytest.param(ipv4(tcp(ACK))[:40], id="cut off"),
    pytest.param(bytes(60), id="not IP"),
]


@pytest.mark.parametrize("packet", ACKNOWLEDGEMENTS)
def test_an_acknowledgement_waits_until_what_came_in_is_paid_for(limits: LoadedLimits, packet: bytes) -> None:
    limits.set_limit(TENANT, ingress=RATE)
    paid_ns = now_ns() + NS_PER_S
    limits.pace.set(TENANT, TenantPace(0, paid_ns))
    done = limits.program("egress_pace").test_run(packet, bytes(SkBuff(mark=mark_of(TENANT))))
    assert done.returned == UNSPEC
    assert SkBuff.from_buffer_copy(done.context).tstamp == paid_ns


def test_an_acknowledgement_waits_no_longer_than_the_horizon(limits: LoadedLimits) -> None:
    limits.set_limit(TENANT, ingress=1)
    limits.pace.set(TENANT, TenantPace(0, now_ns() + 60 * HORIZON_NS))
    done = limits.program("egress_pace").test_run(ipv4(tcp(ACK)), bytes(SkBuff(mark=mark_of(TENANT))))
    assert now_ns() < SkBuff.from_buffer_copy(done.context).tstamp <= now_ns() + HORIZON_NS


@pytest.mark.parametrize("packet", OTHERS)
def test_nothing_else_waits_for_what_came_in(limits: LoadedLimits, packet: bytes) -> None:
    limits.set_limit(TENANT, ingress=RATE)
    limits.pace.set(TENANT, TenantPace(0, now_ns() + NS_PER_S))
    done = limits.program("egress_pace").test_run(packet, bytes(SkBuff(mark=mark_of(TENANT))))
    assert SkBuff.from_buffer_copy(done.context).tstamp == 0


def test_without_an_ingress_limit_acknowledgements_do_not_wait(limits: LoadedLimits) -> None:
    limits.set_limit(TENANT)
    limits.pace.set(TENANT, TenantPace(0, now_ns() + NS_PER_S))
    done = limits.program("egress_pace").test_run(ipv4(tcp(ACK)), bytes(SkBuff(mark=mark_of(TENANT))))
    assert SkBuff.from_buffer_copy(done.context).tstamp == 0
