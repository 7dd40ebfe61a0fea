from __future__ import annotations

import pytest

from seedance.engine.fairness import Usage, VirtualCounters

pytestmark = pytest.mark.unit


class Counted:
    def __init__(self, virtual_s: float = 0.0) -> None:
        self.virtual_s = virtual_s
        self.claim_s = 0.0
        self.inverse_weight = 1.0
        self.usage = 0.0
        self.owed_s = 0.0

    def settle(self) -> None:
        self.virtual_s, self.owed_s = self.virtual_s + self.owed_s, 0.0


def test_who_begins_to_wait_is_lifted_to_the_least_of_those_who_do() -> None:
    counters: VirtualCounters[Counted] = VirtualCounters(Counted.settle)
    first, second, third = Counted(5.0), Counted(9.0), Counted(1.0)
    for tenant in (first, second, third):
        counters.enter(tenant)
    assert [tenant.virtual_s for tenant in (first, second, third)] == [5.0, 9.0, 5.0]


def test_where_nobody_waits_it_is_lifted_to_who_did_last() -> None:
    counters: VirtualCounters[Counted] = VirtualCounters(Counted.settle)
    first, second = Counted(5.0), Counted(1.0)
    counters.enter(first)
    counters.leave(first)
    first.virtual_s = 7.0  # its running requests go on
    counters.enter(second)
    assert second.virtual_s == 7.0


def test_what_it_was_behind_when_it_stopped_waiting_it_may_be_behind_again() -> None:
    counters: VirtualCounters[Counted] = VirtualCounters(Counted.settle)
    ahead, behind = Counted(5.0), Counted(5.0)
    counters.enter(ahead)
    counters.enter(behind)
    ahead.virtual_s = 5.5  # it was advanced
    counters.leave(behind)
    ahead.virtual_s = 9.0
    counters.enter(behind)
    assert behind.virtual_s == 8.5
    behind.virtual_s = 9.5
    counters.leave(behind)
    ahead.virtual_s = 20.0
    counters.enter(behind)
    assert behind.virtual_s == 20.0, "it was not behind, and saves nothing up"


def test_who_is_ahead_is_not_set_back_and_who_waits_is_not_lifted_again() -> None:
    counters: VirtualCounters[Counted] = VirtualCounters(Counted.settle)
    ahead, behind = Counted(5.0), Counted(1.0)
    counters.enter(behind)
    counters.enter(ahead)
    assert ahead.virtual_s == 5.0
    counters.enter(behind)
    assert behind.virtual_s == 1.0
    counters.leave(Counted())
    assert set(counters.waiting) == {ahead, behind}


def test_counters_that_lag_behind_are_brought_up_to_date_where_they_count() -> None:
    counters: VirtualCounters[Counted] = VirtualCounters(Counted.settle)
    first, second, third, last = Counted(1.0), Counted(2.0), Counted(9.0), Counted(0.0)
    counters.enter(first)
    counters.enter(second)
    counters.enter(third)
    first.owed_s, second.owed_s, third.owed_s = 6.0, 1.0, 1.0
    counters.enter(last)
    assert last.virtual_s == 3.0
    assert third.owed_s == 1.0, "it is ahead anyway, and was left alone"
    last.owed_s = 0.5
    for tenant in (first, second, third, last):
        counters.leave(tenant)
    last.owed_s = 2.0
    newcomer = Counted()
    counters.enter(newcomer)
    assert newcomer.virtual_s == 5.5


def test_usage_is_the_part_of_the_time_that_a_tenant_had() -> None:
    tenant = Counted()
    usage = Usage(2.0, 0.0)
    now_s = 0.0
    for _ in range(20_000):
        now_s += 0.01
        scale = usage.set_time(now_s)
        if usage.is_due:
            usage.begin_anew(now_s, [tenant])
            scale = 1.0
        tenant.usage += 0.003 * scale
    assert usage.fraction(tenant) == pytest.approx(0.3, rel=0.01)
    assert tenant.usage < usage.usage(0.35)
    usage.set_time(now_s + 20.0)
    assert usage.fraction(tenant) < 1e-4


def test_usage_survives_years_of_silence() -> None:
    tenant = Counted()
    usage = Usage(2.0, 0.0)
    tenant.usage = usage.set_time(1.0)
    usage.set_time(1e9)
    assert usage.is_due
    usage.begin_anew(1e9, [tenant])
    assert usage.fraction(tenant) < 1e-9
    tenant.usage = usage.set_time(1e9 + 1)
    assert usage.fraction(tenant) == pytest.approx(0.5, rel=0.01)


def test_who_was_held_claims_nothing() -> None:
    counters: VirtualCounters[Counted] = VirtualCounters(Counted.settle)
    held, other = Counted(), Counted()
    counters.enter(held)
    counters.enter(other)
    other.virtual_s = 5.0
    counters.leave(held, is_held=True)
    other.virtual_s = 9.0
    counters.enter(held)
    assert held.virtual_s == 9.0
