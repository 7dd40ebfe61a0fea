"""Quantities for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.daemon.quantities import exact_duration, exact_rate, exact_size, scaled
from seedance.qos.units import parse_duration, parse_rate, parse_size


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(1, "1B"), (1023, "1023B"), (1024, "1KiB"), (1 << 29, "512MiB"), (3 << 30, "3GiB"), (2 << 40, "2TiB")],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert exact_size(size_bytes) == text


@pytest.mark.parametrize(
    ("rate_bytes_per_s", "text"),
    [(1, "8bit"), (125, "1kbit"), (6_250_000, "50Mbit"), (187_500, "1500kbit"), (125_000_000, "1Gbit")],
)
def test_rates(rate_bytes_per_s: int, text: str) -> None:
    assert exact_rate(rate_bytes_per_s) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.02, "20ms"), (1.5, "1.5s"), (59.0, "59s"), (60.0, "1min"), (5400.0, "90min"), (7200.0, "2h"), (172800.0, "2d")],
)
def test_durations(duration_s: float, text: str) -> None:
    assert exact_duration(duration_s) == text


@given(st.integers(1, 1 << 62))
def test_what_is_written_is_read_as_the_same(quantity: int) -> None:
    assert parse_size(exact_size(quantity)) == quantity
    assert parse_rate(exact_rate(quantity // 8 + 1)) == quantity // 8 + 1


@given(st.integers(1, 10**9))
def test_durations_in_milliseconds_are_read_as_the_same(milliseconds: int) -> None:
    assert parse_duration(exact_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000, rel=1e-12)


@pytest.mark.parametrize(
    ("quantity", "text"),
    [
        (0, "0B"),
        (999.4, "999B"),
        (999.6, "1.0kB"),
        (12_345, "12.3kB"),
        (99_949, "99.9kB"),
        (99_951, "100kB"),
        (123_456_789, "123MB"),
        (5e9, "5.0GB"),
        (7e15, "7000TB"),
    ],
)
def test_scaled(quantity: float, text: str) -> None:
    assert scaled(quantity, "B") == text
