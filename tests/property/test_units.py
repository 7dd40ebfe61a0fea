"""What the unit readers promise for any input."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.qos import units

PARSERS: list[Callable[[object], float]] = [
    units.parse_size,
    units.parse_rate,
    units.parse_duration,
    units.parse_percentage,
]
toml_values = st.one_of(
    st.text(max_size=20),
    st.from_regex(r"-?[0-9]{1,25}(\.[0-9]{1,12})? ?[a-zA-Z%]{0,5}", fullmatch=True),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@pytest.mark.parametrize("parse", PARSERS)
@given(value=toml_values)
def test_any_value_is_a_quantity_or_a_reasoned_refusal(parse: Callable[[object], float], value: object) -> None:
    quantity: float | None
    try:
        quantity, refusal = parse(value), ""
    except ValueError as exc:
        quantity, refusal = None, str(exc)
    if quantity is None:
        assert refusal.startswith("cannot ")
        assert "; write e.g. " in refusal
    else:
        assert 0 <= quantity < float("inf")


@given(count=st.integers(0, 10**5), unit=st.sampled_from(["B", "kB", "KiB", "MB", "MiB", "GB", "GiB", "TB", "TiB"]))
def test_sizes_scale(count: int, unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    power = " kMGT".index(unit[0].replace("K", "k").replace("B", " "))
    assert units.parse_size(f"{count}{unit}") == count * base**power


@given(milli=st.integers(0, 10**9))
def test_fractions_are_exact(milli: int) -> None:
    written = f"{milli // 1000}.{milli % 1000:03d}"
    assert units.parse_size(written + "kB") == milli
    assert units.parse_duration(written + "s") == milli / 1000
    assert units.parse_percentage(written + "%") == float(Fraction(milli, 100_000))
