"""The policy step by step; what it amounts to is in test_simulation, what it never does in the property tests."""

from __future__ import annotations

from random import Random
from typing import Final

import msgspec
import pytest
from support.workloads import PRICES, settings

from seedance.engine.admission import WindowSettings
from seedance.engine.cost import CostModel
from seedance.engine.policy import Policy
from seedance.engine.scheduling import STEADY, Step, TenantLimits, limits_of
from seedance.errors import EngineError
from seedance.qos.quota import GpuQuota, Quota, TokenQuota

pytestmark = pytest.mark.unit

KV_BLOCKS: Final = 1000


class Engine:
    """An engine that obeys: it runs the policy's steps of `step_s` each; `ahead` of them begin before one has ended."""

    def __init__(self, slots: int = 8, step_s: float = 0.01, ahead: int = 0, **more: object) -> None:
        self.policy = Policy(settings(slots=slots, kv_blocks=KV_BLOCKS, **more), 0.0, CostModel(PRICES))
        self.slots = slots
        self.step_s = step_s
        self.ahead = ahead
        self.under_way = 0
        self.now_s = 0.0
        self.running: dict[object, int] = {}
        self.left_out: set[object] = set()
        self.lengths: dict[object, int] = {}

    def submit(self, key: str, row: int, prompt_tokens: int = 10, **more: object) -> None:
        self.lengths[key] = prompt_tokens
        self.policy.submitted(key, row, prompt_tokens, 1000, self.now_s, **more)  # type: ignore[arg-type]

    def step(self, kv_free_blocks: int = KV_BLOCKS) -> tuple[Step, dict[object, int]]:
        step = self.policy.step_begins(self.now_s, kv_free_blocks, self.slots - len(self.running))
        for key in step.preempt:
            self.lengths[key] = self.running.pop(key) + 1
            self.left_out.discard(key)
        for key in step.end:
            self.running.pop(key, None)
        self.left_out |= set(step.hold)
        self.left_out -= set(step.release)
        decoding = [k for k, n in self.running.items() if n >= self.lengths[k] and k not in self.left_out]
        scheduled = dict.fromkeys(decoding, 1) | step.prefill
        for key, tokens in scheduled.items():
            self.running[key] = self.running.get(key, 0) + tokens
        self.policy.step_scheduled(scheduled, self.now_s)
        self.now_s += self.step_s
        self.under_way += 1
        self.end_steps(self.ahead)
        return step, scheduled

    def end_steps(self, ahead: int = 0) -> None:
        while self.under_way > ahead:
            self.policy.step_ended(self.now_s)
            self.under_way -= 1

    def finish(self, key: str) -> None:
        self.running.pop(key, None)
        self.policy.finished(key, self.now_s)


def test_a_request_is_read_and_decodes() -> None:
    engine = Engine()
    engine.submit("x", 1)
    assert engine.policy.wake_at(0.0) == 0.0
    step, scheduled = engine.step()
    assert (step.admit, step.prefill, scheduled) == (["x"], {"x": 10}, {"x": 10})
    step, scheduled = engine.step()
    assert (step.admit, step.prefill, scheduled) == ([], {}, {"x": 1})
    entry = engine.policy.statistics(engine.now_s)[1]
    assert (entry.prompt_tokens, entry.output_tokens, entry.running, entry.kv_blocks) == (10, 2, 1, 1)
    engine.finish("x")
    assert engine.policy.wake_at(engine.now_s) is None
    assert engine.policy.statistics(engine.now_s)[1].kv_blocks == 0


def test_a_step_is_charged_whole() -> None:
    engine = Engine()
    engine.submit("x", 1, 500)
    engine.submit("y", 2, 50)
    for _ in range(10):
        engine.step()
    entries = engine.policy.statistics(engine.now_s)
    assert entries[1].step_s + entries[2].step_s == pytest.approx(0.1)
    assert entries[1].step_s > entries[2].step_s


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_steady_steps_cost_what_each_of_them_would(seed: int, ahead: int) -> None:
    # Prices, which are found at other times, would decide when a prompt is read, and in how many parts.
    engines = [Engine(ahead=ahead, window=WindowSettings(static_batch=1)) for _ in range(2)]
    engines[1].policy._will_be_steady = lambda scheduled: False  # type: ignore[method-assign]
    source = Random(seed)
    keys = [f"request {number}" for number in range(6)]
    steady = 0
    for key in keys:
        row, prompt_tokens = source.choice([1, 2, 3]), source.randint(5, 16)
        leaves = [one for one in engines[0].running if source.random() < 0.4]
        for engine in engines:
            engine.submit(key, row, prompt_tokens)
            for one in leaves:
                engine.finish(str(one))
        for _ in range(source.randint(20, 60)):
            step_s = source.uniform(0.005, 0.02)
            for engine in engines:
                engine.step_s = step_s
                step, _ = engine.step()
                steady += step is STEADY
        if source.random() < 0.5:
            for engine in engines:
                engine.end_steps()
        for row, entry in engines[0].policy.statistics(engines[0].now_s).items():
            other = engines[1].policy.statistics(engines[1].now_s)[row]
            assert entry.step_s == pytest.approx(other.step_s, rel=0.02)
            assert msgspec.structs.replace(entry, step_s=0) == msgspec.structs.replace(other, step_s=0)
    for engine in engines:
        engine.end_steps()
    charged_s = sum(entry.step_s for entry in engines[0].policy.statistics(0.0).values())
    assert charged_s == pytest.approx(engines[0].now_s)
    assert steady > 50


def test_what_happens_ends_the_steady_steps() -> None:
    def steady() -> Engine:
        engine = Engine()
        engine.submit("x", 1)
        for _ in range(40):
            step, _ = engine.step()
        assert step is STEADY
        return engine

    engine = steady()
    engine.submit("y", 2)
    step, _ = engine.step()
    assert step.admit == ["y"]
    engine = steady()
    engine.policy.paused("x", engine.now_s)
    step, _ = engine.step()
    assert step.hold == ["x"]
    engine = steady()
    engine.policy.set_tenant(1, TenantLimits(tokens_per_s=10.0), engine.now_s)
    assert all(engine.step()[0] is not STEADY for _ in range(10))
    engine = steady()
    engine.policy.set_tokens_left(1, 0, engine.now_s)
    assert [engine.step()[0].end for _ in range(2)] == [["x"], []]
    engine = steady()
    step, _ = engine.step(kv_free_blocks=0)
    assert step is not STEADY


def test_what_the_engine_leaves_out_of_a_steady_step_takes_no_token() -> None:
    engine = Engine()
    for key in "xy":
        engine.submit(key, 1)
    for _ in range(40):
        engine.step()
    tokens = engine.policy.statistics(engine.now_s)[1].output_tokens
    assert engine.policy.step_begins(engine.now_s, KV_BLOCKS, 0) is STEADY
    engine.policy.step_scheduled({"x": 1}, engine.now_s)
    engine.policy.step_ended(engine.now_s + 0.01)
    assert engine.policy.statistics(engine.now_s)[1].output_tokens == tokens + 1


def test_cached_tokens_are_not_read() -> None:
    policy = Policy(settings(), 0.0)
    policy.submitted("x", 1, 100, 10, 0.0)
    assert policy.step_begins(0.0, 100, 8).prefill == {"x": 100}
    policy.step_scheduled({"x": 20}, 0.0, {"x": 80})
    policy.step_ended(0.01)
    entry = policy.statistics(0.01)[1]
    assert (entry.prompt_tokens, entry.cached_tokens, entry.output_tokens) == (20, 80, 1)


def test_what_a_preempted_request_finds_in_the_cache_is_no_hit() -> None:
    policy = Policy(settings(), 0.0)
    policy.submitted("x", 1, 100, 10, 0.0)
    for now_s, cached in ((0.0, 80), (0.1, 96)):
        policy.step_begins(now_s, 100, 8)
        policy.step_scheduled({"x": 100 - cached}, now_s, {"x": cached})
        policy.step_ended(now_s + 0.01)
        policy.preempted("x")
    assert policy.statistics(0.2)[1].cached_tokens == 80


def test_what_was_not_scheduled_is_planned_anew() -> None:
    policy = Policy(settings(), 0.0)
    policy.submitted("x", 1, 100, 10, 0.0)
    for now_s in (0.0, 0.1):
        assert policy.step_begins(now_s, 100, 8).admit == ["x"]
        policy.step_scheduled({}, now_s)
        policy.step_ended(now_s)
        assert policy.wake_at(now_s) is None, "it would be tried over and over"
        policy.set_tenant(2, TenantLimits(), now_s)
        assert policy.wake_at(now_s) == now_s


def test_a_tenant_out_of_credit_is_held_and_released() -> None:
    engine = Engine()
    engine.policy.set_tenant(1, TenantLimits(share=0.1), 0.0)
    engine.submit("x", 1)
    held = []
    for _ in range(4):
        step, _ = engine.step()
        held += step.hold
    assert held == ["x"]
    due_s = engine.policy.wake_at(engine.now_s)
    assert due_s is not None
    assert due_s > engine.now_s
    engine.now_s = due_s
    step, scheduled = engine.step()
    assert (step.release, scheduled) == (["x"], {"x": 1})
    assert engine.policy.statistics(engine.now_s)[1].held_s > 0


def test_a_whole_share_is_no_limit() -> None:
    engine = Engine()
    engine.policy.set_tenant(1, TenantLimits(share=1.0), 0.0)
    engine.submit("x", 1)
    assert all(not engine.step()[0].hold for _ in range(100))


def test_lifting_a_limit_releases() -> None:
    engine = Engine(step_s=1.0)
    engine.policy.set_tenant(1, TenantLimits(share=0.01), 0.0)
    engine.submit("x", 1)
    engine.step()
    assert engine.step()[0].hold == ["x"]
    engine.policy.set_tenant(1, TenantLimits(), engine.now_s)
    assert engine.step()[0].release == ["x"]


def test_a_paused_request_keeps_its_slot_and_takes_no_step() -> None:
    engine = Engine()
    for key in ("x", "y"):
        engine.submit(key, 1)
    engine.step()
    engine.policy.paused("x", engine.now_s)
    step, scheduled = engine.step()
    assert (step.hold, scheduled) == (["x"], {"y": 1})
    engine.finish("y")
    assert engine.policy.wake_at(engine.now_s) is None
    engine.policy.resumed("x")
    assert engine.policy.wake_at(engine.now_s) == engine.now_s
    step, scheduled = engine.step()
    assert (step.release, scheduled) == (["x"], {"x": 1})


def test_a_request_paused_while_it_waits_is_not_admitted() -> None:
    engine = Engine()
    engine.submit("x", 1)
    engine.policy.paused("x", 0.0)
    assert engine.policy.wake_at(0.0) is None
    assert engine.step()[0].admit == []
    engine.policy.resumed("x")
    assert engine.step()[0].admit == ["x"]


def test_used_up_tokens_end_streams_once_their_last_step_has_ended() -> None:
    policy = Policy(settings(), 0.0)
    policy.submitted("x", 1, 10, 100, 0.0)
    policy.set_tokens_left(1, 2, 0.0)
    policy.step_begins(0.0, 100, 8)
    policy.step_scheduled({"x": 10}, 0.0)
    # The second token is scheduled before the first step has ended, as asynchronous scheduling does.
    policy.step_begins(0.01, 100, 8)
    policy.step_scheduled({"x": 1}, 0.01)
    policy.step_ended(0.02)
    step = policy.step_begins(0.02, 100, 8)
    assert (step.hold, step.end) == (["x"], [])
    policy.step_scheduled({}, 0.02)
    policy.step_ended(0.03)
    assert policy.wake_at(0.03) == 0.03
    assert policy.step_begins(0.03, 100, 8).end == ["x"]
    policy.step_scheduled({}, 0.03)
    assert policy.statistics(0.03)[1].output_tokens == 2
    assert policy.statistics(0.03)[1].running == 0


def test_new_tokens_let_a_tenant_go_on() -> None:
    engine = Engine()
    engine.submit("x", 1)
    engine.policy.set_tokens_left(1, 1, 0.0)
    engine.step()
    engine.policy.set_tokens_left(1, 50, engine.now_s)
    step, scheduled = engine.step()
    assert (step.end, scheduled) == ([], {"x": 1})


def test_an_engines_own_preemption_is_taken_note_of() -> None:
    engine = Engine()
    engine.submit("x", 1)
    engine.step()
    engine.step()
    engine.policy.preempted("x")
    del engine.running["x"]
    step = engine.policy.step_begins(engine.now_s, KV_BLOCKS, 8)
    assert (step.admit, step.prefill) == (["x"], {"x": 12})
    entry = engine.policy.statistics(engine.now_s)[1]
    assert (entry.preemptions, entry.recomputed_tokens) == (1, 11)


def test_idle_blocks_are_taken_for_who_waits() -> None:
    engine = Engine(slots=1)
    engine.submit("idle", 1)
    engine.step()
    engine.policy.paused("idle", engine.now_s)
    engine.submit("next", 2)
    assert engine.step()[0].admit == []
    due_s = engine.policy.wake_at(engine.now_s)
    while due_s is not None and engine.now_s < 2:
        engine.now_s = due_s
        step, _ = engine.step()
        if step.admit:
            break
        due_s = engine.policy.wake_at(engine.now_s)
    assert (step.preempt, step.admit) == (["idle"], ["next"])
    assert engine.now_s >= 0.6


def test_nearest_deadline_within_a_tenant_goes_first() -> None:
    engine = Engine(slots=1)
    engine.submit("running", 1)
    engine.step()
    engine.submit("plain", 1)
    engine.submit("soon", 1, deadline_s=engine.now_s + 0.9)
    engine.finish("running")
    assert engine.step()[0].admit == ["soon"]


def test_a_far_client_goes_a_little_earlier() -> None:
    engine = Engine(slots=1)
    engine.submit("running", 1)
    engine.step()
    engine.submit("near", 1)
    engine.now_s += 0.02
    engine.submit("far", 1, rtt_s=0.04)
    engine.finish("running")
    assert engine.step()[0].admit == ["far"]


def test_a_jittery_client_goes_earlier_than_a_far_one() -> None:
    engine = Engine(slots=1)
    engine.submit("running", 1)
    engine.step()
    engine.submit("far", 1, rtt_s=0.03)
    engine.submit("jittery", 1, rtt_s=0.01, rtt_variance_s=0.015)
    engine.finish("running")
    assert engine.step()[0].admit == ["jittery"]


def full(engine: Engine, row: int, count: int) -> None:
    for number in range(count):
        engine.submit(f"{row}.{number}", row)
    engine.step()
    assert len(engine.running) == count


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (TenantLimits(weight=4.0), TenantLimits(weight=1.0, priority=1)),
        (TenantLimits(priority=1), TenantLimits(priority=3)),
    ],
)
def test_a_class_of_higher_priority_takes_a_slot(low: TenantLimits, high: TenantLimits) -> None:
    engine = Engine(slots=4)
    engine.policy.set_tenant(1, low, 0.0)
    engine.policy.set_tenant(2, high, 0.0)
    full(engine, 1, 4)
    engine.submit("urgent", 2)
    step, scheduled = engine.step()
    assert (len(step.preempt), step.admit, "urgent" in scheduled) == (1, ["urgent"], True)
    engine.submit("more", 1)
    assert engine.step()[0].preempt == [], "nobody yields to a lower class"


def test_a_deadline_takes_nobodys_slot() -> None:
    engine = Engine(slots=2)
    engine.policy.set_tenant(1, TenantLimits(weight=1.0), 0.0)
    engine.policy.set_tenant(2, TenantLimits(weight=4.0), 0.0)
    full(engine, 1, 2)
    engine.submit("late", 2, deadline_s=engine.now_s)
    for _ in range(20):
        step, _ = engine.step()
        assert (step.preempt, step.admit) == ([], [])
    engine.finish("1.0")
    assert engine.step()[0].admit == ["late"]


@pytest.mark.parametrize("deadline_ms", [None, 1])
def test_deadlines_do_not_touch_the_slots_kept_for_light_tenants(deadline_ms: int | None) -> None:
    engine = Engine(slots=256, reserved_slots=8)
    engine.submit("other", 2)
    for number in range(60):
        engine.submit(f"early {number}", 1)
    for _ in range(200):
        engine.step()  # the flood is not light any more
    engine.finish("other")
    for number in range(300):
        deadline_s = None if deadline_ms is None else engine.now_s + deadline_ms / 1000
        engine.submit(str(number), 1, deadline_s=deadline_s)
    for _ in range(60):
        engine.step()
    assert len(engine.running) == 248
    engine.submit("light", 2, deadline_s=engine.now_s)
    assert engine.step()[0].admit == ["light"]


def test_slots_are_kept_only_where_there_was_a_light_tenant_lately() -> None:
    engine = Engine(slots=4, reserved_slots=1, shared_for_s=0.5, window=WindowSettings(static_batch=1))
    for key, row in (("a1", 1), ("a2", 1), ("b1", 2), ("b2", 2)):
        engine.submit(key, row)
    for _ in range(300):
        engine.step()
    engine.submit("a3", 1)
    engine.finish("a1")
    engine.step()
    assert set(engine.running) == {"a2", "a3", "b1", "b2"}, "neither tenant is light, and no other was there"
    engine.submit("a4", 1)
    engine.submit("c1", 3)
    engine.finish("b1")
    engine.step()
    assert set(engine.running) == {"a2", "a3", "b2", "c1"}, "who comes with little gets the next slot"
    engine.finish("a2")
    for _ in range(10):
        engine.step()
    assert set(engine.running) == {"a3", "b2", "c1"}, "and one is kept while it is there"


def test_a_deadline_counts_behind_the_tenants_own_queue() -> None:
    engine = Engine(slots=1)
    for number in range(200):
        engine.submit(str(number), 1)
    taken: dict[str, float] = {}
    while len(taken) < 201:
        if engine.now_s >= 1.0 and "soon" not in engine.lengths:
            engine.submit("soon", 1, deadline_s=engine.now_s + 3.0)
        for key in engine.step()[0].admit:
            taken[key] = engine.now_s
        engine.now_s += 0.04
        engine.finish(list(taken)[-1])
    # As the deadline comes near, it is next; before that it goes before nobody.
    assert 3.5 < taken["soon"] <= 4.0
    assert [key for key in taken if key != "soon"] == [str(number) for number in range(200)]


@pytest.mark.parametrize("priority", [0, 1, 2, 3])
def test_no_deadline_makes_a_request_later(priority: int) -> None:
    engine = Engine(slots=1)
    engine.policy.set_tenant(1, TenantLimits(priority=priority), 0.0)
    engine.now_s = 99.0
    engine.submit("running", 1)
    engine.step()
    engine.now_s = 100.0
    engine.submit("wanted", 1, deadline_s=engine.now_s + 0.1)
    engine.now_s = 115.0
    engine.submit("plain", 1)
    engine.finish("running")
    assert engine.step()[0].admit == ["wanted"]


def test_a_priority_with_a_deadline_stands_where_it_does_without() -> None:
    policy = Policy(settings(slots=1), 0.0, CostModel(PRICES))
    for priority in range(4):
        for deadline_s in (None, 100.0, 100.1, 101.5, 200.0):
            policy.submitted((priority, deadline_s), 1, 10, 10, 100.0, priority=priority, deadline_s=deadline_s)
    requests = policy._roster.requests
    for (priority, _), request in requests.items():
        assert request.order_s <= requests[priority, None].order_s
        assert request.order_s >= requests[priority, None].order_s - 1.0


def test_what_a_victim_reads_anew_is_charged_to_who_took_its_slot() -> None:
    charged = []
    for priority in (1, 0):
        engine = Engine(slots=1)
        engine.policy.set_tenant(2, TenantLimits(priority=priority), 0.0)
        engine.submit("low", 1, 500)
        engine.step()
        engine.submit("urgent", 2)
        engine.step()
        if not priority:
            engine.policy.preempted("low")
            engine.running.pop("low")
            engine.lengths["low"] = 502
            engine.step()
        engine.finish("urgent")
        before = engine.policy.statistics(engine.now_s)
        while engine.running.get("low", 0) < engine.lengths["low"]:
            _, scheduled = engine.step()
            assert "low" in scheduled
        after = engine.policy.statistics(engine.now_s)
        charged.append([after[row].step_s - before[row].step_s for row in (1, 2)])
        assert after[1].recomputed_tokens >= 500
    assert charged[0][0] == pytest.approx(0.0, abs=1e-12)
    assert charged[0][1] == pytest.approx(charged[1][0])
    assert charged[1][1] == 0.0


def test_what_had_not_been_read_is_the_victims_own() -> None:
    engine = Engine(slots=1, step_tokens=100)
    engine.policy.set_tenant(2, TenantLimits(priority=1), 0.0)
    engine.submit("low", 1, 250)
    engine.step()
    engine.submit("urgent", 2)
    assert engine.step()[0].preempt == ["low"]
    engine.lengths["low"] = 250
    engine.finish("urgent")
    before = engine.policy.statistics(engine.now_s)
    charged = []
    for _ in range(3):
        engine.step()
        after = engine.policy.statistics(engine.now_s)
        charged.append([after[row].step_s - before[row].step_s for row in (1, 2)])
        before = after
    assert [[own_s > 0, other_s > 0] for own_s, other_s in charged] == [[False, True], [True, False], [True, False]]
    assert sum(map(sum, charged)) == pytest.approx(0.03)


def test_a_change_of_priority_counts_for_what_comes_later() -> None:
    engine = Engine(slots=1)
    full(engine, 1, 1)
    engine.submit("before", 2)
    engine.policy.set_tenant(2, TenantLimits(priority=1), engine.now_s)
    assert engine.step()[0].preempt == []
    engine.submit("after", 2)
    step, _ = engine.step()
    assert (step.preempt, step.admit) == (["1.0"], ["after"])


def test_the_bounds_of_what_fits() -> None:
    engine = Engine()
    with pytest.raises(EngineError, match="it needs 1063 KV blocks, and may have 1000"):
        engine.submit("x", 1, 16_000)
    engine.policy.set_tenant(1, TenantLimits(kv_share=0.01), 0.0)
    with pytest.raises(EngineError, match="it needs 13 KV blocks, and may have 10"):
        engine.submit("x", 1, 200)
    engine.submit("x", 1, 159)


def test_how_long_a_queue_takes_is_told_from_how_it_drains() -> None:
    engine = Engine(slots=1)
    assert engine.policy.wait_s(1, 0.0) == 0.0
    for number in range(20):
        engine.submit(str(number), 1)
    assert engine.policy.wait_s(1, 0.0) is None
    for number in range(10):
        engine.step()
        engine.finish(str(number))
        engine.now_s += 0.49
    wait_s = engine.policy.wait_s(1, engine.now_s)
    assert wait_s is not None
    assert 5.0 < wait_s < 15.0


def test_a_tenant_can_be_forgotten() -> None:
    engine = Engine()
    engine.policy.set_tenant(1, TenantLimits(kv_share=0.5, share=0.5), 0.0)
    engine.policy.remove_tenant(1)
    engine.policy.remove_tenant(7)
    assert engine.policy.statistics(0.0) == {}


def test_unknown_requests_are_ignored() -> None:
    engine = Engine()
    engine.policy.finished("x", 0.0)
    engine.policy.paused("x", 0.0)
    engine.policy.resumed("x")
    engine.policy.preempted("x")
    assert engine.policy.wake_at(0.0) is None


def test_limits_come_from_a_quota() -> None:
    quota = Quota(tenant="a", weight=400, gpu=GpuQuota(share=0.25, kv_share=0.5), tokens=TokenQuota(per_second=1500))
    assert limits_of(quota) == TenantLimits(weight=400, share=0.25, kv_share=0.5, tokens_per_s=1500)


def test_nobody_is_preempted_more_than_three_times() -> None:
    engine = Engine(slots=1)
    engine.policy.set_tenant(1, TenantLimits(weight=100), 0.0)
    engine.policy.set_tenant(2, TenantLimits(weight=400), 0.0)
    engine.submit("low", 1)
    engine.step()
    for number in range(5):
        urgent = f"urgent {number}"
        engine.submit(urgent, 2, priority=1)
        step, _ = engine.step()
        assert step.preempt == (["low"] if number < 3 else [])
        engine.finish(urgent)
        engine.step()
    assert engine.policy.statistics(engine.now_s)[1].preemptions == 3


def test_who_must_not_be_preempted_is_admitted_once_its_whole_length_fits() -> None:
    engine = Engine()
    engine.submit("x", 1, 10)  # and 1,000 tokens to come: 64 blocks
    engine.step()
    for _ in range(3):
        engine.policy.preempted("x")
        engine.running.pop("x")
        engine.step()
    engine.policy.preempted("x")
    engine.running.pop("x")
    assert engine.step(kv_free_blocks=63)[0].admit == []
    engine.policy.set_tenant(1, TenantLimits(), engine.now_s)
    assert engine.step(kv_free_blocks=64)[0].admit == ["x"]
