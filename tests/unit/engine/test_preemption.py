from __future__ import annotations

import pytest

from seedance.engine.preemption import victim_for_admission, victim_for_blocks, victim_for_slot
from seedance.engine.roster import Roster
from seedance.engine.states import MAX_PREEMPTIONS, Request, Tenant

pytestmark = pytest.mark.unit

NOW_S = 100.0


class Cast:
    """Running requests, by name; later ones came later."""

    def __init__(self) -> None:
        self.roster = Roster(16)
        self.time_s = 1.0

    def tenant(self, weight: float) -> Tenant:
        row = len(self.roster.tenants) + 1
        tenant = self.roster.tenants[row] = Tenant(row, self.roster.decoding)
        tenant.weight = weight
        return tenant

    def run(self, name: str, tenant: Tenant, *, tokens: int = 100, preemptions: int = 0, priority: int = 0) -> Request:
        self.time_s += 1
        request = Request(name, tenant, tokens, 100, self.time_s)
        request.preemptions = preemptions
        request.priority = priority
        self.roster.submit(request)
        self.roster.admit(request, 0, self.time_s)
        self.roster.prompt_read(request, tokens)
        return request

    def for_blocks(self) -> object:
        victim = victim_for_blocks(self.roster.running(), NOW_S)
        return None if victim is None else victim.key

    def for_slot(self, urgent: Request) -> object:
        victim = victim_for_slot(self.roster.running(), urgent)
        return None if victim is None else victim.key


def test_blocks_are_taken_from_the_latest_of_the_lowest_class() -> None:
    cast = Cast()
    low, high = cast.tenant(100), cast.tenant(400)
    cast.run("old", low)
    cast.run("new", low)
    cast.run("newest, of a higher class", high)
    assert cast.for_blocks() == "new"


def test_to_go_first_in_its_own_queue_saves_nobodys_blocks() -> None:
    cast = Cast()
    cast.run("old", cast.tenant(100))
    cast.run("new, and wanted soon", cast.tenant(100)).order_s = 0.0
    assert cast.for_blocks() == "new, and wanted soon"


def test_blocks_are_rather_taken_from_who_is_over_its_share() -> None:
    cast = Cast()
    low, high = cast.tenant(100), cast.tenant(400)
    cast.run("low", low)
    cast.run("over", high)
    high.kv_blocks = 3
    assert cast.for_blocks() == "over"
    high.kv_blocks = 7
    assert cast.for_blocks() == "low"


@pytest.mark.parametrize(("idle_s", "victim"), [(0.4, "low"), (0.55, "low"), (0.61, "idle")])
def test_blocks_are_best_taken_from_who_has_been_idle_and_was_marked(idle_s: float, victim: str) -> None:
    cast = Cast()
    cast.run("low", cast.tenant(100))
    cast.roster.pause(cast.run("idle", cast.tenant(400)), NOW_S - idle_s)
    assert cast.for_blocks() == victim
    found = victim_for_admission(cast.roster, NOW_S)
    assert (found is not None) == (victim == "idle")


def test_nobody_is_asked_too_often() -> None:
    cast = Cast()
    low, high = cast.tenant(100), cast.tenant(400)
    cast.run("often", low, preemptions=MAX_PREEMPTIONS)
    paused = cast.run("often and idle", low, preemptions=MAX_PREEMPTIONS)
    cast.roster.pause(paused, 0.0)
    urgent = Request("urgent", high, 10, 10, NOW_S)
    assert cast.for_blocks() is None
    assert cast.for_slot(urgent) is None
    assert victim_for_admission(cast.roster, NOW_S) is None
    cast.run("not yet", low, preemptions=MAX_PREEMPTIONS - 1)
    assert cast.for_blocks() == cast.for_slot(urgent) == "not yet"


def test_a_slot_is_taken_from_who_was_asked_least_and_loses_least_in_the_lowest_class() -> None:
    cast = Cast()
    low, middle, high = cast.tenant(100), cast.tenant(200), cast.tenant(400)
    urgent = Request("urgent", high, 10, 10, NOW_S)
    cast.run("high", high)
    assert cast.for_slot(urgent) is None
    cast.run("middle", middle, tokens=1)
    assert cast.for_slot(urgent) == "middle"
    cast.run("asked", low, tokens=10, preemptions=1)
    assert cast.for_slot(urgent) == "asked"
    cast.run("long", low, tokens=1000)
    assert cast.for_slot(urgent) == "long"
    cast.run("short", low, tokens=500)
    assert cast.for_slot(urgent) == "short"


def test_a_slot_is_taken_within_a_tenant_by_priority() -> None:
    cast = Cast()
    tenant = cast.tenant(100)
    urgent = Request("urgent", tenant, 10, 10, NOW_S)
    urgent.priority = 1
    cast.run("as urgent", tenant, priority=1)
    assert cast.for_slot(urgent) is None
    cast.run("plain", tenant)
    assert cast.for_slot(urgent) == "plain"
