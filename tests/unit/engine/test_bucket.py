from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.engine.bucket import Bucket

pytestmark = pytest.mark.unit


def test_it_begins_full_and_fills_at_its_rate() -> None:
    bucket = Bucket(0.5, 2.0, 10.0, 0.0)
    assert bucket.level(0.0) == 2.0
    assert bucket.charge(3.0, 0.0) == -1.0
    assert bucket.level(1.0) == -0.5
    assert bucket.level(100.0) == 2.0


def test_debt_is_bounded() -> None:
    bucket = Bucket(1.0, 1.0, 5.0, 0.0)
    assert bucket.charge(1000.0, 0.0) == -5.0
    assert bucket.level(5.5) == 0.5


def test_due_is_when_the_level_is_there_or_the_burst() -> None:
    bucket = Bucket(0.5, 2.0, 10.0, 0.0)
    bucket.charge(3.0, 0.0)
    assert bucket.due_s(1.0, 0.0) == 4.0
    assert bucket.due_s(50.0, 0.0) == 6.0


def test_other_limits_keep_what_is_there_within_bounds() -> None:
    bucket = Bucket(1.0, 10.0, 10.0, 0.0)
    bucket.set_limits(2.0, 4.0, 4.0, 0.0)
    assert bucket.level(0.0) == 4.0
    bucket.charge(9.0, 0.0)
    bucket.set_limits(2.0, 4.0, 1.0, 0.0)
    assert bucket.level(0.0) == -1.0


@given(
    rate=st.floats(0.01, 10.0),
    burst=st.floats(0.01, 10.0),
    events=st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 3.0)), max_size=40),
)
def test_grants_are_bounded_by_rate_burst_and_the_last_charge(
    rate: float, burst: float, events: list[tuple[float, float]]
) -> None:
    bucket = Bucket(rate, burst, 1e9, 0.0)
    now_s = granted = 0.0
    for passed_s, amount in events:
        now_s += passed_s
        if bucket.level(now_s) > 0:
            bucket.charge(amount, now_s)
            granted += amount
            assert granted <= rate * now_s + burst + amount + 1e-6
