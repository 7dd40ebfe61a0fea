"""Who stands back: tenants over their fair part of the engine, while a guest is served.

A light user's tokens come out of steps that it shares with a flood, and each of those takes as long as everybody's part
in it. A *guest* is a tenant that uses less than `guest_fraction` of its fair part, and not for want of slots; a *flood*
is one that uses more than `flood_fraction` of its own. While a guest is in the steps:

* In a step that reads its prompt, no flood reads or decodes: the first token takes what it takes alone.
* In a step that only decodes for it, they do as long as that step takes no more than `protected_slowdown` times what it
  takes without them.
* After `patience_s` of that they all decode in one step: nobody's streams stop for longer.

Who stands back keeps slots and KV blocks, and goes on in the first step without a guest. It gives up the part of the
engine that guests use, and no more: who is in most steps is no guest for long.
"""

from __future__ import annotations

import math

from seedance.engine.cost import CostModel, StepLoad
from seedance.engine.fairness import Usage
from seedance.engine.roster import Roster
from seedance.engine.scheduling import PolicySettings
from seedance.engine.states import Tenant


class Courtesy:
    """Decides before each step which tenants' decoding is left out of it."""

    def __init__(self, settings: PolicySettings, roster: Roster, cost: CostModel, usage: Usage) -> None:
        self._settings = settings
        self._roster = roster
        self._cost = cost
        self._usage = usage
        self._since_s = math.inf
        self._in_vain_s = -math.inf

    def decide(self, now_s: float, slots_free: int, *, is_shared: bool) -> None:
        """Let tenants stand back, or come back, for the coming step."""
        roster = self._roster
        back = self._standing_back(now_s, slots_free) if is_shared and (roster.decoding or roster.aside) else {}
        if not back:
            self._since_s = math.inf
        elif self._since_s == math.inf:
            self._since_s = now_s
        elif now_s - self._since_s > self._settings.patience_s:
            self._since_s = now_s
            back = {}
        for tenant in [tenant for tenant in roster.aside if tenant not in back]:
            roster.come_back(tenant)
        for tenant in back:
            if tenant not in roster.aside:
                roster.stand_back(tenant)

    def planned(self, now_s: float, *, is_empty: bool) -> None:
        """Note what has been planned: a step that is left empty for who cannot be admitted is so only once."""
        if is_empty and self._roster.aside and not self._roster.decoders:
            self._in_vain_s = now_s

    def _standing_back(self, now_s: float, slots_free: int) -> dict[Tenant, None]:
        """Return who should not decode in the coming step."""
        roster = self._roster
        part = self._usage.usage(1.0) / max(roster.active_weight, 1e-9)
        flood = self._settings.flood_fraction * part
        heavy = [tenant for tenant in (*roster.decoding, *roster.aside) if tenant.usage > flood * tenant.weight]
        if not heavy:
            return {}
        light = self._settings.guest_fraction * part
        if self._is_reading(light) or (slots_free > 0 and self._is_awaited(light, slots_free, now_s)):
            return dict.fromkeys(heavy)
        guests = [tenant for tenant in roster.decoding if _is_guest(tenant, light)]
        return self._too_many(heavy) if guests else {}

    def _is_reading(self, light: float) -> bool:
        """Return whether a prompt of a guest is being read."""
        return any(
            _is_guest(request.tenant, light) and not request.is_left_out for request in self._roster.prefilling.values()
        )

    def _is_awaited(self, light: float, slots_free: int, now_s: float) -> bool:
        """Return whether all of a guest that waits may get in, and came since that was in vain."""
        for tenant in self._roster.counters.waiting:
            if tenant.queued <= slots_free and tenant.usage < light * tenant.weight:
                head = tenant.queue.head(now_s)
                if head is not None and head.queued_s > self._in_vain_s:
                    return True
        return False

    def _too_many(self, heavy: list[Tenant]) -> dict[Tenant, None]:
        """Return those whose decoding would make the step of the others too long."""
        load = StepLoad()
        back = dict.fromkeys(heavy)
        for tenant in self._roster.decoding:
            if tenant not in back:
                _add_decodes(load, tenant)
        limit_s = self._settings.protected_slowdown * self._cost.predict_s(load)
        for tenant in sorted(heavy, key=lambda tenant: (tenant.virtual_s, tenant.row)):
            _add_decodes(load, tenant)
            if self._cost.predict_s(load) > limit_s:
                break
            del back[tenant]
        return back


def _is_guest(tenant: Tenant, light: float) -> bool:
    """Return whether a tenant uses little, and not for want of slots."""
    return not tenant.queued and tenant.usage < light * tenant.weight


def _add_decodes(load: StepLoad, tenant: Tenant) -> None:
    load.requests += tenant.group.size
    load.decodes += tenant.group.size
    load.context_tokens += tenant.group.context_tokens
