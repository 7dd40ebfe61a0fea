"""What each step of an engine does for whom: the scheduling policy, without an engine and without a clock.

One object serves one engine, in the process that makes its steps. Its owner reports what happens to requests
(`submitted`, `paused`, `resumed`, `preempted`, `finished`), and for each step calls, in this order:

    step_begins     what to change before the step, and what may be read in it
    step_scheduled  what the engine has put into the step
    step_ended      the step's time

Steps may overlap, as with asynchronous scheduling: the next one may begin and be scheduled before the last one has
ended; they end in the order in which they began. When nothing can be done, `wake_at` says when a step makes sense.

What holds:

* A tenant with a hard share or a token rate is left out of the steps while it has no credit (see `bucket`), even when
  the engine has nothing else to do. Others are never left out. What is read anew where it took a slot by its priority
  comes off its credit, whenever that is. A hard share is one of the slots too: else requests of
  a tenant that is mostly held would in time have them all.
* Whose requests are admitted and read next follows virtual counters (see `fairness` and `planner`).
* No request is preempted more than `states.MAX_PREEMPTIONS` times (see `preemption`).
* A tenant whose `tokens_left` are used up gets nothing more; once its last step has ended its requests end.

The work of a step is proportional to the tenants that have limits on what they use, or wait to be read, and to the
requests that change their state (see `decoding`). Most steps are *steady*: all who decode take a token, nobody waits
or has a limit, and nothing has happened since the last one. Nothing is decided in them, and what they cost is charged
for some of them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from seedance.engine.accounting import Accounts
from seedance.engine.admission import AdmissionWindow
from seedance.engine.bucket import Bucket
from seedance.engine.cost import CostModel
from seedance.engine.fairness import Usage
from seedance.engine.holding import Holding
from seedance.engine.planner import Planner
from seedance.engine.preemption import keep_kv_limits, make_room, preempt
from seedance.engine.roster import Roster
from seedance.engine.scheduling import STEADY, PolicySettings, Step, TenantLimits, TenantStatistics
from seedance.engine.states import WAITING, Key, Request, Tenant
from seedance.errors import EngineError

_IDLE_WAKE_S: Final = 0.1
_START_WINDOW_S: Final = 10.0
_SHORT_TOKENS: Final = 1_000
_NONE: Final[Mapping[Key, int]] = MappingProxyType({})


class Policy:
    """The scheduling of one engine's steps; `now_s` is in seconds of any monotonic clock and never goes back."""

    def __init__(self, settings: PolicySettings, now_s: float, cost: CostModel | None = None) -> None:
        self._settings = settings
        self.cost = cost or CostModel()
        self._roster = Roster(settings.block_tokens)
        self._usage = Usage(settings.usage_window_s, now_s)
        self._window = AdmissionWindow(settings.window, now_s)
        self._accounts = Accounts(self._roster, self.cost, self._usage, now_s)
        self._planner = Planner(settings, self._roster, self.cost, self._usage, self._window)
        self._holding = Holding(self._roster)
        self._kv_limited: dict[Tenant, None] = {}
        self._recent: dict[Tenant, float] = {}
        self._newcomers: dict[Key, Request] = {}
        self._begun_s = now_s
        self._is_stuck = False
        self.is_steady = False  # whether the coming step is, if there is memory for it

    # -- tenants ------------------------------------------------------------------------------------------------------

    def set_tenant(self, row: int, limits: TenantLimits, now_s: float) -> None:
        """Make a tenant known, or give it other limits; what it has used, owes and runs stays."""
        self._disturb()
        tenant = self._tenant(row)
        tenant.settle()
        if tenant.has_work:
            self._roster.active_weight += limits.weight - tenant.weight
            self._roster.active_changes += 1
        tenant.weight = limits.weight
        tenant.inverse_weight = 1 / limits.weight
        tenant.priority = limits.priority  # of its requests from now on
        share = None if limits.share is None or limits.share >= 1 else limits.share
        tenant.credit = self._bucket(tenant.credit, share, 0.0, now_s)
        tenant.slots = None if share is None else max(1, math.ceil(share * self._settings.slots))
        tenant.pace = self._bucket(tenant.pace, limits.tokens_per_s, 1.0, now_s)
        tenant.is_metered = tenant.pace is not None or tenant.tokens_left is not None
        self._roster.decoding.watch(tenant)
        tenant.kv_blocks = None
        self._kv_limited.pop(tenant, None)
        if limits.kv_share is not None and limits.kv_share < 1:
            tenant.kv_blocks = max(1, int(self._settings.kv_blocks * limits.kv_share))
            self._kv_limited[tenant] = None
        self._holding.plan_release(tenant, now_s)
        self._is_stuck = False

    def set_tokens_left(self, row: int, tokens: int | None, now_s: float) -> None:
        """Set how many output tokens a tenant may still get, from now on; None for any number."""
        self._disturb()
        tenant = self._tenant(row)
        tenant.tokens_left = tokens
        tenant.is_metered = tenant.pace is not None or tokens is not None
        self._roster.decoding.watch(tenant)
        if tokens is not None and tokens <= 0:
            self._holding.exhaust(tenant, now_s)
        elif tenant.is_exhausted:
            self._holding.replenish(tenant, now_s)

    def remove_tenant(self, row: int) -> bool:
        """Forget a tenant and its counters; returns False, and does nothing, while it has requests."""
        tenant = self._roster.tenants.get(row)
        if tenant is not None and not tenant.has_work:
            del self._roster.tenants[row]
            for known in (self._kv_limited, self._recent, self._holding.exhausted):
                known.pop(tenant, None)
        return row not in self._roster.tenants

    # -- requests -----------------------------------------------------------------------------------------------------

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
    ) -> None:
        """Take a new request; a tenant that nobody has set has no limits.

        `priority` counts where it is above its tenant's. `deadline_s` is when its first token should be out; as it
        comes near, the request goes before its tenant's others, and its tenant's turn is advanced a bit. Raises
        EngineError when the whole of it does not fit into the KV blocks that there are, or its prompt not into those
        that its tenant may have.
        """
        self._disturb()
        tenant = self._tenant(row)
        self._check_length(tenant, prompt_tokens, max_tokens)
        request = Request(key, tenant, prompt_tokens, max_tokens, now_s)
        request.priority = max(priority, tenant.priority)
        request.advance_s = self._advance_s(prompt_tokens + max_tokens, rtt_s, rtt_variance_s)
        request.order_s = now_s - request.advance_s - self._settings.priority_s * request.priority
        if deadline_s is not None:
            request.urgent_s = self._planner.urgent_s(prompt_tokens, deadline_s)
            request.order_s = min(request.order_s, max(now_s - self._settings.priority_s, deadline_s - 1.0))
        self._recent.pop(tenant, None)
        if not tenant.has_work:
            self._holding.work_arrived(tenant, now_s)
        self._roster.submit(request)
        if tenant.is_exhausted:
            self._holding.exhausted[tenant] = None
        self._window.request_arrived(now_s)
        self._is_stuck = False

    def finished(self, key: Key, now_s: float) -> None:
        """Forget a request that has ended, for whatever reason; an unknown one is ignored."""
        self._disturb()
        request = self._roster.finish(key)
        if request is not None:
            self._is_stuck = False
            if request.tenant not in self._roster.active:
                self._holding.work_ended(request.tenant, now_s)
                self._rest(request.tenant, now_s)

    def paused(self, key: Key, now_s: float) -> None:
        """Leave a request out until it is resumed; an unknown or paused one is ignored."""
        request = self._roster.requests.get(key)
        if request is not None and not request.is_paused:
            self._disturb()
            self._roster.pause(request, now_s)

    def resumed(self, key: Key) -> None:
        """Take a paused request in again; an unknown or running one is ignored."""
        request = self._roster.requests.get(key)
        if request is not None and request.is_paused:
            self._disturb()
            self._roster.resume(request)
            self._is_stuck = False

    def preempted(self, key: Key) -> None:
        """Note that the engine, of its own accord, took a request's slot and KV blocks."""
        request = self._roster.requests.get(key)
        if request is not None and request.phase is not WAITING:
            self._disturb()
            self._roster.preempt(request)

    # -- steps --------------------------------------------------------------------------------------------------------

    def step_begins(self, now_s: float, kv_free_blocks: int, slots_free: int) -> Step:
        """Decide the coming step; `slots_free` counts slots without a request, held requests have theirs."""
        roster = self._roster
        self._begun_s = now_s
        if self.is_steady and kv_free_blocks >= roster.decoding.size and not self._usage.is_due:
            return STEADY
        self._disturb()
        self._usage.set_time(now_s)
        if self._usage.is_due:
            self._accounts.begin_usage_anew(now_s)
        if self._holding.release_due(now_s):
            self._is_stuck = False
        step = Step([], [], [], [], [], {})
        if self._holding.exhausted:
            end, tenants = self._holding.end_exhausted(now_s)
            step.end += end
            for tenant in tenants:
                self._rest(tenant, now_s)
        if self._kv_limited:
            kv_free_blocks += keep_kv_limits(roster, self._kv_limited, step, now_s)
        is_shared = self._is_shared(now_s)
        kv_free_blocks = make_room(roster, step, kv_free_blocks, now_s)
        slots_free += len(step.preempt)
        plan = self._planner.plan(now_s, kv_free_blocks, slots_free, is_shared=is_shared)
        for victim, payer in plan.preempt.items():
            preempt(roster, victim, step, payer)
        self._newcomers = {request.key: request for request in plan.admit}
        if roster.hold:
            for key, is_left_out in roster.hold.items():
                (step.hold if is_left_out else step.release).append(key)
            roster.hold.clear()
        step.admit = list(self._newcomers)
        step.prefill = plan.prefill
        return step

    def step_scheduled(self, scheduled: Mapping[Key, int], now_s: float, cached: Mapping[Key, int] = _NONE) -> None:
        """Take what the engine put into the step: tokens by request, the whole of them.

        `cached` says how many tokens of a request that was admitted in this step were in the prefix cache already.
        """
        if self.is_steady and len(scheduled) == self._roster.decoding.size:
            self._accounts.steady_step_scheduled(self._begun_s)
            return
        self._disturb()
        newcomers, self._newcomers = self._newcomers, {}
        for request in newcomers.values():
            if request.key in scheduled:
                self._count_start(request.tenant, now_s)
        if newcomers:
            self._window.requests_taken(self._roster.admissible - len(newcomers), now_s)
        for tenant in self._accounts.step_scheduled(scheduled, newcomers, cached, self._begun_s, now_s):
            self._tokens_spent(tenant, now_s)
        # Nothing could be done though the window was open: so it will be until something happens.
        self._is_stuck = not scheduled and self._planner.opens_s(now_s, is_reading=False) <= now_s
        self.is_steady = self._will_be_steady(len(scheduled))

    def _will_be_steady(self, scheduled: int) -> bool:
        roster = self._roster
        decoding = roster.decoding
        if not scheduled or scheduled != decoding.size or decoding.limited or not self._holding.is_idle:
            return False
        if roster.counters.waiting or roster.prefilling or roster.protected or roster.hold:
            return False
        return self.cost.is_fitted and not any(tenant.running for tenant in self._kv_limited)

    def _disturb(self) -> None:
        """Let the coming step be decided, and bring what was charged up to date, as something may be otherwise now."""
        if self.is_steady:
            self.is_steady = False
            self._accounts.catch_up()

    def step_ended(self, now_s: float, step_s: float | None = None) -> None:
        """Charge the oldest step that has not ended; an empty one too must end.

        `step_s` is how long it took; None for since it began, or since the step before it ended where that was later.
        """
        self._is_stuck &= not self._accounts.is_working  # a step leaves room behind
        for tenant, charge_s in self._accounts.step_ended(now_s, step_s):
            assert tenant.credit is not None
            # Not at the first credit: to be left out of every other step makes more work than it smooths.
            self._holding.hold(tenant, tenant.credit.due_s(2 * charge_s, now_s), now_s)

    def wake_at(self, now_s: float) -> float | None:
        """Return when a step can do something; `now_s` means at once, None not before something happens."""
        roster = self._roster
        if roster.decoders or any(not request.is_left_out for request in roster.prefilling.values()):
            return now_s
        if any(self._holding.has_ended(tenant) for tenant in self._holding.exhausted):
            return now_s
        due_s = self._holding.next_release_s()
        if roster.counters.waiting:
            if not self._is_stuck:
                due_s = min(due_s, self._planner.opens_s(now_s, is_reading=False))
            elif any(request.is_paused for request in roster.running()):
                due_s = min(due_s, now_s + _IDLE_WAKE_S)  # idle blocks may be had by then
        return None if due_s == math.inf else max(now_s, due_s)

    def wait_s(self, row: int, now_s: float) -> float | None:
        """Return how long a request that joins the tenant's queue now would wait, as it drains; None if unknown."""
        tenant = self._roster.tenants.get(row)
        if tenant is None or not tenant.queued:
            return 0.0
        rate = tenant.start_rate * math.exp((tenant.started_at_s - now_s) / _START_WINDOW_S) / _START_WINDOW_S
        return (tenant.queued + 1) / rate if rate > 0 else None

    def statistics(self, now_s: float) -> dict[int, TenantStatistics]:
        """Return the counters of every tenant, by row."""
        self._accounts.catch_up()
        return {row: self._statistics(tenant, now_s) for row, tenant in self._roster.tenants.items()}

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _tokens_spent(self, tenant: Tenant, now_s: float) -> None:
        if tenant.tokens_left is not None and tenant.tokens_left <= 0:
            self._holding.exhaust(tenant, now_s)
        elif tenant.pace is not None:
            self._holding.hold(tenant, tenant.pace.due_s(1.0, now_s), now_s)

    def _rest(self, tenant: Tenant, now_s: float) -> None:
        """Note that a tenant has no work any more."""
        self._recent.pop(tenant, None)
        self._recent[tenant] = now_s

    def _tenant(self, row: int) -> Tenant:
        tenant = self._roster.tenants.get(row)
        if tenant is None:
            tenant = self._roster.tenants[row] = Tenant(row, self._roster.decoding)
        return tenant

    def _check_length(self, tenant: Tenant, prompt_tokens: int, max_tokens: int) -> None:
        most = self._settings.kv_blocks
        blocks = self._roster.blocks(prompt_tokens + max_tokens)
        if blocks <= most and tenant.kv_blocks is not None:
            most = tenant.kv_blocks
            blocks = self._roster.blocks(prompt_tokens + 1)
        if blocks > most:
            text = f"cannot take the request: it needs {blocks} KV blocks, and may have {most}; make it shorter"
            raise EngineError("context_too_long", text)

    def _bucket(self, bucket: Bucket | None, rate: float | None, least: float, now_s: float) -> Bucket | None:
        if rate is None:
            return None
        burst = max(rate * self._settings.burst_s, least)
        debt = rate * self._settings.max_hold_s
        if bucket is None:
            return Bucket(rate, burst, debt, now_s)
        bucket.set_limits(rate, burst, debt, now_s)
        return bucket

    def _advance_s(self, tokens: int, rtt_s: float, rtt_variance_s: float) -> float:
        """Return how much earlier a request counts as submitted: for a far or jittery client, and when it is short."""
        short_s = self._settings.max_advance_s / 2 / (1 + tokens / _SHORT_TOKENS)
        return short_s + min(self._settings.max_advance_s / 2, rtt_s + 2 * rtt_variance_s)

    def _is_shared(self, now_s: float) -> bool:
        """Return whether more than one tenant has work, or had it lately."""
        recent = self._recent
        while recent and next(iter(recent.values())) < now_s - self._settings.shared_for_s:
            del recent[next(iter(recent))]
        return len(recent) + len(self._roster.active) > 1

    def _count_start(self, tenant: Tenant, now_s: float) -> None:
        fade = math.exp((tenant.started_at_s - now_s) / _START_WINDOW_S)
        tenant.start_rate = tenant.start_rate * fade + 1
        tenant.started_at_s = now_s

    def _statistics(self, tenant: Tenant, now_s: float) -> TenantStatistics:
        tenant.settle()
        return TenantStatistics(
            step_s=tenant.step_s,
            prompt_tokens=tenant.prompt_tokens,
            cached_tokens=tenant.cached_tokens,
            output_tokens=tenant.output_tokens,
            held_s=tenant.held_s + (now_s - tenant.held_since_s if tenant.is_held and tenant.has_work else 0.0),
            preemptions=tenant.preemptions,
            recomputed_tokens=tenant.recomputed_tokens,
            queue_s=tenant.queue_s,
            started=tenant.started,
            running=len(tenant.running),
            waiting=tenant.queued + tenant.paused_waiting,
            kv_blocks=tenant.blocks,
            is_held=tenant.is_held,
        )
