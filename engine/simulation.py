"""A scheduling policy on a simulated engine: what would these limits do to this trace?

Time is virtual: a step takes what the prices of the simulated engine say, and waiting takes nothing. The policy is the
one that real engines run, with its own cost model that learns from the simulated steps. The engine is vLLM's in
outline: slots, KV blocks given out as tokens come, prompts read in chunks beside decoding, preemption by recomputing.
It caches no prefixes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import msgspec

from seedance.engine.cost import Prices, StepLoad
from seedance.engine.engine_queue import EngineQueue
from seedance.engine.scheduling import PolicySettings, Step, TenantLimits, TenantStatistics
from seedance.engine.simulation_report import Durations, Report, TenantReport
from seedance.engine.states import Key
from seedance.engine.trace import Arrival
from seedance.errors import EngineError


class Scheduler(Protocol):
    """What a simulation needs of a policy; see `engine.policy.Policy`."""

    def set_tenant(self, row: int, limits: TenantLimits, now_s: float) -> None: ...

    def set_tokens_left(self, row: int, tokens: int | None, now_s: float) -> None: ...

    def submitted(
        self,
        key: Key,
        row: int,
        prompt_tokens: int,
        max_tokens: int,
        now_s: float,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        rtt_s: float = 0.0,
        rtt_variance_s: float = 0.0,
    ) -> None: ...

    def finished(self, key: Key, now_s: float) -> None: ...

    def paused(self, key: Key, now_s: float) -> None: ...

    def resumed(self, key: Key) -> None: ...

    def step_begins(self, now_s: float, kv_free_blocks: int, slots_free: int) -> Step: ...

    def step_scheduled(self, scheduled: Mapping[Key, int], now_s: float) -> None: ...

    def step_ended(self, now_s: float) -> None: ...

    def wake_at(self, now_s: float) -> float | None: ...

    def statistics(self, now_s: float) -> dict[int, TenantStatistics]: ...


class Limiter(Protocol):
    """What a tenant's door asks before and while a request runs; see `qos.limiter.TenantLimiter`."""

    def admit(self, now: float, streams: int = 1) -> object | None: ...

    def charge(self, now: float, output_tokens: int = 0, *, prompt_tokens: int = 0) -> bool: ...

    def remaining(self, now: float) -> int | None: ...

    def stream_ended(self) -> None: ...


class SimulatedTenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant of a simulation: its limits in the engine, at the door, and on requests that wait at once."""

    limits: TenantLimits = TenantLimits()
    limiter: Limiter | None = None
    queue: int | None = None


class _Tenant:
    """What the simulation keeps of a tenant."""

    def __init__(self, row: int, settings: SimulatedTenant) -> None:
        self.row = row
        self.limiter = settings.limiter
        self.queue = settings.queue
        self.waiting = 0
        self.arrived = 0
        self.refused = 0
        self.finished = 0
        self.quota_exceeded = 0
        self.first_token = Durations()
        self.between_tokens = Durations()
        self.fresh = 0
        self.blocks = 0
        self.most_blocks = 0


class _Request:
    """A request inside the simulated engine."""

    __slots__ = ("blocks", "computed", "is_held", "key", "last_s", "left", "submitted_s", "target", "tenant")

    def __init__(self, key: int, tenant: _Tenant, arrival: Arrival) -> None:
        self.key = key
        self.tenant = tenant
        self.submitted_s = arrival.at_s
        self.last_s = math.nan
        self.left = min(arrival.output_tokens, arrival.max_tokens or arrival.output_tokens)
        self.target = arrival.prompt_tokens
        self.computed = 0
        self.blocks = 0
        self.is_held = False


class Simulation:
    """One run of a trace through a policy.

    Tenants that `tenants` does not know have no limits. `queue` bounds the requests of all tenants that wait for their
    first token, 0 for no bound (see `engine.engine_queue`). `next_arrival(tenant, now_s)`, if given, is asked whenever
    a request has ended and may return one that comes in its place: that makes a closed loop of clients.
    `slowdown(step number)` multiplies step times, 1.0 for none.
    """

    def __init__(
        self,
        policy: Scheduler,
        settings: PolicySettings,
        prices: Prices,
        tenants: Mapping[str, SimulatedTenant] | None = None,
        *,
        queue: int = 0,
        next_arrival: Callable[[str, float], Arrival | None] | None = None,
        slowdown: Callable[[int], float] | None = None,
    ) -> None:
        self.policy = policy
        self.now_s = 0.0
        self._settings = settings
        self._prices = prices
        self._tenants: dict[str, _Tenant] = {}
        self._names: list[str] = []
        self._known = tenants or {}
        self._queue = EngineQueue(queue)
        self._next_arrival = next_arrival
        self._slowdown = slowdown
        self._keys = itertools.count(1)
        self._requests: dict[Key, _Request] = {}
        self._running: dict[Key, _Request] = {}
        self._decoding: dict[Key, _Request] = {}
        self._replies: list[Arrival] = []
        self._kv_free_blocks = settings.kv_blocks
        self._busy_s = 0.0
        self._steps = 0
        self._tokens = 0
        for name in self._known:
            self._tenant(name)

    def run(self, arrivals: Iterable[Arrival], until_s: float = math.inf) -> Report:
        """Run until every request has ended, or to a time."""
        coming = iter(arrivals)
        following = next(coming, None)
        while self.now_s < until_s:
            following = self._arrive(coming, following, self.now_s)
            due_s = self.policy.wake_at(self.now_s)
            if due_s is not None and due_s <= self.now_s:
                ends_s = self._schedule()
                following = self._arrive(coming, following, ends_s)
                self._end_step(ends_s)
                continue
            times = [] if due_s is None else [due_s]
            if following is not None:
                times.append(following.at_s)
            if not times:
                break
            self.now_s = max(self.now_s, min(times))
        return self._report(min(self.now_s, until_s))

    # -- arrivals -----------------------------------------------------------------------------------------------------

    def _arrive(self, coming: Iterator[Arrival], following: Arrival | None, until_s: float) -> Arrival | None:
        while following is not None and following.at_s <= until_s:
            self._submit(following)
            following = next(coming, None)
        return following

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            settings = self._known.get(name, SimulatedTenant())
            tenant = self._tenants[name] = _Tenant(len(self._tenants) + 1, settings)
            self._names.append(name)
            self.policy.set_tenant(tenant.row, settings.limits, self.now_s)
        return tenant

    def _submit(self, arrival: Arrival) -> None:
        tenant = self._tenant(arrival.tenant)
        now_s = max(arrival.at_s, self.now_s)
        tenant.arrived += 1
        is_full = tenant.queue is not None and tenant.waiting >= tenant.queue
        if is_full or not self._queue.may_join(arrival.tenant):
            tenant.refused += 1
            return
        limiter = tenant.limiter
        if limiter is not None and limiter.admit(now_s) is not None:
            tenant.refused += 1
            return
        request = _Request(next(self._keys), tenant, arrival)
        try:
            self.policy.submitted(
                request.key,
                tenant.row,
                arrival.prompt_tokens,
                arrival.max_tokens or arrival.output_tokens,
                now_s,
                priority=arrival.priority,
                deadline_s=None if arrival.deadline_s is None else now_s + arrival.deadline_s,
                rtt_s=arrival.rtt_s,
                rtt_variance_s=arrival.rtt_variance_s,
            )
        except EngineError:
            tenant.refused += 1
            if limiter is not None:
                limiter.stream_ended()
            return
        tenant.waiting += 1
        self._queue.joined(request.key, arrival.tenant)
        self._requests[request.key] = request
        if limiter is not None:
            limiter.charge(now_s, prompt_tokens=arrival.prompt_tokens)
            self.policy.set_tokens_left(tenant.row, limiter.remaining(now_s), now_s)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _schedule(self) -> float:
        """Begin a step; returns when it ends."""
        policy = self.policy
        step = policy.step_begins(self.now_s, self._kv_free_blocks, self._settings.slots - len(self._running))
        for key in step.preempt:
            self._preempt(self._running[key])
        for key in step.end:
            self._requests[key].tenant.quota_exceeded += 1
            self._leave(self._requests[key])
        for key in step.hold:
            self._requests[key].is_held = True
            self._decoding.pop(key, None)
        for key in step.release:
            request = self._requests[key]
            request.is_held = False
            if request.computed >= request.target:
                self._decoding[key] = request
        scheduled: dict[Key, int] = {}
        load = StepLoad()
        self._schedule_decodes(scheduled, load)
        self._schedule_reads(step, scheduled, load)
        policy.step_scheduled(scheduled, self.now_s)
        self._scheduled = scheduled
        self._steps += 1
        step_s = self._prices.cost_s(load)
        if self._slowdown is not None:
            step_s *= self._slowdown(self._steps)
        self._busy_s += step_s
        return self.now_s + step_s

    def _schedule_decodes(self, scheduled: dict[Key, int], load: StepLoad) -> None:
        block_tokens = self._settings.block_tokens
        context_tokens = 0
        for key, request in self._decoding.items():
            if not request.computed % block_tokens and not self._grow(request, 1):
                continue
            scheduled[key] = 1
            context_tokens += request.computed
        load.requests = load.decodes = len(scheduled)
        load.context_tokens = context_tokens

    def _schedule_reads(self, step: Step, scheduled: dict[Key, int], load: StepLoad) -> None:
        budget = self._settings.step_tokens - len(scheduled)
        for key, most in step.prefill.items():
            request = self._requests[key]
            tokens = min(most, budget, request.target - request.computed)
            if tokens <= 0 or (key not in self._running and len(self._running) >= self._settings.slots):
                continue
            wanted = -(-(request.computed + tokens) // self._settings.block_tokens) - request.blocks
            if not self._grow(request, wanted):
                continue
            if key not in self._running:
                self._running[key] = request
                request.tenant.waiting -= 1
            budget -= tokens
            scheduled[key] = tokens
            load.add_prefill(tokens, request.computed)

    def _end_step(self, now_s: float) -> None:
        before_s, self.now_s = self.now_s, now_s
        self.policy.step_ended(now_s)
        ended: list[_Request] = []
        touched: dict[_Tenant, int] = {}
        for key, tokens in self._scheduled.items():
            request = self._requests[key]
            is_reading = request.computed < request.target
            request.computed += tokens
            if is_reading and request.computed < request.target:
                continue
            tenant = request.tenant
            touched[tenant] = touched.get(tenant, 0) + 1
            request.left -= 1
            if request.last_s == before_s:
                tenant.fresh += 1
            elif request.last_s != request.last_s:
                tenant.first_token.add(now_s - request.submitted_s)
                self._queue.left([key])
            else:
                tenant.between_tokens.add(now_s - request.last_s)
            request.last_s = now_s
            if request.left <= 0:
                ended.append(request)
            elif is_reading and not request.is_held:
                self._decoding[key] = request
        for tenant, tokens in touched.items():
            self._count(tenant, tokens, now_s - before_s)
        for request in ended:
            request.tenant.finished += 1
            self._leave(request)
            self.policy.finished(request.key, now_s)

    def _count(self, tenant: _Tenant, tokens: int, step_s: float) -> None:
        self._tokens += tokens
        tenant.between_tokens.add(step_s, tenant.fresh)
        tenant.fresh = 0
        tenant.most_blocks = max(tenant.most_blocks, tenant.blocks)
        if tenant.limiter is not None:
            tenant.limiter.charge(self.now_s, tokens)
            self.policy.set_tokens_left(tenant.row, tenant.limiter.remaining(self.now_s), self.now_s)

    def _grow(self, request: _Request, blocks: int) -> bool:
        if blocks > self._kv_free_blocks:
            return False
        self._kv_free_blocks -= blocks
        request.blocks += blocks
        request.tenant.blocks += blocks
        return True

    def _release_blocks(self, request: _Request) -> None:
        self._running.pop(request.key, None)
        self._decoding.pop(request.key, None)
        self._kv_free_blocks += request.blocks
        request.tenant.blocks -= request.blocks
        request.blocks = 0

    def _preempt(self, request: _Request) -> None:
        self._release_blocks(request)
        if request.computed >= request.target:
            request.target = request.computed + 1
        request.computed = 0
        request.is_held = False
        request.tenant.waiting += 1

    def _leave(self, request: _Request) -> None:
        tenant = request.tenant
        if request.key not in self._running:
            tenant.waiting -= 1
        self._release_blocks(request)
        self._queue.left([request.key])
        del self._requests[request.key]
        if tenant.limiter is not None:
            tenant.limiter.stream_ended()
        if self._next_arrival is not None:
            reply = self._next_arrival(self._names[tenant.row - 1], self.now_s)
            if reply is not None:
                self._submit(reply)

    def _report(self, end_s: float) -> Report:
        statistics = self.policy.statistics(self.now_s)
        charged_s = sum(entry.step_s for entry in statistics.values())
        tenants = {}
        for name, tenant in self._tenants.items():
            entry = statistics[tenant.row]
            tenants[name] = TenantReport(
                requests=tenant.arrived,
                finished=tenant.finished,
                refused=tenant.refused,
                quota_exceeded=tenant.quota_exceeded,
                unfinished=tenant.arrived - tenant.finished - tenant.refused - tenant.quota_exceeded,
                prompt_tokens=entry.prompt_tokens,
                output_tokens=entry.output_tokens,
                share=entry.step_s / charged_s if charged_s else 0.0,
                step_s=entry.step_s,
                held_s=entry.held_s,
                queue_s=entry.queue_s / entry.started if entry.started else 0.0,
                preemptions=entry.preemptions,
                recomputed_tokens=entry.recomputed_tokens,
                kv_blocks=tenant.most_blocks,
                first_token_p50_s=tenant.first_token.quantile(0.5),
                first_token_p99_s=tenant.first_token.quantile(0.99),
                between_tokens_p50_s=tenant.between_tokens.quantile(0.5),
                between_tokens_p99_s=tenant.between_tokens.quantile(0.99),
            )
        return Report(end_s=end_s, busy_s=self._busy_s, steps=self._steps, output_tokens=self._tokens, tenants=tenants)
