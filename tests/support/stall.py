"""How long streams stand still, by looking at how much has come of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

_LOOK_EVERY_S = 0.005


class Stall(msgspec.Struct, frozen=True):
    """The longest time in which none of the streams went on, and in which one of them did not that later did."""

    all_s: float
    one_s: float


async def watch(sizes: Callable[[], Sequence[int]], until: Callable[[], bool], limit_s: float) -> Stall:
    """Look every 5 ms until something is so; `sizes` are of the same streams each time."""
    known = list(sizes())
    last_s = [time.monotonic()] * len(known)
    any_s = last_s[0]
    all_stalled_s = one_stalled_s = 0.0
    async with asyncio.timeout(limit_s):
        is_over = False
        while not is_over:
            await asyncio.sleep(_LOOK_EVERY_S)
            is_over, now_s, found = until(), time.monotonic(), list(sizes())
            changed = [at for at, size in enumerate(found) if size != known[at]]
            if changed:
                all_stalled_s, any_s = max(all_stalled_s, now_s - any_s), now_s
            known = found
            for at in changed:
                one_stalled_s, last_s[at] = max(one_stalled_s, now_s - last_s[at]), now_s
    return Stall(all_stalled_s, one_stalled_s)
