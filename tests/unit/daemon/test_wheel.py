from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.daemon.wheel import EARLY, MOST_PLACES, SHORTEST_PLACE_S, TOGETHER, Wheel

PERIOD_S = 14.0
PLACE_S = 0.01
MEMBERS = st.integers(0, 30)
CHANGES = st.lists(st.tuples(st.floats(0, 5), MEMBERS, st.booleans()), max_size=100)


@given(CHANGES, st.sampled_from([0.02, 1.0, PERIOD_S]), st.floats(0, 1e6))
def test_nobody_waits_longer_than_a_period(changes: list[tuple[float, int, bool]], period_s: float, now: float) -> None:
    wheel: Wheel[int] = Wheel(period_s, now)
    place_s = max(SHORTEST_PLACE_S, period_s / MOST_PLACES)
    last_s: dict[int, float] = {}
    visited: set[int] = set()
    for after_s, member, comes in changes:
        until_s = now + after_s
        while (next_s := wheel.next_s(now)) <= until_s - now:
            now += next_s + 1e-6
            due = wheel.due(now)
            assert len(set(due)) == len(due)
            for one in due:
                gap_s = now - last_s[one]
                assert gap_s <= period_s + 1e-3
                assert gap_s >= (1 - 2 * EARLY) * period_s - 2 * place_s or one not in visited
                last_s[one] = now
                visited.add(one)
        now = until_s
        assert not wheel.due(now) or next_s < 1e-3, "it was not time yet"
        if comes and member not in last_s:
            wheel.add(member)
            last_s[member] = now
        elif not comes and member in last_s:
            wheel.remove(member)
            del last_s[member]
            visited.discard(member)
        assert list(wheel.members) == list(last_s)


@pytest.mark.parametrize("count", [1, 10, 1000, 20_000])
def test_who_comes_at_once_is_not_visited_at_once(count: int) -> None:
    wheel: Wheel[int] = Wheel(PERIOD_S, 0.0)
    for member in range(count):
        wheel.add(member)
    sizes = [len(wheel.due((turn + 0.5) * PLACE_S)) for turn in range(1, 1401)]
    assert sum(sizes[:1280]) == count
    assert not any(sizes[:630])
    assert max(sizes) <= TOGETHER + 2 + count / 600


def test_some_are_visited_together() -> None:
    wheel: Wheel[int] = Wheel(PERIOD_S, 0.0)
    for member in range(256):
        wheel.add(member)
    now, turns, visits = 0.0, 0, 0
    while now < 10 * PERIOD_S:
        now += wheel.next_s(now) + 1e-6
        visits += len(wheel.due(now))
        turns += 1
    assert 256 * 10 <= visits <= 256 * 11.2
    assert turns < visits / 15


def test_after_a_long_pause_each_is_visited_once() -> None:
    wheel: Wheel[int] = Wheel(PERIOD_S, 0.0)
    for member in range(100):
        wheel.add(member)
    assert sorted(wheel.due(100 * PERIOD_S)) == list(range(100))


def test_an_empty_wheel_needs_one_turn_in_a_period() -> None:
    wheel: Wheel[int] = Wheel(PERIOD_S, 0.0)
    assert PERIOD_S * (1 - EARLY) <= wheel.next_s(0.0) <= PERIOD_S


def test_only_members_leave() -> None:
    wheel: Wheel[int] = Wheel(PERIOD_S, 0.0)
    with pytest.raises(KeyError):
        wheel.remove(1)
