"""Which prompts a step reads, and how much of each: the order of tenants, chunks, admission, and the caps on them.

All who decode take their token in every step, so a step is decided by what is read in it. Tenants take turns by their
virtual counters, request by request, until the step is full:

* A step takes no longer than `step_target_s`, or twice what its decoding takes alone: so no prompt stops decoding. A
  tenant that is alone, and has been for a while, has no such cap.
* A tenant that uses less than half of its fair part of the engine is *light*. Others read in a step with its tokens in
  it only as long as the step takes no more than `protected_slowdown` times what the light ones' part takes alone: a
  light user hardly notices a flood. That cannot last, as one that is in most steps is not light for long.
* At least `min_chunk_tokens` are read in every step that has anything to read, or, where light tenants keep others from
  reading, after `patience_s`.

A turn may be advanced, by a bounded part of a second of engine time: for urgent requests, for a light tenant, and for a
request whose client is far away or on a jittery line. A request is urgent when it has a priority, or when its deadline
is near. More than a turn goes with a priority alone: the slots that are kept for light tenants, the slots of others,
and that no admission window is waited for. So nobody gets more out of the engine by its deadlines.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from seedance.engine.admission import AdmissionWindow
from seedance.engine.cost import CostModel, StepLoad
from seedance.engine.fairness import Usage
from seedance.engine.preemption import victim_for_admission, victim_for_slot
from seedance.engine.roster import Roster
from seedance.engine.scheduling import PolicySettings
from seedance.engine.states import Key, Request, Tenant

# Who is not light for so much more usage is not until that is reached: not all are looked at in every step.
_LOOK_AHEAD: Final = 1.05
_Turn: TypeAlias = tuple[float, int, Tenant]


class Plan:
    """What is read in one step: tokens by request in order, who of them is new, and who makes room at whose cost."""

    def __init__(self) -> None:
        self.prefill: dict[Key, int] = {}
        self.admit: list[Request] = []
        self.preempt: dict[Request, Tenant | None] = {}


class Planner:
    """Plans the reading of one step after the other."""

    def __init__(
        self, settings: PolicySettings, roster: Roster, cost: CostModel, usage: Usage, window: AdmissionWindow
    ) -> None:
        self._settings = settings
        self._roster = roster
        self._cost = cost
        self._usage = usage
        self._window = window
        reserved = settings.reserved_slots
        self._reserved_slots = min(2, settings.slots // 32) if reserved is None else reserved
        self._read_s = self._light_s = -math.inf
        self._perhaps_light: list[Tenant] = []
        # For which usages that holds, and for which tenants at work of which weight together.
        self._looked_at: tuple[float, float, int, float] = (0.0, 0.0, 0, 0.0)

    def plan(self, now_s: float, kv_free_blocks: int, slots_free: int, *, is_shared: bool) -> Plan:
        """Plan a step: `is_shared` says that more than one tenant is there, or was until lately."""
        roster = self._roster
        reading = {request.tenant: None for request in roster.prefilling.values() if not request.is_left_out}
        is_open = bool(roster.counters.waiting) and self.opens_s(now_s, is_reading=bool(reading)) <= now_s
        if not reading and not roster.pressing and not (is_open and (slots_free > 0 or roster.idle)):
            return Plan()
        is_impatient = now_s - self._read_s > self._settings.patience_s
        take = self._window.most() if is_open else -1
        plan = _Round(self, reading, take, now_s, kv_free_blocks, slots_free, is_shared, is_impatient).run()
        if plan.prefill:
            self._read_s = now_s
        return plan

    def opens_s(self, now_s: float, *, is_reading: bool) -> float:
        """Return when the admission window opens for those who wait now; infinity when nobody does."""
        roster = self._roster
        waiting, decoders = roster.admissible, len(roster.decoders)
        mixed_s = self._cost.prices.mixed_s
        return self._window.opens_s(waiting, decoders, mixed_s, is_reading=is_reading, now_s=now_s)

    def light(self) -> set[Tenant]:
        """Return the light tenants; who is not by what is settled, is not at all."""
        roster = self._roster
        usage = self._usage.usage(self._settings.light_fraction)
        least, most, changes, weight = self._looked_at
        if not least <= usage < most or changes != roster.active_changes or weight != roster.active_weight:
            most = usage * _LOOK_AHEAD
            self._looked_at = usage, most, roster.active_changes, roster.active_weight
            most /= max(roster.active_weight, 1e-9)
            self._perhaps_light = [tenant for tenant in roster.active if tenant.usage < most * tenant.weight]
        usage /= max(roster.active_weight, 1e-9)
        settle = roster.decoding.settle
        light = set()
        for tenant in self._perhaps_light:
            if tenant.usage < usage * tenant.weight:
                settle(tenant)
                if tenant.usage < usage * tenant.weight:
                    light.add(tenant)
        return light

    def kept_slots(self, is_any_light: bool, now_s: float) -> int:
        """Return how many slots are kept for light tenants: none where there has been no such tenant lately."""
        if is_any_light:
            self._light_s = now_s
        return self._reserved_slots if now_s - self._light_s <= self._settings.shared_for_s else 0

    def urgent_s(self, prompt_tokens: int, deadline_s: float) -> float:
        """Return when a request becomes urgent for its deadline: two steps and twice its reading before that."""
        load = StepLoad()
        load.add_prefill(prompt_tokens, 0)
        return deadline_s - 2 * (self._cost.predict_s(load) + self._settings.step_target_s)


class _Round:
    """The planning of one step, with what is left of it to give away."""

    def __init__(
        self,
        planner: Planner,
        reading: dict[Tenant, None],
        take: int,
        now_s: float,
        kv_free_blocks: int,
        slots_free: int,
        is_shared: bool,
        is_impatient: bool,
    ) -> None:
        self._planner = planner
        self._settings = planner._settings
        self._roster = planner._roster
        self._cost = planner._cost
        self._reading = reading
        self._waiting = planner._roster.counters.waiting
        self._take = take
        self._now_s = now_s
        self._slots = slots_free
        self._kv_free_blocks = kv_free_blocks
        self._is_shared = is_shared
        self._is_impatient = is_impatient
        self._plan = Plan()
        roster = self._roster
        decoding = roster.decoding
        self._budget = self._settings.step_tokens - decoding.size
        self._light = planner.light()
        self._kept = planner.kept_slots(bool(self._light), now_s) if is_shared else 0
        self._load = StepLoad(decoding.size, 0, decoding.size, decoding.context_tokens)
        self._light_load = StepLoad()
        self._wide_s = math.inf
        self._blocks = -1
        self._paced: dict[Tenant, int] = {}
        self._readers: dict[Tenant, Iterator[Request]] = {}

    def _share_step(self) -> None:
        """Bound the step, as more than one tenant is there: by what all, and what the light ones, decode in it."""
        size, context_tokens = self._roster.decoding.load_of(self._light)
        self._light_load = StepLoad(size, 0, size, context_tokens)
        self._wide_s = max(self._settings.step_target_s, 2 * self._cost.predict_s(self._load))

    def run(self) -> Plan:
        is_reading = bool(self._reading)
        turns = [(self._turn_s(tenant), tenant.row, tenant) for tenant in self._reading | self._candidates()]
        if not turns:
            return self._plan
        heapq.heapify(turns)
        if self._is_shared:
            self._share_step()
        # Nobody gets a slot but those that are free, and nobody goes on reading.
        has_slots_only = not is_reading and not self._roster.idle and not self._roster.pressing
        settle, prefill_s = self._roster.decoding.settle, self._cost.prices.prefill_s
        while turns and self._budget > 0:
            turn_s, row, tenant = _first(turns, settle)
            request = self._reader(tenant) if tenant.prefilling else None
            request = request or self._newcomer(tenant)
            if request is None:
                continue
            tokens = self._chunk(tenant, request)
            if not tokens:
                if self._is_full():
                    break
                continue
            is_new = request.key not in tenant.prefilling
            if is_new and not self._admit(tenant, request):
                continue
            self._add(tenant, request, tokens)
            if has_slots_only and self._slots <= self._kept:
                has_slots_only = False
                turns = [turn for turn in turns if self._slots > 0 and turn[2] in self._light]
                heapq.heapify(turns)
            if tenant.pace is not None and self._is_spent(tenant, tokens):
                continue
            heapq.heappush(turns, (turn_s + prefill_s * tokens * tenant.inverse_weight, row, tenant))
        return self._plan

    def _is_spent(self, tenant: Tenant, tokens: int) -> bool:
        """Return whether what is read in this step, with these tokens, takes all credit of a tenant with a pace."""
        assert tenant.pace is not None
        self._paced[tenant] = self._paced.get(tenant, 0) + tokens
        return self._paced[tenant] >= tenant.pace.level(self._now_s)

    def _candidates(self) -> dict[Tenant, None]:
        """Return the tenants of which a request might get a slot."""
        waiting = self._waiting
        candidates: list[Tenant] = []
        if self._slots > self._kept or (
            self._slots <= 0 and self._roster.idle and victim_for_admission(self._roster, self._now_s)
        ):
            candidates += waiting
        else:
            if self._slots > 0:
                candidates += [tenant for tenant in self._light if tenant in waiting]
            if self._roster.pressing:
                candidates += [tenant for tenant in waiting if self._has_priority(tenant)]
        return {t: None for t in candidates if t.slots is None or t.slots > len(t.running)}

    def _has_priority(self, tenant: Tenant) -> bool:
        head = tenant.queue.head(self._now_s)
        return head is not None and head.priority > 0

    def _turn_s(self, tenant: Tenant) -> float:
        """Return when a tenant's turn is, by what it has been charged so far: not too late."""
        advance_s = self._settings.light_advance_s if tenant in self._light else 0.0
        head = tenant.queue.head(self._now_s) if tenant.queued and not tenant.is_held else None
        if head is not None:
            advance_s += head.advance_s
            if head.priority > 0:
                advance_s += self._settings.urgent_advance_s
            elif head.urgent_s <= self._now_s:
                advance_s += self._settings.deadline_advance_s
        return tenant.virtual_s - advance_s * tenant.inverse_weight

    def _reader(self, tenant: Tenant) -> Request | None:
        """Return the tenant's next request of which a part has been read before."""
        if tenant.is_held:
            return None
        if tenant not in self._readers:
            self._readers[tenant] = iter([r for r in tenant.prefilling.values() if not r.is_left_out])
        return next((r for r in self._readers[tenant] if r not in self._plan.preempt), None)

    def _newcomer(self, tenant: Tenant) -> Request | None:
        if tenant not in self._waiting or (tenant.slots is not None and self._has_all_slots(tenant)):
            return None
        request = tenant.queue.head(self._now_s)
        if request is None or request.priority > 0:
            return request
        if self._take <= 0 or (0 < self._slots <= self._kept and tenant not in self._light):
            return None
        return request

    def _has_all_slots(self, tenant: Tenant) -> bool:
        """Return whether a tenant has as many slots as it may."""
        return sum(other.tenant is tenant for other in self._plan.admit) >= tenant.slots_free

    def _chunk(self, tenant: Tenant, request: Request) -> int:
        """Return how many tokens of a request this step reads; 0 for none."""
        tokens = request.unread
        limit_s = self._wide_s
        if limit_s < math.inf:
            is_urgent = request.priority > 0
            may_insist = is_urgent or not self._plan.prefill
            if self._light_load.requests and not is_urgent and tenant not in self._light:
                limit_s = min(limit_s, self._settings.protected_slowdown * self._cost.predict_s(self._light_load))
                may_insist &= self._is_impatient
            fits = self._cost.prefill_tokens_within(self._load, limit_s, request.computed)
            if fits < tokens:
                least = min(tokens, self._settings.min_chunk_tokens)
                tokens = fits if fits >= least else least if may_insist else 0
        return tokens if tokens < self._budget else self._budget

    def _is_full(self) -> bool:
        least = self._settings.min_chunk_tokens
        return self._cost.prefill_tokens_within(self._load, self._wide_s, 0) < least

    def _add(self, tenant: Tenant, request: Request, tokens: int) -> None:
        self._plan.prefill[request.key] = tokens
        self._load.add_prefill(tokens, request.computed)
        self._budget -= tokens
        if self._is_shared and tenant in self._light:
            self._light_load.add_prefill(tokens, request.computed)

    def _admit(self, tenant: Tenant, request: Request) -> bool:
        """Find a slot and KV blocks for a waiting request, and take it out of its queue."""
        own: list[Request] = []
        if tenant.kv_blocks is not None:
            own = [other for other in self._plan.admit if other.tenant is tenant]
        kept = 0 if request.priority > 0 or tenant in self._light else self._kept
        if self._slots <= kept and not self._make_slot(request):
            return False
        if not self._reserve_blocks(tenant, request, own):
            return False
        tenant.queue.take(request)
        self._slots -= 1
        self._take -= 1
        self._plan.admit.append(request)
        return True

    def _make_slot(self, request: Request) -> bool:
        if self._plan.preempt:
            return False
        victim = victim_for_admission(self._roster, self._now_s) if self._slots <= 0 else None
        payer = None
        if victim is None and request.priority > 0:
            victim = victim_for_slot(self._roster.running(), request)
            payer = request.tenant
        if victim is not None:
            self._preempt(victim, payer)
        return victim is not None

    def _preempt(self, victim: Request, payer: Tenant | None = None) -> None:
        self._plan.preempt[victim] = payer
        self._plan.prefill.pop(victim.key, None)
        self._slots += 1
        self._kv_free_blocks += self._roster.blocks(victim.position)
        if self._blocks >= 0:
            self._blocks += self._roster.blocks(victim.position)

    def _reserve_blocks(self, tenant: Tenant, request: Request, own: list[Request]) -> bool:
        roster = self._roster
        wanted = roster.blocks(request.reserved_tokens + 1)
        if tenant.kv_blocks is not None:
            promised = roster.outstanding([*(tenant.prefilling | tenant.protected).values(), *own])
            most = max(0, tenant.kv_blocks - tenant.blocks - roster.decoding.growth_of(tenant) - promised)
            if min(wanted, tenant.kv_blocks) > most:
                return False
        if self._blocks < 0:
            # Those who decode grow: a few steps' worth of it is kept free for them.
            kept = max(roster.decoding.growth(), len(roster.decoders) // 4)
            self._blocks = max(0, self._kv_free_blocks - roster.promised() - kept)
        if wanted > self._blocks and not self._plan.preempt:
            victim = victim_for_admission(roster, self._now_s)
            if victim is not None:
                self._preempt(victim)
        if wanted > self._blocks:
            # Whose turn it is waits for blocks; to let smaller requests pass by would let it wait for ever.
            self._take = 0
            return False
        self._blocks -= wanted
        return True


def _first(turns: list[_Turn], settle: Callable[[Tenant], float]) -> _Turn:
    """Take out the first turn: where its tenant owes something, the turn is later than it seemed."""
    while True:
        turn_s, row, tenant = turns[0]
        owed_s = settle(tenant)
        if not owed_s:
            return heapq.heappop(turns)
        heapq.heapreplace(turns, (turn_s + owed_s * tenant.inverse_weight, row, tenant))
