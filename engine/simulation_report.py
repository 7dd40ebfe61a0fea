"""What a simulation found out, for each tenant."""

from __future__ import annotations

import math
from typing import Final

import msgspec

_PER_FACTOR_E: Final = 200


class Durations:
    """Many durations in little room: counts by their logarithm, so that a quantile is exact to half a percent."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0

    def add(self, duration_s: float, count: int = 1) -> None:
        """Count a duration, which may be 0, `count` times."""
        if count:
            place = round(math.log(max(duration_s, 1e-9)) * _PER_FACTOR_E)
            self._counts[place] = self._counts.get(place, 0) + count
            self.count += count

    def quantile(self, part: float) -> float | None:
        """Return the duration that a part of all do not exceed; None where there are none."""
        rank = max(1, math.ceil(part * self.count))
        for place, count in sorted(self._counts.items()):
            rank -= count
            if rank <= 0:
                return math.exp(place / _PER_FACTOR_E)
        return None


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a tenant fared.

    `share` is its part of all engine time charged. `refused` requests never ran; `unfinished` ones ran or waited at the
    end. `queue_s` is the mean wait for a slot, `kv_blocks` the most it had at once. Times to the first token are
    since arrival; those between tokens include being held and preempted. None where there is nothing to measure.
    """

    requests: int
    finished: int
    refused: int
    quota_exceeded: int
    unfinished: int
    prompt_tokens: int
    output_tokens: int
    share: float
    step_s: float
    held_s: float
    queue_s: float
    preemptions: int
    recomputed_tokens: int
    kv_blocks: int
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    between_tokens_p50_s: float | None
    between_tokens_p99_s: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How a simulation went: virtual seconds passed, those of them in steps, and the tenants by name."""

    end_s: float
    busy_s: float
    steps: int
    output_tokens: int
    tenants: dict[str, TenantReport]
