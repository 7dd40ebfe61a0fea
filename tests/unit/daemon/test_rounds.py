from __future__ import annotations

import itertools

import pytest

from seedance.daemon.rounds import SHORTEST_TURN_S, Rounds

PERIOD_S = 7.5
AT_ONCE = 64


def visits(rounds: Rounds[int], begin_s: float, periods: float) -> list[tuple[float, list[int]]]:
    """Take every turn when it is due, for so many periods."""
    now, seen = begin_s, []
    while now < begin_s + periods * PERIOD_S:
        now += rounds.next_s(now)
        seen.append((now, rounds.due(now)))
    return seen


@pytest.mark.parametrize("count", [0, 1, AT_ONCE, 1000, 100_000])
def test_each_is_visited_once_in_each_round(count: int) -> None:
    rounds = Rounds(dict.fromkeys(range(count)), PERIOD_S, AT_ONCE, 100.0)
    assert all(not due for _, due in visits(rounds, 100.0, 0.99))
    times: dict[int, list[float]] = {member: [] for member in range(count)}
    for now, due in visits(rounds, 100.0 + 0.99 * PERIOD_S, 4.0):
        for member in due:
            times[member].append(now)
    for seen in times.values():
        assert len(seen) >= 3
        gaps = [later - earlier for earlier, later in itertools.pairwise(seen)]
        assert gaps == pytest.approx([PERIOD_S] * len(gaps), abs=max(0.2, PERIOD_S * AT_ONCE / count))


def test_many_are_not_visited_at_once() -> None:
    rounds = Rounds(dict.fromkeys(range(12_500)), PERIOD_S, AT_ONCE, 0.0)
    turns = visits(rounds, 0.0, 5.0)
    assert max(len(due) for _, due in turns) <= 2 * AT_ONCE
    assert len(turns) <= 5 * PERIOD_S / SHORTEST_TURN_S


def test_few_need_no_turns_of_their_own() -> None:
    assert len(visits(Rounds(dict.fromkeys(range(AT_ONCE)), PERIOD_S, AT_ONCE, 0.0), 0.0, 10.0)) <= 2 * 11


def test_who_has_left_is_not_visited_and_who_comes_is_in_the_next_round() -> None:
    members: dict[str, None] = dict.fromkeys("abcd")
    rounds = Rounds(members, PERIOD_S, AT_ONCE, 0.0)
    assert rounds.due(PERIOD_S) == []
    del members["b"]
    members["e"] = None
    assert rounds.due(1.5 * PERIOD_S) == ["a"]
    assert rounds.due(2 * PERIOD_S) == ["c", "d"]
    assert rounds.due(2.99 * PERIOD_S) == ["a", "c", "d"]
    assert rounds.due(3 * PERIOD_S) == ["e"]
