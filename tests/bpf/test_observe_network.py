"""sockops.bpf.c with real sockets: what it counts against what the kernel itself says of each connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import observed
from support.exchange import exchange, mark_of

from seedance.bpf.observe import ObservedUsage, Observer

observed.require_bpf()


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with observed.new_cgroup() as path:
        yield path


@pytest.fixture
def observer(cgroup: Path) -> Iterator[Observer]:
    observer = Observer(cgroup=cgroup)
    yield observer
    observer.close()


def usage_of(observer: Observer, index: int) -> ObservedUsage:
    assert "observe_network" not in observer.off
    return observer.usage()[index]


def test_round_trips_are_those_that_the_kernel_tells(cgroup: Path, observer: Observer) -> None:
    answer = exchange(cgroup, mark_of(7), rounds=200)
    (connection,) = answer["connections"]
    seen = usage_of(observer, 7)
    assert seen.min_rtt_us == connection["min_rtt_us"]
    # Each round's data is acknowledged before the next is sent, so each is a round trip of its own.
    assert 200 <= sum(seen.rtt_histogram) <= connection["segments"]
    assert seen.min_rtt_us <= seen.rtt_us < answer["wall_us"]
    assert seen.retransmits == 0


def test_ack_intervals_add_up_to_the_time_of_the_exchange(cgroup: Path, observer: Observer) -> None:
    answer = exchange(cgroup, mark_of(7), rounds=200)
    (connection,) = answer["connections"]
    seen = usage_of(observer, 7)
    acks = sum(seen.ack_interval_histogram)
    # The first callback only begins the measurement; the end of the connection may come without one.
    assert 200 <= acks < connection["segments"]
    assert 0 < seen.ack_interval_us * acks <= answer["wall_us"] + acks


def test_retransmits_are_those_that_the_kernel_tells(cgroup: Path, observer: Observer) -> None:
    answer = exchange(cgroup, mark_of(7), bulk_bytes=4 << 20, loss=0.05)
    (connection,) = answer["connections"]
    assert connection["retransmits"] > 0
    assert usage_of(observer, 7).retransmits == connection["retransmits"]


def test_tenants_are_told_apart_by_the_marks_of_their_sockets(cgroup: Path, observer: Observer) -> None:
    foreign, none = str(0x12340007), "0"
    exchange(cgroup, mark_of(1), mark_of(0xFFFF), mark_of(1), foreign, none, rounds=20)
    usage = observer.usage()
    assert usage.keys() == {1, 0xFFFF}
    assert sum(usage[1].rtt_histogram) >= 2 * 20
    assert 20 <= sum(usage[0xFFFF].rtt_histogram) < 2 * 20


def test_the_mean_is_of_what_came_since_the_last_look(cgroup: Path, observer: Observer) -> None:
    exchange(cgroup, mark_of(7), rounds=20)
    first = usage_of(observer, 7)
    assert usage_of(observer, 7) == first
    exchange(cgroup, mark_of(7), rounds=20)
    second = usage_of(observer, 7)
    assert sum(second.rtt_histogram) >= 2 * 20
    assert second.min_rtt_us <= first.min_rtt_us


def test_another_cgroup_is_not_seen(observer: Observer) -> None:
    with observed.new_cgroup() as elsewhere:
        exchange(elsewhere, mark_of(7), rounds=5)
    assert observer.usage() == {}


def test_a_group_below_is_seen(cgroup: Path, observer: Observer) -> None:
    with observed.new_cgroup(cgroup) as below:
        exchange(below, mark_of(7), rounds=5)
    assert sum(usage_of(observer, 7).rtt_histogram) >= 5


def test_a_tenant_that_is_forgotten_begins_anew(cgroup: Path, observer: Observer) -> None:
    exchange(cgroup, mark_of(7), mark_of(8), rounds=20)
    observer.forget(7)
    assert observer.usage().keys() == {8}
    exchange(cgroup, mark_of(7), rounds=5)
    assert sum(usage_of(observer, 7).rtt_histogram) < 20


def test_a_cgroup_that_is_not_there_is_told_and_nothing_else_fails(cgroup: Path) -> None:
    observer = Observer(cgroup=cgroup / "missing")
    try:
        assert observer.off["observe_network"].startswith(f"cannot open the cgroup '{cgroup}/missing'")
        assert "observe_cpu" not in observer.off
        assert observer.usage() == {}
    finally:
        observer.close()


def test_nothing_is_attached_after_close(cgroup: Path) -> None:
    observer = Observer(cgroup=cgroup)
    observer.close()
    observer.close()
    assert observer.usage() == {}
    second = Observer(cgroup=cgroup)
    try:
        exchange(cgroup, mark_of(7), rounds=20)
        assert 20 <= sum(usage_of(second, 7).rtt_histogram) < 2 * 20
    finally:
        second.close()
