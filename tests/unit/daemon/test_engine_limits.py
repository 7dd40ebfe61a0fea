"""The supervisor's side of the ledger."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from seedance.daemon.engine_limits import EngineLimits
from seedance.engine.ledger import EngineRecord, Ledger, LimitsReader
from seedance.engine.scheduling import TenantLimits
from seedance.qos.quota import GpuQuota, Quota

ROWS = {"acme": 3, "globex": 4}


@pytest.fixture
def limits() -> Iterator[EngineLimits]:
    made = EngineLimits(ROWS.__getitem__)
    yield made
    made.ledger.close()


def test_who_has_no_quota_any_more_has_no_limits(limits: EngineLimits) -> None:
    reader = LimitsReader(limits.ledger)
    acme = Quota(tenant="acme", weight=7, gpu=GpuQuota(share=0.5))
    limits.set_quotas({"acme": acme, "globex": Quota(tenant="globex")})
    assert dict(reader.news())[3] == TenantLimits(weight=7, share=0.5)
    assert (limits.row("acme"), limits.row("globex"), limits.row("nobody")) == (3, 4, 0)
    limits.set_quotas({"acme": acme})
    assert dict(reader.news()) == {4: None}
    assert limits.row("globex") == 0


def test_steps_are_those_that_the_scheduler_has_written(limits: EngineLimits) -> None:
    assert limits.steps(10.0) is None
    scheduler = Ledger(os.dup(limits.ledger.fd))
    scheduler.clear_statistics()
    assert limits.steps(10.0) is None, "a new scheduler has given no sign of life"
    for step_s in (0.001,) * 60 + (0.005,) * 39 + (0.1,):
        scheduler.count_step(step_s)
    scheduler.set_engine(EngineRecord(beat_s=9.5, steps=100, step_s=0.5))
    scheduler.close()
    steps = limits.steps(10.0)
    assert steps is not None
    assert (steps.beat_age_s, steps.count, steps.total_s) == (0.5, 100, 0.5)
    assert steps.within_s(0.5) == 0.001024
    assert steps.within_s(0.99) == 0.008192
    assert steps.within_s(1.0) == pytest.approx(0.131072)
