"""What the scheduling policy promises, under any course of events: an engine made of dictionaries obeys it.

The engine here schedules exactly what it is told to; it has a true count of KV blocks and of what each request has
computed, which the policy must agree with. Steps may overlap by one, as with asynchronous scheduling.
"""

from __future__ import annotations

import copy
from collections import deque

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.workloads import PRICES

from seedance.engine.cost import WARM_UP_STEPS, CostModel, StepLoad
from seedance.engine.policy import Policy
from seedance.engine.scheduling import PolicySettings, Step, TenantLimits
from seedance.engine.states import MAX_PREEMPTIONS, Phase, Tenant
from seedance.errors import EngineError

TENANTS = (1, 2, 3, 4)
SLOTS, KV_BLOCKS, BLOCK_TOKENS, STEP_TOKENS = 6, 18, 4, 32

limits = st.builds(
    TenantLimits,
    weight=st.sampled_from([1.0, 2.0, 4.0]),
    priority=st.sampled_from([0, 0, 0, 0, 1, 2]),
    share=st.sampled_from([None, None, 0.1, 0.5, 1.0]),
    kv_share=st.sampled_from([None, None, 0.3, 0.8]),
    tokens_per_s=st.sampled_from([None, None, None, 50.0, 500.0]),
)
tenants = st.sampled_from(TENANTS)


class Stream:
    """A request as the engine sees it."""

    def __init__(self, tenant: int, prompt_tokens: int, output_tokens: int) -> None:
        self.tenant = tenant
        self.target = prompt_tokens
        self.left = output_tokens
        self.computed = 0
        self.blocks = 0
        self.is_running = False
        self.is_held = False
        self.is_paused = False
        self.preemptions = 0
        self.in_flight = 0


class Account:
    """What a hard rate has let through: how far charges got ahead of it.

    `backlog` is the most by which charges exceeded rate x time in any interval that ends at the last charge.
    """

    def __init__(self, rate: float, now_s: float) -> None:
        self.rate = rate
        self.at_s = now_s
        self.backlog = 0.0

    def charge(self, amount: float, now_s: float) -> float:
        """Return the most that was charged beyond the rate in any interval that ends now."""
        self.backlog = max(0.0, self.backlog - self.rate * (now_s - self.at_s)) + amount
        self.at_s = now_s
        return self.backlog


def looked_at(tenant: Tenant) -> Tenant:
    """Return a tenant as it is once settled, and leave the policy's own as far behind as it is."""
    copied = copy.copy(tenant)
    copied.decodes = copy.copy(tenant.decodes)
    copied.settle()
    return copied


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.settings = PolicySettings(
            slots=SLOTS, kv_blocks=KV_BLOCKS, block_tokens=BLOCK_TOKENS, step_tokens=STEP_TOKENS, reserved_slots=1
        )
        cost = CostModel(PRICES)
        for context_tokens in range(WARM_UP_STEPS + 1):  # only then are steps steady
            load = StepLoad(1, 0, 1, context_tokens)
            cost.observe(load, PRICES.cost_s(load))
        self.policy = Policy(self.settings, self.now_s, cost)
        self.streams: dict[int, Stream] = {}
        self.rows: dict[int, int] = {}
        self.paid_s: dict[int, float] = {}
        self.keys = 0
        self.in_flight: deque[tuple[dict[int, int], float]] = deque()
        self.limits: dict[int, TenantLimits] = {}
        self.accounts: dict[int, Account] = {}
        self.paces: dict[int, Account] = {}
        self.tokens_left: dict[int, int | None] = {}
        self.empty: set[int] = set()
        self.largest_s = 0.0
        self.outputs = 0
        self.ended = 0

    @initialize(given=st.lists(limits, min_size=4, max_size=4))
    def start(self, given: list[TenantLimits]) -> None:
        for tenant, limit in zip(TENANTS, given, strict=True):
            self.set_limits(tenant, limit)

    def set_limits(self, tenant: int, limit: TenantLimits) -> None:
        self.limits[tenant] = limit
        self.policy.set_tenant(tenant, limit, self.now_s)
        self.accounts.pop(tenant, None)
        self.paid_s.pop(tenant, None)
        self.paces.pop(tenant, None)
        if limit.tokens_per_s is not None:
            self.paces[tenant] = Account(limit.tokens_per_s, self.now_s)
        if limit.share is not None and limit.share < 1:
            self.accounts[tenant] = Account(limit.share, self.now_s)

    @rule(
        tenant=tenants,
        prompt_tokens=st.integers(1, 24),
        output_tokens=st.integers(1, 44),
        priority=st.sampled_from([0, 0, 0, 1]),
        deadline_s=st.sampled_from([None, None, 0.01, 5.0]),
        rtt_s=st.sampled_from([0.0, 0.1, 60.0]),
    )
    def submit(
        self,
        tenant: int,
        prompt_tokens: int,
        output_tokens: int,
        priority: int,
        deadline_s: float | None,
        rtt_s: float,
    ) -> None:
        if len(self.streams) >= 12:
            return
        self.keys += 1
        stream = Stream(tenant, prompt_tokens, output_tokens)
        deadline = None if deadline_s is None else self.now_s + deadline_s
        try:
            self.policy.submitted(
                self.keys,
                tenant,
                prompt_tokens,
                output_tokens,
                self.now_s,
                priority=priority,
                deadline_s=deadline,
                rtt_s=rtt_s,
                rtt_variance_s=rtt_s / 2,
            )
        except EngineError:
            kv_share = self.limits[tenant].kv_share
            assert kv_share is not None
            assert -(-(prompt_tokens + 1) // BLOCK_TOKENS) > int(KV_BLOCKS * kv_share)
            return
        self.streams[self.keys] = stream
        self.rows[self.keys] = tenant

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.forget(data.draw(st.sampled_from(sorted(self.streams))))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.streams)))
        self.streams[key].is_paused = True
        self.policy.paused(key, self.now_s)

    @precondition(lambda self: any(stream.is_paused for stream in self.streams.values()))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for key, s in self.streams.items() if s.is_paused)))
        self.streams[key].is_paused = False
        self.policy.resumed(key)

    @rule(tenant=tenants, limit=limits)
    def change_limits(self, tenant: int, limit: TenantLimits) -> None:
        self.set_limits(tenant, limit)

    @rule()
    def lift_all_limits(self) -> None:
        """Let steps be steady: while anybody who decodes has a limit, none is."""
        for tenant in TENANTS:
            self.set_limits(tenant, TenantLimits())
            self.set_tokens_left(tenant, None)

    @rule(tenant=tenants, tokens=st.sampled_from([None, 0, 1, 7, 50]))
    def set_tokens_left(self, tenant: int, tokens: int | None) -> None:
        self.tokens_left[tenant] = tokens
        self.policy.set_tokens_left(tenant, tokens, self.now_s)

    @rule(passed_s=st.sampled_from([0.0, 0.001, 0.05, 0.7, 20.0]))
    def wait(self, passed_s: float) -> None:
        if not self.in_flight:
            self.now_s += passed_s

    @rule()
    def look(self) -> None:
        for row, entry in self.policy.statistics(self.now_s).items():
            assert entry.kv_blocks == sum(s.blocks for s in self.streams.values() if s.tenant == row)

    @rule(count=st.integers(1, 40))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @rule(count=st.integers(1, 40))
    def overlapping_steps(self, count: int) -> None:
        for _ in range(count):
            self.begin_step()
            while len(self.in_flight) > 1:
                self.end_step()

    # -- the engine ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.begin_step()
        while self.in_flight:
            self.end_step()

    def free_blocks(self) -> int:
        return KV_BLOCKS - sum(stream.blocks for stream in self.streams.values())

    def free_slots(self) -> int:
        return SLOTS - sum(stream.is_running for stream in self.streams.values())

    def begin_step(self) -> None:
        self.empty = {tenant for tenant, left in self.tokens_left.items() if left is not None and left <= 0}
        step = self.policy.step_begins(self.now_s, self.free_blocks(), self.free_slots())
        self.obey(step)
        scheduled: dict[int, int] = {}
        load = StepLoad()
        for key, stream in self.streams.items():
            if not stream.is_running or stream.is_held or stream.computed < stream.target:
                continue
            # A request whose last token is under way is known to end, and is not scheduled again.
            if stream.in_flight < stream.left:
                scheduled[key] = 1
                load.decodes += 1
                load.requests += 1
                load.context_tokens += stream.computed
        for key, most in step.prefill.items():
            stream = self.streams[key]
            assert not stream.is_paused
            assert not stream.is_held
            tokens = min(most, stream.target - stream.computed)
            assert tokens > 0
            scheduled[key] = tokens
            load.add_prefill(tokens, stream.computed)
            stream.is_running = True
        assert sum(scheduled.values()) <= STEP_TOKENS
        for key, tokens in scheduled.items():
            stream = self.streams[key]
            stream.computed += tokens
            stream.blocks = -(-stream.computed // BLOCK_TOKENS)
            if stream.computed >= stream.target:
                stream.in_flight += 1
                self.count_output(stream.tenant)
        assert self.free_blocks() >= 0, "a request was scheduled without a KV block"
        assert self.free_slots() >= 0
        self.policy.step_scheduled(scheduled, self.now_s)
        self.in_flight.append((scheduled, PRICES.cost_s(load)))

    def count_output(self, tenant: int) -> None:
        self.outputs += 1
        left = self.tokens_left.get(tenant)
        if left is not None:
            assert tenant not in self.empty, "a tenant got a token after its last one"
            self.tokens_left[tenant] = left - 1
        pace = self.paces.get(tenant)
        if pace is not None:
            # A bucket's burst, and what two overlapping steps can put out.
            assert pace.charge(1.0, self.now_s) <= max(1.0, pace.rate * self.settings.burst_s) + 2 * SLOTS + 1e-6

    def obey(self, step: Step) -> None:
        for key in step.preempt:
            stream = self.streams[key]
            assert stream.is_running
            if stream.computed >= stream.target:
                stream.target = stream.computed + 1
            stream.computed = stream.blocks = 0
            stream.is_running = stream.is_held = False
            stream.preemptions += 1
            assert stream.preemptions <= MAX_PREEMPTIONS
        for key in step.end:
            stream = self.streams.pop(key)
            assert self.limits[stream.tenant].kv_share is not None or stream.tenant in self.empty
            assert stream.tenant not in self.empty or not stream.in_flight
            self.ended += 1
        for key in step.hold:
            self.streams[key].is_held = True
        for key in step.release:
            self.streams[key].is_held = False
        for key in step.admit:
            assert not self.streams[key].is_running
            assert key in step.prefill

    def end_step(self) -> None:
        scheduled, step_s = self.in_flight.popleft()
        self.now_s += step_s
        tenants = self.policy._roster.tenants
        before_s = {row: looked_at(tenant).step_s for row, tenant in tenants.items()}
        self.policy.step_ended(self.now_s)
        served = {self.rows[key] for key in scheduled}
        for row, tenant in tenants.items():
            self.check_share(row, looked_at(tenant).step_s - before_s[row], is_served=row in served)
        for key in scheduled:
            stream = self.streams.get(key)
            if stream is not None and stream.in_flight > 0:
                stream.in_flight -= 1
                stream.left -= 1
                if stream.left <= 0:
                    self.forget(key)

    def check_share(self, row: int, charge_s: float, *, is_served: bool) -> None:
        self.largest_s = max(self.largest_s, charge_s)
        account = self.accounts.get(row)
        if account is not None:
            ahead_s = account.charge(charge_s, self.now_s)
            burst_s = self.settings.burst_s * account.rate
            if not is_served:
                # Somebody reads anew whose slot it took; that comes when it comes, and is owed.
                self.paid_s[row] = self.paid_s.get(row, 0.0) + charge_s
            # Beside the burst there may be what two overlapping steps cost.
            assert ahead_s <= burst_s + 2 * self.largest_s + self.paid_s.get(row, 0.0) + 1e-9

    def forget(self, key: int) -> None:
        del self.streams[key]
        self.policy.finished(key, self.now_s)

    # -- what holds ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_policy_knows_every_request(self) -> None:
        roster = self.policy._roster
        assert set(roster.requests) == set(self.streams)
        for key, stream in self.streams.items():
            request = roster.requests[key]
            assert (request.phase is not Phase.WAITING) == stream.is_running
            assert request.is_paused == stream.is_paused
            assert request.position == stream.computed
        for row, tenant in roster.tenants.items():
            own = [stream for stream in self.streams.values() if stream.tenant == row]
            assert tenant.blocks == sum(stream.blocks for stream in own)
            assert tenant.queued + tenant.paused_waiting == sum(not stream.is_running for stream in own)
            assert len(tenant.running) == sum(stream.is_running for stream in own)
            if tenant.kv_blocks is not None and self.limits[row].kv_share is not None and not self.in_flight:
                waiting = [r for _, ticket, r in tenant.queue._by_order.entries if ticket == r.ticket]
                assert len(waiting) == tenant.queued

    @invariant()
    def who_is_left_out_is_held_or_paused(self) -> None:
        for key, request in self.policy._roster.decoders.items():
            assert not request.is_paused
            assert not request.tenant.is_held
            assert self.streams[key].is_running

    def teardown(self) -> None:
        """Let everybody go on: each request ends, within a bound of steps."""
        while self.in_flight:
            self.end_step()
        for tenant in TENANTS:
            self.set_tokens_left(tenant, None)
        for key, stream in list(self.streams.items()):
            if stream.is_paused:
                stream.is_paused = False
                self.policy.resumed(key)
        # Each admission needs at most one read of 24 + 44 tokens, 16 a step, and a step for each token out, for each
        # of its admissions; a held tenant waits for its credit beside that.
        rounds = sum(stream.left + 6 for stream in self.streams.values()) * (1 + MAX_PREEMPTIONS)
        for _ in range(rounds):
            if not self.streams:
                break
            due_s = self.policy.wake_at(self.now_s)
            assert due_s is not None, "requests wait, and no step is due"
            assert due_s - self.now_s <= self.settings.max_hold_s + 1
            self.now_s = max(self.now_s, due_s)
            self.step()
        assert not self.streams
        roster = self.policy._roster
        assert not roster.decoders
        assert not roster.prefilling
        assert not roster.counters.waiting
        assert (roster.active, roster.active_weight) == ({}, 0.0)
        assert all(tenant.blocks == tenant.decodes.size == tenant.queued == 0 for tenant in roster.tenants.values())


TestEngine = pytest.mark.property(EngineMachine.TestCase)
TestEngine.settings = hypothesis_settings(max_examples=40, stateful_step_count=40, deadline=None)
