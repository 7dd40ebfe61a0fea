from __future__ import annotations

import pytest
from support.workloads import PRICES, merged, run, settings, steadily

from seedance.engine.cost import CostModel
from seedance.engine.courtesy import Courtesy
from seedance.engine.fairness import Usage
from seedance.engine.roster import Roster
from seedance.engine.states import Request, Tenant

pytestmark = pytest.mark.unit

SETTINGS = settings()


class Scene:
    """Tenants with parts of the engine's time, and who of them stands back."""

    def __init__(self) -> None:
        self.roster = Roster(16)
        self.usage = Usage(2.0, 0.0)
        self.courtesy = Courtesy(SETTINGS, self.roster, CostModel(PRICES), self.usage)
        self.keys = 0

    def tenant(self, fraction: float) -> Tenant:
        row = len(self.roster.tenants) + 1
        tenant = self.roster.tenants[row] = Tenant(row, 16)
        tenant.usage = self.usage.usage(fraction)
        return tenant

    def waits(self, tenant: Tenant, now_s: float = 0.0) -> Request:
        self.keys += 1
        request = Request(self.keys, tenant, 100, 100, now_s)
        self.roster.submit(request)
        return request

    def reads(self, tenant: Tenant) -> Request:
        request = self.waits(tenant)
        self.roster.admit(request, 0, 0.0)
        return request

    def decodes(self, tenant: Tenant, count: int = 1) -> list[Request]:
        requests = [self.reads(tenant) for _ in range(count)]
        for request in requests:
            self.roster.prompt_read(request, 100)
        return requests

    def stand_back(self, now_s: float = 0.0, slots_free: int = 8, *, is_shared: bool = True) -> list[Tenant]:
        self.courtesy.decide(now_s, slots_free, is_shared=is_shared)
        return list(self.roster.aside)


def test_a_flood_stands_back_while_a_light_tenant_is_read() -> None:
    scene = Scene()
    flood, light = scene.tenant(0.9), scene.tenant(0.1)
    streams = scene.decodes(flood, 2)
    assert scene.stand_back() == []
    request = scene.waits(light)
    assert scene.stand_back() == [flood]
    assert not scene.roster.decoders
    assert scene.roster.hold == {stream.key: True for stream in streams}
    scene.roster.admit(request, 0, 0.0)
    assert scene.stand_back() == [flood]
    scene.roster.prompt_read(request, 100)
    # Two streams more make a step a little longer, and no more than that.
    assert scene.stand_back() == []
    assert scene.roster.hold == {stream.key: False for stream in streams}
    assert list(scene.roster.decoders) == [request.key, *(stream.key for stream in streams)]


def test_many_streams_stand_back_while_a_light_tenant_decodes() -> None:
    scene = Scene()
    flood, light = scene.tenant(0.9), scene.tenant(0.1)
    scene.decodes(flood, 40)
    (request,) = scene.decodes(light)
    assert scene.stand_back() == [flood]
    assert list(scene.roster.decoding) == [light]
    scene.roster.finish(request.key)
    assert scene.stand_back() == []
    assert len(scene.roster.decoders) == 40


def test_nobody_stands_back_for_longer_than_the_patience() -> None:
    scene = Scene()
    flood, light = scene.tenant(0.9), scene.tenant(0.1)
    scene.decodes(flood, 40)
    scene.decodes(light)
    times = [0.01 * i for i in range(100)]
    stood = [bool(scene.stand_back(now_s)) for now_s in times]
    longest = max(len(run) for run in "".join("x" if each else " " for each in stood).split())
    assert 0.01 * longest <= SETTINGS.patience_s + 0.02
    assert stood.count(False) <= 4


def test_nobody_stands_back_for_a_tenant_that_is_not_light_or_has_more_than_it_gets_slots_for() -> None:
    scene = Scene()
    flood, other = scene.tenant(0.65), scene.tenant(0.4)
    scene.decodes(flood, 40)
    scene.decodes(other)
    assert scene.stand_back() == []
    other.usage = scene.usage.usage(0.1)
    assert scene.stand_back() == [flood]
    scene.waits(other)
    assert scene.stand_back(slots_free=0) == []


def test_who_has_no_more_than_its_part_does_not_stand_back() -> None:
    scene = Scene()
    middle, light = scene.tenant(0.4), scene.tenant(0.1)
    scene.decodes(middle, 40)
    scene.decodes(light)
    assert scene.stand_back() == []


def test_a_tenant_alone_does_not_stand_back() -> None:
    scene = Scene()
    flood, light = scene.tenant(0.9), scene.tenant(0.1)
    scene.decodes(flood, 40)
    scene.decodes(light)
    assert scene.stand_back(is_shared=False) == []


def test_a_step_is_left_empty_once_for_who_cannot_be_admitted() -> None:
    scene = Scene()
    flood, light = scene.tenant(0.9), scene.tenant(0.1)
    scene.decodes(flood, 40)
    scene.waits(light, 1.0)
    assert scene.stand_back(1.0) == [flood]
    scene.courtesy.planned(1.0, is_empty=True)
    assert scene.stand_back(1.0) == []
    scene.waits(light, 1.5)
    assert scene.stand_back(1.5) == []  # the first one is still ahead of it


def test_held_and_paused_streams_of_who_stands_back_stay_left_out() -> None:
    scene = Scene()
    flood, light = scene.tenant(0.9), scene.tenant(0.1)
    first, second = scene.decodes(flood, 2)
    scene.reads(light)
    assert scene.stand_back() == [flood]
    scene.roster.pause(first, 0.0)
    scene.roster.hold_tenant(flood)
    scene.roster.release_tenant(flood)
    assert not scene.roster.decoders
    assert not scene.roster.decoding
    assert scene.stand_back(is_shared=False) == []
    assert list(scene.roster.decoders) == [second.key]
    assert first.is_left_out
    assert not second.is_left_out


def test_a_light_user_does_not_see_the_streams_of_a_flood() -> None:
    short = steadily("b", 1.0, 30.0, 200, 20, from_s=0.5)
    many = steadily("a", 0.05, 30.0, 100, 200, from_s=3.0)
    alone = run(short, until_s=30.0).tenants["b"]
    beside = run(merged(short, many), until_s=30.0).tenants["b"]
    assert alone.between_tokens_p99_s is not None
    assert beside.between_tokens_p99_s is not None
    assert beside.between_tokens_p99_s <= 1.3 * alone.between_tokens_p99_s
