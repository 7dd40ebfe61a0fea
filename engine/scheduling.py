"""What a scheduling policy is told of an engine and its tenants, and what it answers."""

from __future__ import annotations

from typing import Final

import msgspec

from seedance.engine.admission import WindowSettings
from seedance.engine.states import Key
from seedance.qos.quota import Quota


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy is told of its engine, and its own constants.

    `slots` requests may run at once; a step takes `step_tokens` at most; `kv_blocks` of `block_tokens` hold the KV.

    A hard share saves up `burst_s` x share of engine time, and a token rate `burst_s` of tokens; debt is bounded by
    what `max_hold_s` pays back. `shared_for_s` is how long a tenant that has left still counts as being there;
    `usage_window_s` is the memory for what tenants use. `light_fraction` is of a tenant's fair part. `reserved_slots`
    are kept for light tenants where one was there as lately; None is one of 32, two at most. Advances are in seconds of
    engine time: `urgent_advance_s` goes with a priority, `deadline_advance_s` with a deadline that is near,
    `max_advance_s` with a far client or a short request. `priority_s` is how much earlier, for each step of its
    priority, a request counts as submitted among its own tenant's.
    """

    slots: int
    kv_blocks: int
    block_tokens: int = 16
    step_tokens: int = 2048
    burst_s: float = 0.2
    max_hold_s: float = 30.0
    step_target_s: float = 0.03
    protected_slowdown: float = 1.15
    light_fraction: float = 0.5
    patience_s: float = 0.25
    usage_window_s: float = 2.0
    shared_for_s: float = 10.0
    min_chunk_tokens: int = 16
    reserved_slots: int | None = None
    light_advance_s: float = 0.05
    urgent_advance_s: float = 1.0
    deadline_advance_s: float = 0.05
    max_advance_s: float = 0.1
    priority_s: float = 10.0
    window: WindowSettings = WindowSettings()


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's limits as the scheduler keeps them; None is no limit.

    `weight` and `priority` are its class's, against other tenants'. `share` is of the engine's time, `kv_share` of its
    KV blocks. `tokens_per_s` counts prompt and output tokens, those from the prefix cache left out.
    """

    weight: float = 1.0
    priority: int = 0
    share: float | None = None
    kv_share: float | None = None
    tokens_per_s: float | None = None


def limits_of(quota: Quota) -> TenantLimits:
    """Return what of a tenant's quota the scheduler keeps."""
    return TenantLimits(
        weight=quota.weight,
        priority=quota.priority,
        share=quota.gpu.share,
        kv_share=quota.gpu.kv_share,
        tokens_per_s=quota.tokens.per_second,
    )


class Step(msgspec.Struct):
    """What the engine's side does before and in a step; `preempt`, `end`, `hold` and `release` in this order.

    `preempt`: running requests that lose slot and KV blocks, and wait again.
    `end`: requests, running or waiting, to be finished with `quota_exceeded`. The policy has forgotten them.
    `hold`, `release`: running requests to leave out of this step and the next ones, and to take in again. One that gets
    a slot is not held.
    `prefill`: the most tokens to read of each request that is not decoding; none of any other. `admit` are those of
    them that wait, in the order in which they get a slot. What is not scheduled is planned anew.
    """

    preempt: list[Key]
    end: list[Key]
    hold: list[Key]
    release: list[Key]
    admit: list[Key]
    prefill: dict[Key, int]


STEADY: Final = Step([], [], [], [], [], {})
"""A step of all who decode and nobody else, like the one before it: nothing is to be done. Nobody may change it."""


class TenantStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the tenant became known; the present values are `running`, `waiting`, `kv_blocks`, `is_held`.

    `step_s` is engine time charged. `prompt_tokens` counts those read, again or not; `cached_tokens` of prompts were in
    the prefix cache and need not be; `recomputed_tokens` had been computed before a preemption. `queue_s` sums the
    waits of the `started` requests for their first slot.
    """

    step_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    held_s: float
    preemptions: int
    recomputed_tokens: int
    queue_s: float
    started: int
    running: int
    waiting: int
    kv_blocks: int
    is_held: bool


NOTHING_COUNTED: Final = TenantStatistics(
    step_s=0.0,
    prompt_tokens=0,
    cached_tokens=0,
    output_tokens=0,
    held_s=0.0,
    preemptions=0,
    recomputed_tokens=0,
    queue_s=0.0,
    started=0,
    running=0,
    waiting=0,
    kv_blocks=0,
    is_held=False,
)
"""Those of a tenant that has done nothing yet."""
