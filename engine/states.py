"""The states of tenants and of requests, as a scheduling policy sees them. `roster` moves them from one to the next."""

from __future__ import annotations

import enum
import heapq
from typing import Any, Final, TypeAlias

from seedance.engine.bucket import Bucket
from seedance.engine.decode_group import DecodeGroup

# Anything hashable. Not `Hashable`: the key type of a mapping is invariant, and nobody could pass a dict[str, int].
Key: TypeAlias = Any

MAX_PREEMPTIONS: Final = 3


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


class Request:
    """One request; `order_s` is when it was submitted less what its urgency is worth.

    `computed` counts the tokens whose KV exists (for a member of its tenant's decode group see `DecodeGroup`). `target`
    is how many there must be before the next token comes out. `reserved_tokens` have KV blocks promised to them;
    `billed_tokens` have been charged to limits on tokens, and are not when they are read once more.
    """

    __slots__ = (
        "advance_s",
        "billed_tokens",
        "computed",
        "deadline_s",
        "is_left_out",
        "is_paused",
        "joined",
        "key",
        "max_tokens",
        "order_s",
        "paused_s",
        "phase",
        "preemptions",
        "priority",
        "prompt_tokens",
        "queued_s",
        "reserved_tokens",
        "target",
        "tenant",
        "ticket",
    )

    def __init__(self, key: Key, tenant: Tenant, prompt_tokens: int, max_tokens: int, now_s: float) -> None:
        self.key = key
        self.tenant = tenant
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.priority = 0
        self.deadline_s: float | None = None
        self.advance_s = 0.0
        self.order_s = now_s
        self.queued_s = now_s
        self.phase = Phase.WAITING
        self.ticket = 0
        self.computed = 0
        self.joined = 0
        self.target = prompt_tokens
        self.reserved_tokens = prompt_tokens
        self.billed_tokens = 0
        self.preemptions = 0
        self.is_paused = False
        self.paused_s = 0.0
        self.is_left_out = False

    @property
    def position(self) -> int:
        """How many tokens have been computed."""
        if self.phase is Phase.DECODE and not self.is_paused:
            return self.tenant.group.position(self)
        return self.computed

    @property
    def is_protected(self) -> bool:
        """Whether it has been preempted as often as a request may be: it must not happen again."""
        return self.preemptions >= MAX_PREEMPTIONS

    @property
    def may_be_urgent(self) -> bool:
        """Whether it has a priority or a deadline."""
        return self.priority > 0 or self.deadline_s is not None

    @property
    def unread(self) -> int:
        """How many tokens must still be read before the next one comes out."""
        return self.target - self.computed


class Tenant:
    """One tenant: its limits, its requests by state, and what it has used.

    `is_metered` says that there is a pace or a budget for its tokens, `is_exhausted` that the budget is used up.
    `virtual_s` is its counter of fair service, in engine seconds per weight. `running` has the requests with a slot,
    `prefilling` those of them whose prompt is being read, in order of admission, `protected` those that must not be
    preempted any more.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "credit",
        "group",
        "held_s",
        "held_since_s",
        "inverse_weight",
        "is_exhausted",
        "is_held",
        "is_metered",
        "kv_blocks",
        "last_scheduled",
        "output_tokens",
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

    def __init__(self, row: int, block_tokens: int) -> None:
        self.row = row
        self.weight = 1.0
        self.inverse_weight = 1.0
        self.priority = 0
        self.credit: Bucket | None = None
        self.pace: Bucket | None = None
        self.kv_blocks: int | None = None
        self.slots: int | None = None
        self.tokens_left: int | None = None
        self.group = DecodeGroup(block_tokens)
        self.queue: list[tuple[float, int, Request]] = []
        self.queued = 0
        self.paused_waiting = 0
        self.running: dict[Key, Request] = {}
        self.prefilling: dict[Key, Request] = {}
        self.protected: dict[Key, Request] = {}
        self.blocks = 0
        self.is_held = False
        self.is_metered = False
        self.is_exhausted = False
        self.release_s = 0.0
        self.held_since_s = 0.0
        self.last_scheduled = 0
        self.virtual_s = 0.0
        self.usage = 0.0
        self.step_s = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.held_s = 0.0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.queue_s = 0.0
        self.started = 0
        self.start_rate = 0.0
        self.started_at_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether it has any request at all."""
        return bool(self.queued or self.running or self.paused_waiting)

    def head(self) -> Request | None:
        """Return the waiting request whose turn is first, of those not taken."""
        queue = self.queue
        # A request that left otherwise than by its turn leaves its entry behind.
        while queue and queue[0][1] != queue[0][2].ticket:
            heapq.heappop(queue)
        return queue[0][2] if queue else None

    def take(self) -> None:
        """Take the head out of turn, to be admitted or put back within this step."""
        heapq.heappop(self.queue)

    def put_back(self, request: Request) -> None:
        """Return a request that was taken to its place."""
        heapq.heappush(self.queue, (request.order_s, request.ticket, request))
