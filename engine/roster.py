"""The tenants and requests that a scheduling policy knows, and the states they go through.

    waiting ──admit──► prefill ──all of the prompt read──► decode ──finish──► gone
       ▲                  │                                  │
       └─────preempt──────┴──────────────────────────────────┘        a preempted request reads prompt and output again

Beside that a request may be paused (its client does not read) and a tenant held (it has no credit). Such a running
request keeps its KV blocks and is left out of the steps. `hold` tells the engine's side which requests to leave out and
which to take in again.

Nothing here decides. Everything is O(1) or proportional to the requests that change their state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from seedance.engine.decoding import Decoding
from seedance.engine.fairness import VirtualCounters
from seedance.engine.states import DECODE, PREFILL, WAITING, Key, Request, Tenant


class Roster:
    """All tenants and requests.

    `decoders` are the requests that take a token in every step, all in `decoding`; `protected` those running
    requests that must not be preempted, `idle` those that are paused, longest first. `counters.waiting` has the
    tenants of which a request may be admitted: not held, and somebody waits. `hold` collects, until it is emptied,
    which running requests are to be left out of the steps (True) or taken in again (False). `active` tenants have work,
    of `active_weight` together; `active_changes` counts how often that became otherwise. `pressing` waiting requests
    have a priority. `admissible` requests wait, of tenants in `counters.waiting`.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.tenants: dict[int, Tenant] = {}
        self.requests: dict[Key, Request] = {}
        self.decoders: dict[Key, Request] = {}
        self.decoding = Decoding(block_tokens)
        self.prefilling: dict[Key, Request] = {}
        self.protected: dict[Key, Request] = {}
        self.idle: dict[Key, Request] = {}
        self.counters: VirtualCounters[Tenant] = VirtualCounters(self.decoding.settle)
        self.active: dict[Tenant, None] = {}
        self.active_changes = 0
        self.active_weight = 0.0
        self.pressing = 0
        self.admissible = 0
        self.hold: dict[Key, bool] = {}
        self._ticket = 0

    def blocks(self, tokens: int) -> int:
        """Return how many KV blocks hold that many tokens."""
        return -(-tokens // self.block_tokens)

    def submit(self, request: Request) -> None:
        """Take in a new request, as waiting."""
        assert request.key not in self.requests, "a request with this key is there already"
        tenant = request.tenant
        if tenant not in self.active:
            self.active[tenant] = None
            self.active_changes += 1
            self.active_weight += tenant.weight
        self.requests[request.key] = request
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Let a waiting request stand in its tenant's queue."""
        tenant = request.tenant
        self.put_back(request)
        tenant.queued += 1
        self.pressing += request.priority > 0
        if not tenant.is_held:
            self.admissible += 1
            self.counters.enter(tenant)

    def put_back(self, request: Request) -> None:
        """Return a waiting request that was taken out of its queue, and did not get a slot, to its place there."""
        self._ticket += 1
        request.ticket = self._ticket
        request.tenant.queue.push(request)

    def admit(self, request: Request, cached_tokens: int, now_s: float) -> None:
        """Give a waiting request a slot; `cached_tokens` of it are in the prefix cache."""
        tenant, key = request.tenant, request.key
        self._dequeue(request)
        request.phase = PREFILL
        request.computed = cached_tokens
        request.is_left_out = False
        tenant.running[key] = request
        tenant.prefilling[key] = self.prefilling[key] = request
        if request.is_paused:
            self.idle[key] = request
        if cached_tokens:
            tenant.counted_blocks += self.blocks(cached_tokens)
        if request.preemptions and request.is_protected:
            tenant.protected[key] = self.protected[key] = request
        if not request.preemptions:
            tenant.cached_tokens += cached_tokens
            tenant.queue_s += now_s - request.queued_s
            tenant.started += 1

    def prompt_read(self, request: Request, tokens: int) -> bool:
        """Count prompt tokens that a step has read; returns whether the request's next token has come out of it."""
        tenant = request.tenant
        computed = request.computed + tokens
        tenant.counted_blocks += self.blocks(computed) - self.blocks(request.computed)
        request.computed = computed
        if computed < request.target:
            return False
        del tenant.prefilling[request.key]
        del self.prefilling[request.key]
        request.phase = DECODE
        self._join(request)
        return True

    def preempt(self, request: Request, payer: Tenant | None = None) -> None:
        """Take the slot and the KV blocks from a running request: it waits again and will be read anew.

        `payer` is charged for that; None for its own tenant.
        """
        tenant = request.tenant
        computed = request.position
        billed = computed
        if request.phase is DECODE:
            # The last token came out, and was not yet read.
            billed = request.target = computed + 1
            request.urgent_s = math.inf
        request.billed_tokens = max(request.billed_tokens, billed)
        request.payer = payer
        self._leave(request)
        request.phase = WAITING
        request.computed = 0
        request.preemptions += 1
        # The last token comes out, and is not read.
        whole = request.prompt_tokens + request.max_tokens - 1
        request.reserved_tokens = max(request.target, whole) if request.is_protected else request.target
        tenant.preemptions += 1
        tenant.recomputed_tokens += computed
        if request.is_paused:
            tenant.paused_waiting += 1
        else:
            self.enqueue(request)

    def finish(self, key: Key) -> Request | None:
        """Forget a request, whatever its state; None for an unknown one."""
        request = self.requests.pop(key, None)
        if request is None:
            return None
        tenant = request.tenant
        if request.phase is not WAITING:
            self._leave(request)
        elif request.is_paused:
            tenant.paused_waiting -= 1
        else:
            self._dequeue(request)
        if not (tenant.queued or tenant.running or tenant.paused_waiting):
            del self.active[tenant]
            self.active_changes += 1
            self.active_weight -= tenant.weight
            tenant.queue.clear()
        return request

    def pause(self, request: Request, now_s: float) -> None:
        """Leave a request out until it is resumed."""
        tenant = request.tenant
        if request.phase is WAITING:
            self._dequeue(request)
            tenant.paused_waiting += 1
        else:
            self._part(request)
        request.is_paused = True
        request.paused_s = now_s
        if request.phase is not WAITING:
            self.idle[request.key] = request
        self._tell(request)

    def resume(self, request: Request) -> None:
        """Take a paused request in again."""
        tenant = request.tenant
        request.is_paused = False
        self.idle.pop(request.key, None)
        if request.phase is WAITING:
            tenant.paused_waiting -= 1
            self.enqueue(request)
        elif request.phase is DECODE:
            self._join(request)
        self._tell(request)

    def hold_tenant(self, tenant: Tenant) -> None:
        """Leave a tenant out of the steps."""
        tenant.is_held = True
        self.admissible -= tenant.queued
        self.counters.leave(tenant, is_held=True)
        for request in tenant.running.values():
            self._part(request)
            self._tell(request)

    def release_tenant(self, tenant: Tenant) -> None:
        """Take a held tenant in again."""
        tenant.is_held = False
        self.admissible += tenant.queued
        if tenant.queued:
            self.counters.enter(tenant)
        for request in tenant.running.values():
            if request.phase is DECODE:
                self._join(request)
            self._tell(request)

    def outstanding(self, requests: Iterable[Request]) -> int:
        """Return how many KV blocks are promised to running requests beyond those they have, the next token's too."""
        return sum(
            max(0, self.blocks(request.reserved_tokens + 1) - self.blocks(request.position)) for request in requests
        )

    def promised(self) -> int:
        """Return the KV blocks that are promised to all who read a prompt, or must not be preempted."""
        if not self.prefilling and not self.protected:
            return 0
        return self.outstanding((self.prefilling | self.protected).values())

    def running(self) -> Iterator[Request]:
        """Yield every request that has a slot."""
        for tenant in self.tenants.values():
            yield from tenant.running.values()

    def _tell(self, request: Request) -> None:
        is_left_out = request.is_paused or request.tenant.is_held
        if request.phase is not WAITING and is_left_out != request.is_left_out:
            request.is_left_out = is_left_out
            self.hold[request.key] = is_left_out

    def _dequeue(self, request: Request) -> None:
        tenant = request.tenant
        request.ticket = 0
        tenant.queued -= 1
        self.pressing -= request.priority > 0
        self.admissible -= not tenant.is_held
        if not tenant.queued:
            self.counters.leave(tenant)

    def _join(self, request: Request) -> None:
        if not request.is_paused and not request.tenant.is_held:
            self.decoders[request.key] = request
            self.decoding.join(request)

    def _part(self, request: Request) -> None:
        if self.decoders.pop(request.key, None) is not None:
            self.decoding.leave(request)

    def _leave(self, request: Request) -> None:
        tenant, key = request.tenant, request.key
        if request.phase is PREFILL:
            del tenant.prefilling[key]
            del self.prefilling[key]
        else:
            self._part(request)
        tenant.counted_blocks -= self.blocks(request.computed)
        del tenant.running[key]
        if request.preemptions and request.is_protected:
            del tenant.protected[key]
            del self.protected[key]
        if request.is_paused:
            del self.idle[key]
        self.hold.pop(key, None)
