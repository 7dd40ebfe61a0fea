"""Who is served next: virtual counters of the service that each tenant got, per weight.

The rule is VTC's ("Fairness in Serving Large Language Models", arXiv 2401.00588), counted in measured engine time
instead of tokens: whoever waits and has the smallest counter is served first, and each charge moves a counter by the
engine seconds it took over the tenant's weight. Two tenants that both wait drift apart by no more than what is in the
engine already when one of them begins to wait (running requests are not cut short for fairness), the steps under way,
and what the planner advances urgent and light requests by.

A tenant that begins to wait is lifted to the smallest counter of those who wait, or, where nobody does, to that of who
last stopped waiting: to be idle, held or without KV blocks saves nothing up. What it was behind the smallest one when
it stopped waiting it may be behind again: else whoever is advanced, for deadlines say, would be so anew each time that
another begins to wait, and could take as much as it likes from those who wait now and then.

`Usage` is a second, short memory: what part of the engine a tenant has had lately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar

_RESCALE: Final = 1e12


class Counted(Protocol):
    """What is kept in a tenant."""

    virtual_s: float
    claim_s: float
    inverse_weight: float
    usage: float


T = TypeVar("T", bound=Counted)


class VirtualCounters(Generic[T]):
    """The tenants of which a request may be admitted, in no order; their counters are in them.

    `settle` brings a tenant's counters up to date, which may lag behind until then.
    """

    def __init__(self, settle: Callable[[T], object]) -> None:
        self._settle = settle
        self.waiting: dict[T, None] = {}
        self._last: T | None = None
        self._lowest: T | None = None

    def enter(self, tenant: T) -> None:
        """Let a tenant wait, lifted; nothing happens when it does already."""
        if tenant in self.waiting:
            return
        self._settle(tenant)
        floor_s = self._floor_s()
        if floor_s is None:
            floor_s = 0.0
            if self._last is not None:
                self._settle(self._last)
                floor_s = self._last.virtual_s
        floor_s -= tenant.claim_s
        tenant.virtual_s = max(tenant.virtual_s, floor_s)
        self.waiting[tenant] = None

    def leave(self, tenant: T, *, is_held: bool = False) -> None:
        """Take out a tenant that waits no longer; nothing happens when it does not. A held one has no claim."""
        if tenant in self.waiting:
            del self.waiting[tenant]
            self._last = tenant
            floor_s = None if is_held else self._floor_s()
            self._settle(tenant)
            tenant.claim_s = 0.0 if floor_s is None else max(0.0, floor_s - tenant.virtual_s)

    def _floor_s(self) -> float | None:
        """Return the smallest counter of those who wait; one that is not settled can only grow."""
        if not self.waiting:
            return None
        lowest = self._lowest  # of the last time: so there are few who seem lower, and have to be settled
        if lowest is None or lowest not in self.waiting:
            lowest = next(iter(self.waiting))
        self._settle(lowest)
        floor_s = lowest.virtual_s
        for tenant in self.waiting:
            if tenant.virtual_s < floor_s:
                self._settle(tenant)
                if tenant.virtual_s < floor_s:
                    lowest, floor_s = tenant, tenant.virtual_s
        self._lowest = lowest
        return floor_s


class Usage:
    """What part of the time each tenant has had of the engine, faded over `window_s`."""

    def __init__(self, window_s: float, now_s: float) -> None:
        self._window_s = window_s
        self._epoch_s = now_s
        self._scale = 1.0

    def set_time(self, now_s: float) -> float:
        """Move on to a time; returns what a second charged now adds to a tenant's `usage`.

        Instead of fading what all tenants have, what is charged later weighs more.
        """
        windows = (now_s - self._epoch_s) / self._window_s
        self._scale = scale = math.exp(windows if windows < 600 else 600)
        return scale

    @property
    def is_due(self) -> bool:
        """Whether it is time to begin anew: once in a long while."""
        return self._scale > _RESCALE

    def begin_anew(self, now_s: float, tenants: Iterable[Counted]) -> None:
        """Have a second charged weigh 1 again; `tenants` are all there are."""
        for tenant in tenants:
            tenant.usage /= self._scale
        self._epoch_s = now_s
        self._scale = 1.0

    def usage(self, fraction: float) -> float:
        """Return the `usage` of a tenant that has that part of the engine's time."""
        return fraction * self._scale * self._window_s

    def fraction(self, tenant: Counted) -> float:
        """Return the tenant's part of the engine's time, as of the time set last."""
        return tenant.usage / self.usage(1.0)
