"""What each step has brought to whom, and what it cost them: the books of a scheduling policy.

Tokens are counted when a step is scheduled, as a request may be scheduled again before the step has ended; engine time
is charged when it has. Steady steps are charged, and the prices learn from them, `_TOGETHER` at a time: one is like the
other, and to look at each would take longer than all else that the policy does in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from seedance.engine.cost import CostModel, StepLoad
from seedance.engine.fairness import Usage
from seedance.engine.roster import Roster
from seedance.engine.states import Key, Request, Tenant

# A step that takes this much longer than it should was not made longer by those in it; they owe no more than that.
_LATE_FACTOR: Final = 4.0
_LATE_S: Final = 0.25
_TOGETHER: Final = 16


class _Step(msgspec.Struct):
    """A step that has been scheduled; `reads` are prompts by who pays. Who decodes in it is in `decoding`."""

    begun_s: float
    load: StepLoad
    reads: dict[Tenant, StepLoad]
    is_steady: bool = False


class Accounts:
    """The steps under way, and the counters in the tenants."""

    def __init__(self, roster: Roster, cost: CostModel, usage: Usage, now_s: float) -> None:
        self._roster = roster
        self._cost = cost
        self._usage = usage
        self._steps: deque[_Step] = deque()
        self._ended_s = now_s
        # Steady steps that have ended and are not charged yet: the load of the first, and what each has taken.
        self._first = StepLoad()
        self._steady_s: list[float] = []

    def step_scheduled(
        self,
        scheduled: Mapping[Key, int],
        newcomers: Mapping[Key, Request],
        cached: Mapping[Key, int],
        begun_s: float,
        now_s: float,
    ) -> list[Tenant]:
        """Count the tokens of a step; returns the tenants whose pace or budget lets them have no more of them now."""
        roster = self._roster
        readers = [request for key, request in roster.prefilling.items() if key in scheduled]
        for key, request in newcomers.items():
            if key in scheduled:
                roster.admit(request, cached.get(key, 0), now_s)
                readers.append(request)
            else:
                roster.put_back(request)
        step = _Step(begun_s, StepLoad(), {})
        self._steps.append(step)
        decoders = roster.decoders
        missing: list[Request] = []
        if len(scheduled) - len(readers) != len(decoders):
            missing = [decoders[key] for key in decoders.keys() - scheduled.keys()]
        spent = self._count_decodes(step, now_s, missing)
        for request in readers:
            if self._count_read(step, request, scheduled[request.key], now_s):
                spent.append(request.tenant)
        return spent

    def steady_step_scheduled(self, begun_s: float) -> None:
        """Count the tokens of a step in which all who decode are, and nobody else."""
        decoding = self._roster.decoding
        size = decoding.size
        self._steps.append(_Step(begun_s, StepLoad(size, 0, size, decoding.context_tokens), {}, is_steady=True))
        decoding.begin_round()

    @property
    def is_working(self) -> bool:
        """Whether there is anything in the oldest step under way."""
        return self._steps[0].load.requests > 0

    def step_ended(self, now_s: float, step_s: float | None) -> list[tuple[Tenant, float]]:
        """Charge the oldest step under way; returns the tenants that are out of credit now, and their charges."""
        step = self._steps.popleft()
        if step_s is None:
            step_s = now_s - max(step.begun_s, self._ended_s)
        self._ended_s = now_s
        load = step.load
        if step.is_steady:
            if not self._steady_s:
                self._first = load
            self._steady_s.append(step_s)
            if len(self._steady_s) == _TOGETHER:
                self._charge_steady()
            return []
        decoding = self._roster.decoding
        if not load.requests:
            decoding.end_round(0.0, 0.0, 0.0)
            return []
        cost = self._cost
        cost_s = cost.predict_s(load)
        late_s = self._late_s(cost_s)
        rates = cost.rates(load, step_s if step_s < late_s else late_s, cost_s)
        cost.observe(load, step_s, cost_s)
        usage_scale = self._usage.set_time(now_s)
        token_s, context_s = rates.request_s + rates.decode_s, rates.context_s
        charges = {tenant: rates.share_s(part) for tenant, part in step.reads.items()}
        for tenant, size, context_tokens in decoding.end_round(token_s, context_s, usage_scale):
            charges[tenant] = charges.get(tenant, 0.0) + token_s * size + context_s * context_tokens
        for tenant, charge_s in charges.items():
            tenant.step_s += charge_s
            tenant.virtual_s += charge_s * tenant.inverse_weight
            tenant.usage += charge_s * usage_scale
        for tenant in decoding.limited:
            if tenant.credit is not None:
                charges[tenant] = charges.get(tenant, 0.0) + decoding.last_s(tenant)
        return [
            (tenant, charge_s)
            for tenant, charge_s in charges.items()
            if tenant.credit is not None and tenant.credit.charge(charge_s, now_s) <= 0
        ]

    def catch_up(self) -> None:
        """Charge the steady steps that have ended; those under way are charged each, as there may be others by then."""
        if self._steady_s:
            self._charge_steady()
        for step in self._steps:
            step.is_steady = False

    def _charge_steady(self) -> None:
        times_s, self._steady_s = self._steady_s, []
        load, count = self._first, len(times_s)
        middle = StepLoad(load.requests, 0, load.decodes, load.context_tokens + load.decodes * (count - 1) // 2)
        cost_s = self._cost.predict_s(middle)
        late_s = self._late_s(cost_s)
        rates = self._cost.rates(middle, sum([min(step_s, late_s) for step_s in times_s]) / count, cost_s)
        self._cost.observe_run(load, times_s)
        usage_scale = self._usage.set_time(self._ended_s)
        for _ in times_s:
            self._roster.decoding.end_round(rates.request_s + rates.decode_s, rates.context_s, usage_scale)

    def _late_s(self, cost_s: float) -> float:
        """Return what those in a step owe of it at most."""
        return _LATE_S + (_LATE_FACTOR * cost_s if self._cost.is_fitted else 0.0)

    def begin_usage_anew(self, now_s: float) -> None:
        """Have what is charged weigh 1 again in tenants' usage."""
        self._roster.decoding.settle_all()
        self._usage.begin_anew(now_s, self._roster.tenants.values())

    def _count_decodes(self, step: _Step, now_s: float, missing: list[Request]) -> list[Tenant]:
        """Count a token for all who decode but those that are missing; returns whose pace or budget that ends."""
        decoding, load = self._roster.decoding, step.load
        for request in missing:
            decoding.leave(request)
        load.requests = load.decodes = decoding.size
        load.context_tokens = decoding.context_tokens
        decoding.begin_round()
        spent: list[Tenant] = []
        for tenant in decoding.limited:
            if tenant.is_metered and _spend(tenant, tenant.decodes.size, tenant.decodes.size, now_s):
                spent.append(tenant)
        for request in missing:
            decoding.join(request)
        return spent

    def _count_read(self, step: _Step, request: Request, tokens: int, now_s: float) -> bool:
        tenant, computed = request.tenant, request.computed
        _divide_read(step, request, tokens)
        output_tokens = int(self._roster.prompt_read(request, tokens))
        tenant.prompt_tokens += tokens
        tenant.counted_tokens += output_tokens
        tenant.last_scheduled = self._roster.decoding.rounds
        if not tenant.is_metered:
            return False
        new_tokens = max(0, computed + tokens - max(computed, request.billed_tokens))
        return _spend(tenant, new_tokens + output_tokens, output_tokens, now_s)


def _divide_read(step: _Step, request: Request, tokens: int) -> None:
    """Charge a read to the request's tenant, or what is read anew for somebody else's sake to that one."""
    computed, payer = request.computed, request.payer
    step.load.add_prefill(tokens, computed)
    anew = 0
    if payer is not None:
        anew = max(0, min(tokens, request.billed_tokens - computed))
        if anew:
            step.reads.setdefault(payer, StepLoad()).add_prefill(anew, computed)
    if anew < tokens:
        own = step.reads.setdefault(request.tenant, StepLoad())
        own.add_prefill(tokens - anew, computed + anew)
        own.requests -= anew > 0  # it is one request in the step


def _spend(tenant: Tenant, tokens: int, output_tokens: int, now_s: float) -> bool:
    """Take new tokens, of which some came out, from a tenant's pace and budget; returns whether that was the last."""
    is_spent = tenant.pace is not None and tenant.pace.charge(tokens, now_s) <= 0
    if tenant.tokens_left is not None:
        tenant.tokens_left -= output_tokens
        is_spent |= tenant.tokens_left <= 0
    return is_spent
