"""How fast a queue drains."""

from __future__ import annotations

import pytest

from seedance.engine.drain import DrainRate, wait_s


def test_the_rate_is_that_of_late() -> None:
    drain = DrainRate()
    assert drain.per_s(0.0) == 0.0
    for at in range(600):
        drain.left(1, at / 10)
    assert drain.per_s(60.0) == pytest.approx(10.0, rel=0.05)
    assert drain.per_s(70.0) == pytest.approx(10.0 / 2.718, rel=0.05)


@pytest.mark.parametrize(
    ("places", "per_s", "seconds"), [(5, 0.0, 1.0), (10, 2.0, 5.0), (1, 1e6, 0.1), (10_000, 1.0, 60.0)]
)
def test_a_wait_is_neither_nothing_nor_for_ever(places: int, per_s: float, seconds: float) -> None:
    assert wait_s(places, per_s) == seconds
