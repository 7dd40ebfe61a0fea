"""Which tenants are held, left out of the steps because they have no credit, and when they are let in again.

A tenant whose tokens are used up is *exhausted*: held for good, until it gets others, and its requests end once the
last step that they were in has.
"""

from __future__ import annotations

import heapq
import math
from typing import Final

from seedance.engine.roster import Roster
from seedance.engine.states import Key, Tenant

_ROUNDING_S: Final = 1e-9


class Holding:
    """The held tenants of a roster; `exhausted` are those whose requests are to end."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._releases: list[tuple[float, int, Tenant]] = []
        self.exhausted: dict[Tenant, None] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nobody is to be released, and nobody's requests to end."""
        return not self._releases and not self.exhausted

    def hold(self, tenant: Tenant, release_s: float, now_s: float) -> None:
        """Leave a tenant out until some time at least."""
        tenant.release_s = max(release_s, tenant.release_s) if tenant.is_held else release_s
        if not tenant.is_held:
            tenant.held_since_s = now_s
            self._roster.hold_tenant(tenant)
        if tenant.release_s < math.inf:
            self._push(tenant)

    def exhaust(self, tenant: Tenant, now_s: float) -> None:
        """Hold a tenant whose tokens are used up."""
        tenant.is_exhausted = True
        self.exhausted[tenant] = None
        self.hold(tenant, math.inf, now_s)

    def replenish(self, tenant: Tenant, now_s: float) -> None:
        """Let an exhausted tenant go on with new tokens, once it has credit."""
        tenant.is_exhausted = False
        self.exhausted.pop(tenant, None)
        self.plan_release(tenant, now_s)

    def plan_release(self, tenant: Tenant, now_s: float) -> None:
        """Find out anew when a tenant, held or not, is to be released, as its limits or budget are others now."""
        if not tenant.is_held or tenant.is_exhausted:
            return
        due_s = now_s
        if tenant.credit is not None and tenant.credit.level(now_s) <= 0:
            due_s = tenant.credit.due_s(tenant.credit.burst, now_s)
        if tenant.pace is not None and tenant.pace.level(now_s) <= 0:
            due_s = max(due_s, tenant.pace.due_s(1.0, now_s))
        tenant.release_s = due_s
        self._push(tenant)

    def work_arrived(self, tenant: Tenant, now_s: float) -> None:
        """Note that a tenant without work gets a request, before the roster has it."""
        if tenant.is_held:
            tenant.held_since_s = now_s
            self._push(tenant)

    def work_ended(self, tenant: Tenant, now_s: float) -> None:
        """Note that a tenant has no work any more: it is not held then, though it is out of credit."""
        if tenant.is_held:
            tenant.held_s += now_s - tenant.held_since_s

    def release_due(self, now_s: float) -> bool:
        """Let in whose time has come; returns whether that was anybody."""
        is_any = False
        while self._releases and self._releases[0][0] <= now_s + _ROUNDING_S:
            entry = heapq.heappop(self._releases)
            if self._counts(entry):
                tenant = entry[2]
                tenant.held_s += now_s - tenant.held_since_s
                self._roster.release_tenant(tenant)
                is_any = True
        return is_any

    def next_release_s(self) -> float:
        """Return when the next tenant is to be released; infinity for never."""
        while self._releases and not self._counts(self._releases[0]):
            heapq.heappop(self._releases)
        return self._releases[0][0] if self._releases else math.inf

    def has_ended(self, tenant: Tenant) -> bool:
        """Return whether the last step that any of a tenant's requests was in has ended."""
        return tenant.last_scheduled <= self._roster.decoding.ended

    def end_exhausted(self, now_s: float) -> tuple[list[Key], list[Tenant]]:
        """Forget the requests of exhausted tenants whose last step has ended; returns them, and these tenants."""
        end: list[Key] = []
        over = [tenant for tenant in self.exhausted if self.has_ended(tenant)]
        for tenant in over:
            del self.exhausted[tenant]
            keys = [key for key, request in self._roster.requests.items() if request.tenant is tenant]
            for key in keys:
                self._roster.finish(key)
            end += keys
            self.work_ended(tenant, now_s)
        return end, over

    def _push(self, tenant: Tenant) -> None:
        heapq.heappush(self._releases, (tenant.release_s, tenant.row, tenant))

    def _counts(self, entry: tuple[float, int, Tenant]) -> bool:
        """Return whether a planned release is still meant; that of an idle tenant is made up when it comes back."""
        release_s, _, tenant = entry
        return tenant.is_held and release_s == tenant.release_s and tenant.has_work
