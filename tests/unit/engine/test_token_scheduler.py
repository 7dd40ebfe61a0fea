"""The policy with a ledger: what is written there counts in the next step, and what it counts is written there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.workloads import settings

from seedance.engine.ledger import Ledger
from seedance.engine.request import NOT_URGENT, Urgency
from seedance.engine.scheduling import Step, TenantLimits, TenantStatistics
from seedance.engine.token_scheduler import TokenScheduler
from seedance.errors import EngineError

STEP_S = 0.01
KV_BLOCKS = 1_000


class Engine:
    """An engine that obeys, on a ledger that a test writes."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.now_s = 100.0
        self.scheduler = TokenScheduler(settings(slots=8, kv_blocks=KV_BLOCKS), ledger, self.now_s)
        self.unread: dict[str, int] = {}
        self.running: set[str] = set()
        self.left_out: set[str] = set()

    def submit(self, key: str, row: int, stream: int, prompt_tokens: int = 10, urgency: Urgency = NOT_URGENT) -> None:
        self.scheduler.submitted(key, row, stream, prompt_tokens, 1_000, self.now_s, urgency)
        self.unread[key] = prompt_tokens

    def step(self) -> tuple[Step, dict[str, int]]:
        step = self.scheduler.step_begins(self.now_s, KV_BLOCKS, 8 - len(self.running))
        self.left_out = (self.left_out | set(step.hold)) - set(step.release)
        scheduled = {key: 1 for key in self.running - self.left_out if not self.unread[key]} | step.prefill
        for key, tokens in step.prefill.items():
            self.unread[key] -= tokens
        self.running |= scheduled.keys()
        self.scheduler.step_scheduled(scheduled, self.now_s)
        self.now_s += STEP_S
        self.scheduler.step_ended(self.now_s)
        return step, scheduled

    def finish(self, key: str) -> None:
        self.running.discard(key)
        self.scheduler.finished(key, self.now_s)

    def told(self, row: int) -> TenantStatistics:
        self.scheduler.tell(self.now_s)
        statistics = self.ledger.statistics(row)
        assert statistics is not None
        return statistics


@pytest.fixture
def engine() -> Iterator[Engine]:
    ledger = Ledger.create()
    yield Engine(ledger)
    ledger.close()


def limit(engine: Engine, row: int, limits: TenantLimits | None) -> None:
    engine.ledger.set_limits(row, limits)
    engine.ledger.limits_changed()


def test_limits_count_from_the_next_step_on(engine: Engine) -> None:
    engine.submit("a", 1, 1)
    for _ in range(10):
        engine.step()
    limit(engine, 1, TenantLimits(share=0.1))
    steps = [engine.step()[1] for _ in range(100)]
    assert 5 <= sum("a" in scheduled for scheduled in steps) <= 20
    limit(engine, 1, TenantLimits())
    assert all("a" in engine.step()[1] for _ in range(10))


def test_limits_of_before_count_for_a_new_scheduler(engine: Engine) -> None:
    limit(engine, 1, TenantLimits(kv_share=0.01))
    again = Engine(engine.ledger)
    with pytest.raises(EngineError, match="cannot take the request"):
        again.submit("a", 1, 1, prompt_tokens=500)


def test_a_pause_flag_counts_in_the_next_step(engine: Engine) -> None:
    engine.submit("a", 1, 1)
    engine.submit("b", 1, 2)
    engine.step()
    engine.ledger.set_paused(1, True)
    assert [set(engine.step()[1]) for _ in range(3)] == [{"b"}] * 3
    engine.ledger.set_paused(1, False)
    assert set(engine.step()[1]) == {"a", "b"}


def test_a_request_that_comes_paused_waits(engine: Engine) -> None:
    engine.ledger.set_paused(7, True)
    engine.submit("a", 1, 7)
    assert engine.step()[1] == {}
    assert engine.scheduler.wake_at(engine.now_s) is None
    engine.ledger.set_paused(7, False)
    assert engine.scheduler.wake_at(engine.now_s) == engine.now_s
    assert engine.step()[1] == {"a": 10}


def test_how_urgent_a_request_is_reaches_the_policy(engine: Engine) -> None:
    limit(engine, 1, TenantLimits(weight=1.0))
    limit(engine, 2, TenantLimits(weight=4.0))
    for stream in range(8):
        engine.submit(f"low {stream}", 1, stream)
    engine.step()
    engine.submit("at leisure", 2, 8)
    assert engine.step()[0].preempt == []
    engine.submit("soon", 2, 9, urgency=Urgency(engine.now_s + 0.01, 60.0, 60.0))
    step, _ = engine.step()
    assert (step.preempt, step.admit) == ([], [])
    engine.finish("low 0")
    assert engine.step()[0].admit == ["soon"]


def test_statistics_and_steps_are_told(engine: Engine) -> None:
    engine.submit("a", 3, 1)
    for _ in range(20):
        engine.step()
    engine.finish("a")
    engine.step()
    told = engine.told(3)
    assert (told.prompt_tokens, told.output_tokens, told.running) == (10, 20, 0)
    assert told.step_s == pytest.approx(20 * STEP_S)
    record = engine.ledger.engine()
    assert record is not None
    assert record.steps == 20
    assert record.beat_s == pytest.approx(engine.now_s)
    assert record.step_s == pytest.approx(20 * STEP_S)
    assert sum(engine.ledger.histogram()) == 20


def test_steps_tell_by_themselves_and_rest_tells_what_is_left(engine: Engine) -> None:
    engine.submit("a", 3, 1)
    for _ in range(15):
        engine.step()
    beat_s = engine.now_s
    assert engine.ledger.statistics(3) is not None
    while (record := engine.ledger.engine()) is None or record.beat_s < beat_s:
        engine.step()
    assert engine.now_s - beat_s < 0.15, "a sign of life comes more often than statistics"
    left_s = engine.scheduler.rest(engine.now_s)
    assert 0 < left_s < 0.5
    assert engine.scheduler.rest(engine.now_s + left_s) == 1.0
    assert engine.ledger.statistics(3) == engine.told(3)


def test_a_tenant_that_goes_is_forgotten_once_it_has_no_requests(engine: Engine) -> None:
    limit(engine, 1, TenantLimits(share=0.5))
    engine.submit("a", 1, 1)
    engine.step()
    limit(engine, 1, None)
    engine.step()
    assert engine.told(1).running == 1
    engine.finish("a")
    engine.step()
    engine.scheduler.tell(engine.now_s)
    assert engine.scheduler.policy.statistics(engine.now_s) == {}
    limit(engine, 1, TenantLimits())
    engine.submit("b", 1, 1)
    assert engine.told(1).output_tokens == 0
