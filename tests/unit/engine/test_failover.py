from __future__ import annotations

import pytest

from seedance.engine.failover import RESTART_MAX_S, STABLE_S, Restarts, in_order
from seedance.engine.request import NOT_URGENT, Urgency


class Waiting:
    def __init__(self, urgency: Urgency) -> None:
        self.urgency = urgency


def test_deadlines_go_first_and_the_others_as_they_came() -> None:
    late, first, second, soon = (Waiting(u) for u in (Urgency(9.0), NOT_URGENT, NOT_URGENT, Urgency(3.0)))
    assert in_order([first, late, second, soon]) == [soon, late, first, second]


def test_first_restart_is_at_once_and_later_ones_wait() -> None:
    restarts = Restarts(1.0, attempts=3)
    waits = []
    for _ in range(8):
        restarts.died(2.0)
        waits.append(restarts.wait_s)
        restarts.succeeded()
    assert waits == [0, 1, 2, 4, 8, 16, RESTART_MAX_S, RESTART_MAX_S]
    restarts.died(STABLE_S)
    assert restarts.wait_s == 0


@pytest.mark.parametrize("attempts", [1, 3])
def test_failures_in_a_row_exhaust_them(attempts: int) -> None:
    restarts = Restarts(1.0, attempts)
    for failure in range(attempts):
        assert not restarts.exhausted, failure
        restarts.failed()
    assert restarts.exhausted
    restarts.succeeded()
    assert not restarts.exhausted
