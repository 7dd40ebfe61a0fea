"""Holding by itself: who is let in when; what it does to steps is in test_policy."""

from __future__ import annotations

import math

import pytest

from seedance.engine.bucket import Bucket
from seedance.engine.holding import Holding
from seedance.engine.roster import Roster
from seedance.engine.states import Request, Tenant

pytestmark = pytest.mark.unit


class Scene:
    def __init__(self) -> None:
        self.roster = Roster(16)
        self.holding = Holding(self.roster)
        self.tenant = self.roster.tenants[1] = Tenant(1, self.roster.decoding)

    def submit(self, now_s: float = 0.0) -> None:
        if not self.tenant.has_work:
            self.holding.work_arrived(self.tenant, now_s)
        self.roster.submit(Request(object(), self.tenant, 10, 10, now_s))


def test_nobody_is_held_at_first() -> None:
    scene = Scene()
    assert scene.holding.is_idle
    assert scene.holding.next_release_s() == math.inf
    assert not scene.holding.release_due(100.0)


def test_a_tenant_is_held_until_the_latest_of_its_times() -> None:
    scene = Scene()
    scene.submit()
    for release_s in (3.0, 2.0, 5.0):
        scene.holding.hold(scene.tenant, release_s, 1.0)
    assert not scene.holding.is_idle
    assert scene.holding.next_release_s() == 5.0
    assert not scene.holding.release_due(4.9)
    assert scene.tenant.is_held
    assert scene.holding.release_due(5.0)
    assert (scene.tenant.is_held, scene.tenant.held_s) == (False, 4.0)
    assert scene.holding.is_idle


def test_an_idle_tenant_is_released_when_it_has_work_again() -> None:
    scene = Scene()
    scene.submit()
    scene.holding.hold(scene.tenant, 3.0, 1.0)
    [key] = scene.roster.requests
    scene.roster.finish(key)
    scene.holding.work_ended(scene.tenant, 2.0)
    assert scene.holding.next_release_s() == math.inf
    scene.submit(10.0)
    assert scene.holding.release_due(10.0)
    assert scene.tenant.held_s == 1.0  # not while it wanted nothing


def test_an_exhausted_tenants_requests_end_with_their_last_step() -> None:
    scene = Scene()
    scene.submit()
    scene.holding.exhaust(scene.tenant, 1.0)
    scene.tenant.last_scheduled = 1
    assert scene.holding.end_exhausted(2.0) == ([], [])
    scene.roster.decoding.begin_round()
    scene.roster.decoding.end_round(0.0, 0.0, 0.0)
    [key] = scene.roster.requests
    assert scene.holding.end_exhausted(3.0) == ([key], [scene.tenant])
    assert not scene.roster.requests
    assert scene.holding.next_release_s() == math.inf


def test_new_tokens_wait_for_credit() -> None:
    scene = Scene()
    scene.submit()
    scene.tenant.credit = Bucket(rate=0.5, burst=0.1, debt=1.0, now_s=0.0)
    scene.tenant.credit.charge(0.6, 0.0)  # owes half a second, which takes one, and saves up its burst
    scene.holding.exhaust(scene.tenant, 0.0)
    scene.holding.replenish(scene.tenant, 0.0)
    assert not scene.holding.exhausted
    assert scene.holding.next_release_s() == pytest.approx(1.2)
