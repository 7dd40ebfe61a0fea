"""Whose KV blocks or slot to take when there are not enough: the choice of victims.

A preempted request loses its KV and is read anew later, so it is the last resort, and nobody is asked more than
`states.MAX_PREEMPTIONS` times: a request that has been preempted as often is admitted only when its whole length fits,
and those blocks are kept free for it.

A slot is taken for a request with a priority only, which its operator has set; a deadline takes nothing from anybody.
What the victim must read anew is charged to the tenant that took its slot.

Blocks that lie idle go first: those of a request that was paused for `IDLE_S`, which marks them, and has stayed
paused for `RECLAIM_S` more. Then come tenants over their KV share, then low classes, then the latest arrivals, who have
the least to lose; what moves a request in its own tenant's queue does not count there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from seedance.engine.roster import Roster
from seedance.engine.scheduling import Step
from seedance.engine.states import Request, Tenant

IDLE_S: Final = 0.5
RECLAIM_S: Final = 0.1


def is_reclaimable(request: Request, now_s: float) -> bool:
    """Return whether a request's blocks have been idle, and marked so, for long enough."""
    return request.is_paused and now_s - request.paused_s > IDLE_S + RECLAIM_S


def is_over_share(tenant: Tenant) -> bool:
    """Return whether a tenant has more KV blocks than it may."""
    return tenant.kv_blocks is not None and tenant.blocks > tenant.kv_blocks


def victim_for_blocks(requests: Iterable[Request], now_s: float) -> Request | None:
    """Choose the running request that gives its KV blocks to others; None when none may be asked."""

    def rank(request: Request) -> tuple[bool, bool, float, int, float]:
        tenant = request.tenant
        is_idle = is_reclaimable(request, now_s)
        return is_idle, is_over_share(tenant), -tenant.weight, -request.priority, request.queued_s

    return max((request for request in requests if not request.is_protected), key=rank, default=None)


def victim_for_admission(roster: Roster, now_s: float) -> Request | None:
    """Choose the running request whose slot and blocks a waiting one may have: who has been idle for longest."""
    idle = (request for request in roster.idle.values() if not request.is_protected and is_reclaimable(request, now_s))
    return next(idle, None)


def victim_for_slot(requests: Iterable[Request], urgent: Request) -> Request | None:
    """Choose the running request that gives its slot to one with a priority; None when none may be asked.

    It is of a lower class, by priority or else by weight, or of the same tenant and of lower priority. Of the lowest
    class there, the one asked least often before, with the least to read anew.
    """

    def yields(request: Request) -> bool:
        if request.is_protected:
            return False
        if request.tenant is urgent.tenant:
            return request.priority < urgent.priority
        return _class(request.tenant) < _class(urgent.tenant)

    def rank(request: Request) -> tuple[tuple[int, float], int, int, float]:
        return _class(request.tenant), request.preemptions, request.position, -request.queued_s

    return min((request for request in requests if yields(request)), key=rank, default=None)


def _class(tenant: Tenant) -> tuple[int, float]:
    return tenant.priority, tenant.weight


def preempt(roster: Roster, victim: Request, step: Step, payer: Tenant | None = None) -> int:
    """Preempt a request before a step, at the cost of `payer`; returns how many KV blocks that frees."""
    blocks = roster.blocks(victim.position)
    roster.preempt(victim, payer)
    step.preempt.append(victim.key)
    return blocks


def make_room(roster: Roster, step: Step, kv_free_blocks: int, now_s: float) -> int:
    """Preempt until the next token of all who decode has a KV block; returns how many are free then."""
    # Each takes one block at most; only where that might be too many is it counted.
    if kv_free_blocks - roster.promised() >= len(roster.decoders):
        return kv_free_blocks
    while kv_free_blocks - roster.promised() < roster.decoding.growth():
        victim = victim_for_blocks(roster.running(), now_s)
        if victim is None:
            break
        kv_free_blocks += preempt(roster, victim, step)
    return kv_free_blocks


def keep_kv_limits(roster: Roster, tenants: Iterable[Tenant], step: Step, now_s: float) -> int:
    """Make tenants keep to their KV blocks: one that needs more gives up its latest request, or ends its last one.

    Returns how many KV blocks that frees.
    """
    freed = 0
    for tenant in tenants:
        assert tenant.kv_blocks is not None
        while tenant.running and tenant.blocks + _wanted(roster, tenant) > tenant.kv_blocks:
            victim = victim_for_blocks(tenant.running.values(), now_s) if len(tenant.running) > 1 else None
            if victim is not None:
                freed += preempt(roster, victim, step)
            else:
                latest = tenant.running[next(reversed(tenant.running))]
                freed += roster.blocks(latest.position)
                roster.finish(latest.key)
                step.end.append(latest.key)
    return freed


def _wanted(roster: Roster, tenant: Tenant) -> int:
    """Return how many KV blocks a tenant takes in a step, and is promised."""
    promised = roster.outstanding((tenant.prefilling | tenant.protected).values())
    return promised + roster.decoding.growth_of(tenant)
