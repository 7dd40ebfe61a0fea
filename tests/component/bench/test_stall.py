"""How long streams stand still, in real time."""

from __future__ import annotations

import asyncio

from support.stall import watch


def test_a_stall_that_ends_with_the_last_look_counts() -> None:
    sizes, looks = [1, 1], 0

    def until() -> bool:
        nonlocal looks
        looks += 1
        if looks == 4:
            sizes[:] = [2, 2]
        return looks == 4

    stall = asyncio.run(watch(lambda: sizes, until, 10.0))
    assert stall.all_s == stall.one_s >= 4 * 0.005


def test_one_stream_may_stand_still_while_others_go_on() -> None:
    sizes, looks = [1, 1], 0

    def until() -> bool:
        nonlocal looks
        looks += 1
        sizes[0] += 1
        sizes[1] += looks == 10
        return looks == 10

    stall = asyncio.run(watch(lambda: sizes, until, 10.0))
    assert stall.one_s >= 10 * 0.005
    assert stall.all_s < stall.one_s
