"""All who decode, of all tenants: they advance together, and a step touches none of them.

Whoever is not left out takes a token in every step, so the steps are counted as *rounds*. Where a request stands
follows from the round in which it joined and where it stood then, and so does what a tenant's requests have in sum.
What a round costs is added to two running sums: the price of a token in it, and that of a token of context. What a
tenant owes is the difference of the sums since it was last *settled*, times what it has there. So a tenant is settled
when somebody looks at what it is charged, or when one of its requests comes or goes; only those with limits on what
they use are looked at in every step.

A round is charged when its step has ended, and by then a request may have come or gone again. That is settled as if it
had been so in all rounds that have not ended, and each of them notes the difference.

A request needs a new KV block when its position is a multiple of the block's size. Which round that is, modulo the
block's size, its *place*, is known when it joins; a table counts the requests for each. How many blocks it has had by a
round is how often rounds have gone past its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from seedance.engine.states import Request, Tenant


_Sums: TypeAlias = tuple[float, float, float, float]
"""What rounds have cost: a token as if its context were as long as rounds have passed, and a token of context; in
seconds, and then in usage.
"""

_NOTHING: Final[_Sums] = (0.0, 0.0, 0.0, 0.0)

Change: TypeAlias = "tuple[Tenant, int, int]"
"""In one round: a tenant, how many more of its requests took a token than it is settled for, and their context."""


class Decodes:
    """The decoding requests of one tenant, `size` of them, with contexts that sum up to `base + size x round`.

    `joined` sums up the rounds in which they joined, `blocks` their KV blocks, counted back to the first round of each
    one's place; `crossings` counts them by place. `mark` is the sums up to which the tenant is charged.
    """

    __slots__ = ("base", "blocks", "crossings", "joined", "mark", "size")

    def __init__(self, block_tokens: int) -> None:
        self.size = 0
        self.base = 0
        self.joined = 0
        self.blocks = 0
        self.crossings = [0] * block_tokens
        self.mark: _Sums = _NOTHING


class Decoding:
    """The rounds, and who is in them.

    `tenants` have a request that decodes; `limited` are those of them with limits on what they use. `rounds` have been
    scheduled, `ended` of them have ended. `size` requests decode. A KV block holds `block_tokens`.
    """

    def __init__(self, block_tokens: int) -> None:
        self.tenants: dict[Tenant, None] = {}
        self.limited: dict[Tenant, None] = {}
        self.rounds = 0
        self.ended = 0
        self.size = 0
        self.block_tokens = block_tokens
        self._base = 0
        self._crossings = [0] * block_tokens
        self._origin = 0  # contexts are counted from here, which keeps the sums small, and so exact
        self._sums: _Sums = _NOTHING
        self._token_s = self._context_s = 0.0  # of the round that ended last
        self._open: deque[list[Change]] = deque()

    # -- requests -----------------------------------------------------------------------------------------------------

    def join(self, request: Request) -> None:
        """Take in a request that stands at its `computed` tokens."""
        tenant = request.tenant
        self.settle(tenant)
        request.joined = self.rounds
        tenant.counted_blocks -= -(-request.computed // self.block_tokens)
        self._change(request, 1)
        if tenant.decodes.size == 1:
            self.tenants[tenant] = None
            self.watch(tenant)

    def leave(self, request: Request) -> None:
        """Let a request go; its `computed` says where it stands."""
        tenant = request.tenant
        self.settle(tenant)
        self._change(request, -1)
        rounds = self.rounds
        tokens = rounds - request.joined
        request.computed = computed = request.computed + tokens
        request.joined = -1
        tenant.counted_blocks += -(-computed // self.block_tokens)
        tenant.counted_tokens += tokens
        tenant.last_scheduled = rounds
        if not tenant.decodes.size:
            del self.tenants[tenant]
            self.limited.pop(tenant, None)

    def watch(self, tenant: Tenant) -> None:
        """Note whether a tenant has limits on what it uses, as these may be others now."""
        if tenant.decodes.size and (tenant.is_metered or tenant.credit is not None):
            self.limited[tenant] = None
        else:
            self.limited.pop(tenant, None)

    # -- sums ---------------------------------------------------------------------------------------------------------

    @property
    def context_tokens(self) -> int:
        """What all who decode have as context."""
        return self._base + self.size * (self.rounds - self._origin)

    def load_of(self, tenants: Iterable[Tenant]) -> tuple[int, int]:
        """Return how many requests of some tenants decode, and what these have as context."""
        size = base = 0
        for tenant in tenants:
            size += tenant.decodes.size
            base += tenant.decodes.base
        return size, base + size * (self.rounds - self._origin)

    def tokens_of(self, tenant: Tenant) -> int:
        """Return how many tokens a tenant's requests that decode have taken since they joined."""
        return tenant.decodes.size * self.rounds - tenant.decodes.joined

    def blocks_of(self, tenant: Tenant) -> int:
        """Return how many KV blocks a tenant's requests that decode have."""
        decodes = tenant.decodes
        turns, place = divmod(self.rounds, self.block_tokens)
        return decodes.blocks + turns * decodes.size + sum(decodes.crossings[:place])

    def growth(self) -> int:
        """Return how many KV blocks the next round needs."""
        return self._crossings[self.rounds % self.block_tokens]

    def growth_of(self, tenant: Tenant) -> int:
        """Return how many KV blocks a tenant needs in the next round."""
        return tenant.decodes.crossings[self.rounds % self.block_tokens]

    # -- rounds -------------------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Count a token for each who decodes."""
        self._open.append([])
        self.rounds += 1

    def end_round(self, token_s: float, context_s: float, usage_scale: float) -> list[Change]:
        """Charge the oldest round that has not ended; returns what was otherwise in it."""
        token_s += context_s * (self.ended - self._origin)
        self._token_s, self._context_s = token_s, context_s
        self.ended += 1
        all_token_s, all_context_s, token_usage, context_usage = self._sums
        self._sums = (
            all_token_s + token_s,
            all_context_s + context_s,
            token_usage + token_s * usage_scale,
            context_usage + context_s * usage_scale,
        )
        return self._open.popleft()

    def last_s(self, tenant: Tenant) -> float:
        """Return what the round that has just ended costs a tenant, in seconds, but for what was otherwise in it."""
        return tenant.decodes.size * self._token_s + tenant.decodes.base * self._context_s

    def settle(self, tenant: Tenant) -> float:
        """Charge a tenant what it owes; returns that."""
        decodes = tenant.decodes
        mark, sums = decodes.mark, self._sums
        if mark is sums:
            return 0.0
        decodes.mark = sums
        size = decodes.size
        if not size:
            return 0.0
        base = decodes.base
        token_s, context_s, token_usage, context_usage = sums
        old_token_s, old_context_s, old_token_usage, old_context_usage = mark
        charge_s = size * (token_s - old_token_s) + base * (context_s - old_context_s)
        tenant.step_s += charge_s
        tenant.virtual_s += charge_s * tenant.inverse_weight
        tenant.usage += size * (token_usage - old_token_usage) + base * (context_usage - old_context_usage)
        return charge_s

    def settle_all(self) -> None:
        """Settle everybody, and begin the sums anew."""
        for tenant in self.tenants:
            self.settle(tenant)
        passed = self.ended - self._origin
        self._origin = self.ended
        self._sums = _NOTHING
        self._base += self.size * passed
        for tenant in self.tenants:
            tenant.decodes.base += tenant.decodes.size * passed
            tenant.decodes.mark = self._sums

    # -- inside -------------------------------------------------------------------------------------------------------

    def _change(self, request: Request, count: int) -> None:
        """Count a request that joins (1) or leaves (-1); its `computed` says where it stood in round `joined`."""
        tenant, joined = request.tenant, request.joined
        decodes = tenant.decodes
        ahead = request.computed - joined
        place = -ahead % self.block_tokens
        base = count * (ahead + self._origin)
        decodes.size += count
        decodes.base += base
        decodes.joined += count * joined
        decodes.blocks += count * ((ahead + place) // self.block_tokens)
        decodes.crossings[place] += count
        self.size += count
        self._base += base
        self._crossings[place] += count
        if self._open:
            for number, changes in enumerate(self._open, self.ended - self._origin):
                changes.append((tenant, -count, -base - count * number))
