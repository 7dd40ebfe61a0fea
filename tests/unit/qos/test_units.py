"""Quantities as people write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from seedance.qos import units


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("1KiB", 1024),
        ("10kB", 10_000),
        ("3MB", 3_000_000),
        ("1TiB", 1 << 40),
        ("7B", 7),
        ("1.5KiB", 1536),
        ("2 GiB", 2 << 30),
        (4096, 4096),
        (0, 0),
    ],
)
def test_size(written: object, size_bytes: int) -> None:
    assert units.parse_size(written) == size_bytes


@pytest.mark.parametrize(
    ("written", "rate_bytes_per_s"),
    [("50Mbit", 6_250_000), ("1Gbit", 125_000_000), ("8bit", 1), ("2.5kbit", 312), ("1Tbit", 125_000_000_000)],
)
def test_rate(written: object, rate_bytes_per_s: int) -> None:
    assert units.parse_rate(written) == rate_bytes_per_s


@pytest.mark.parametrize(
    ("written", "duration_s"),
    [
        ("10min", 600.0),
        ("2s", 2.0),
        ("500ms", 0.5),
        ("1h", 3600.0),
        ("1d", 86400.0),
        ("20us", 2e-5),
        (3, 3.0),
        (0.5, 0.5),
    ],
)
def test_duration(written: object, duration_s: float) -> None:
    assert units.parse_duration(written) == duration_s


@pytest.mark.parametrize(("written", "fraction"), [("150%", 1.5), ("25%", 0.25), ("0%", 0.0), ("12.5%", 0.125)])
def test_percentage(written: object, fraction: float) -> None:
    assert units.parse_percentage(written) == fraction


@pytest.mark.parametrize(
    ("parse", "written", "reason"),
    [
        (units.parse_size, "2 turtles", "unknown unit 'turtles' (known: B, kB, KiB, MB, MiB, GB, GiB, TB, TiB)"),
        (units.parse_size, "2G", "unknown unit 'G'"),
        (units.parse_size, "2gib", "unknown unit 'gib'"),
        (units.parse_size, "12", "it has no unit"),
        (units.parse_size, "-1GiB", 'cannot read "-1GiB" as a size; write e.g. "2GiB"'),
        (units.parse_size, "", 'cannot read "" as a size'),
        (units.parse_size, -1, "cannot read -1 as a size"),
        (units.parse_size, 1 << 63, "as a size"),
        (units.parse_size, "9000000000TiB", "as a size"),
        (units.parse_size, "9" * 5000, "as a size"),
        (units.parse_size, True, "cannot read true as a size"),
        (units.parse_size, 1.5, "cannot read 1.5 as a size"),
        (units.parse_size, None, "as a size"),
        (units.parse_size, "٣GiB", "as a size"),
        (units.parse_rate, 1000, 'cannot read 1000 as a rate; write e.g. "50Mbit"'),
        (units.parse_rate, "10MB/s", "as a rate"),
        (units.parse_rate, "50MBit", "unknown unit 'MBit'"),
        (units.parse_rate, "7bit", "under one byte per second"),
        (units.parse_duration, "10m", "unknown unit 'm'"),
        (units.parse_duration, -1, "as a duration"),
        (units.parse_duration, float("inf"), "as a duration"),
        (units.parse_duration, float("nan"), "as a duration"),
        (units.parse_duration, False, "as a duration"),
        (units.parse_percentage, 0.5, 'cannot read 0.5 as a percentage; write e.g. "25%"'),
        (units.parse_percentage, "50", "it has no unit"),
        (units.parse_percentage, "-5%", "as a percentage"),
    ],
)
def test_wrong_quantities_say_what_would_be_right(
    parse: Callable[[object], float], written: object, reason: str
) -> None:
    with pytest.raises(ValueError, match=r"^cannot ") as raised:
        parse(written)
    assert reason in str(raised.value)
    assert "; write e.g. " in str(raised.value)
    assert len(str(raised.value)) < 250


def test_shown_cuts_long_values() -> None:
    assert units.shown("x" * 1000) == '"' + "x" * 59 + "…"
