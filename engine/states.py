"""The states of tenants and of requests, as a scheduling policy sees them. `roster` moves them from one to the next."""

from __future__ import annotations

import enum
import math
from typing import Any, Final, TypeAlias

from seedance.engine.bucket import Bucket
from seedance.engine.decoding import Decodes, Decoding
from seedance.engine.tenant_queue import TenantQueue

# Anything hashable. Not `Hashable`: the key type of a mapping is invariant, and nobody could pass a dict[str, int].
Key: TypeAlias = Any

MAX_PREEMPTIONS: Final = 3


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


# To look one up in its class takes as long as a call (Python 3.11).
WAITING: Final = Phase.WAITING
PREFILL: Final = Phase.PREFILL
DECODE: Final = Phase.DECODE


class Request:
    """One request; `order_s` is when it was submitted less what its urgency is worth.

    With a deadline for its first token it is urgent from `urgent_s` on, until that token is out; without one, never.

    `computed` counts the tokens whose KV exists; of a request in `decoding`, those in round `joined`, which is -1 in
    any other. `target` is how many there must be before the next token comes out. `reserved_tokens` have KV blocks
    promised to them; `billed_tokens` have been charged to limits on tokens, and are not when they are read once more.
    `payer` is charged for the engine's time of that: who took its slot, where somebody did.
    """

    __slots__ = (
        "advance_s",
        "billed_tokens",
        "computed",
        "is_left_out",
        "is_paused",
        "joined",
        "key",
        "max_tokens",
        "order_s",
        "paused_s",
        "payer",
        "phase",
        "preemptions",
        "priority",
        "prompt_tokens",
        "queued_s",
        "reserved_tokens",
        "target",
        "tenant",
        "ticket",
        "urgent_s",
    )

    def __init__(self, key: Key, tenant: Tenant, prompt_tokens: int, max_tokens: int, now_s: float) -> None:
        self.key = key
        self.tenant = tenant
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.priority = 0
        self.urgent_s = math.inf
        self.advance_s = 0.0
        self.order_s = now_s
        self.queued_s = now_s
        self.phase: Phase = WAITING
        self.ticket = 0
        self.computed = 0
        self.joined = -1
        self.target = prompt_tokens
        self.reserved_tokens = prompt_tokens
        self.billed_tokens = 0
        self.payer: Tenant | None = None
        self.preemptions = 0
        self.is_paused = False
        self.paused_s = 0.0
        self.is_left_out = False

    @property
    def position(self) -> int:
        """How many tokens have been computed."""
        if self.joined < 0:
            return self.computed
        return self.computed + self.tenant.decoding.rounds - self.joined

    @property
    def is_protected(self) -> bool:
        """Whether it has been preempted as often as a request may be: it must not happen again."""
        return self.preemptions >= MAX_PREEMPTIONS

    @property
    def has_deadline(self) -> bool:
        """Whether its first token is wanted by some time, and is not out yet."""
        return self.urgent_s < math.inf

    @property
    def unread(self) -> int:
        """How many tokens must still be read before the next one comes out."""
        return self.target - self.computed


class Tenant:
    """One tenant: its limits, its requests by state, and what it has used.

    `is_metered` says that there is a pace or a budget for its tokens, `is_exhausted` that the budget is used up.
    `virtual_s` is its counter of fair service, in engine seconds per weight, `claim_s` how far it was behind the others
    when it waited last. `running` has the requests with a slot, `prefilling` those of them whose prompt is being read,
    in order of admission, `protected` those that must not be preempted any more.

    What its decoding has cost is in `virtual_s`, `usage` and `step_s` once it was settled; before, they lag behind (see
    `decoding`). `counted_tokens` and `counted_blocks` are without what its requests that decode have brought since they
    joined, and the blocks that they have; `last_scheduled` is the last round in which any other of its requests was.
    """

    __slots__ = (
        "cached_tokens",
        "claim_s",
        "counted_blocks",
        "counted_tokens",
        "credit",
        "decodes",
        "decoding",
        "held_s",
        "held_since_s",
        "inverse_weight",
        "is_exhausted",
        "is_held",
        "is_metered",
        "kv_blocks",
        "last_scheduled",
        "pace",
        "paused_waiting",
        "preemptions",
        "prefilling",
        "priority",
        "prompt_tokens",
        "protected",
        "queue",
        "queue_s",
        "queued",
        "recomputed_tokens",
        "release_s",
        "row",
        "running",
        "slots",
        "start_rate",
        "started",
        "started_at_s",
        "step_s",
        "tokens_left",
        "usage",
        "virtual_s",
        "weight",
    )

    def __init__(self, row: int, decoding: Decoding) -> None:
        self.row = row
        self.weight = 1.0
        self.inverse_weight = 1.0
        self.priority = 0
        self.credit: Bucket | None = None
        self.pace: Bucket | None = None
        self.kv_blocks: int | None = None
        self.slots: int | None = None
        self.tokens_left: int | None = None
        self.decoding = decoding
        self.decodes = Decodes(decoding.block_tokens)
        self.queue = TenantQueue()
        self.queued = 0
        self.paused_waiting = 0
        self.running: dict[Key, Request] = {}
        self.prefilling: dict[Key, Request] = {}
        self.protected: dict[Key, Request] = {}
        self.counted_blocks = 0
        self.is_held = False
        self.is_metered = False
        self.is_exhausted = False
        self.release_s = 0.0
        self.held_since_s = 0.0
        self.last_scheduled = 0
        self.virtual_s = 0.0
        self.claim_s = 0.0
        self.usage = 0.0
        self.step_s = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.counted_tokens = 0
        self.held_s = 0.0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.queue_s = 0.0
        self.started = 0
        self.start_rate = 0.0
        self.started_at_s = 0.0

    def settle(self) -> float:
        """Charge it for what its decoding has cost so far; returns that, in seconds."""
        return self.decoding.settle(self)

    @property
    def blocks(self) -> int:
        """How many KV blocks its requests have."""
        return self.counted_blocks + self.decoding.blocks_of(self)

    @property
    def output_tokens(self) -> int:
        """How many tokens have come out of its requests."""
        return self.counted_tokens + self.decoding.tokens_of(self)

    @property
    def slots_free(self) -> float:
        """How many slots more it may have."""
        return math.inf if self.slots is None else self.slots - len(self.running)

    @property
    def has_work(self) -> bool:
        """Whether it has any request at all."""
        return bool(self.queued or self.running or self.paused_waiting)
