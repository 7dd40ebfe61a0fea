"""Quantities as people write them in files, into base units: bytes, bytes per second, seconds, fractions.

Each function takes a value as TOML gave it and raises ValueError with a text that says what would be right. A unit's
case counts, as in `tc` and SI: `Mbit` is a million bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

# The kernel keeps such quantities in signed 64 bits.
MAX_QUANTITY: Final = (1 << 63) - 1

_SHOWN_CHARS: Final = 60
_NUMBER: Final = re.compile(r"(\d{1,20}(?:\.\d{1,9})?) ?([A-Za-z%]*)", re.ASCII)

_SIZES: Final = {"B": 1} | {
    f"{prefix}B": factor
    for power, letter in enumerate(("k", "M", "G", "T"), start=1)
    for prefix, factor in ((letter, 1000**power), (f"{letter.upper()}i", 1024**power))
}
_RATES: Final = {"bit": 1, "kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
_DURATIONS: Final = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}


def parse_size(value: object) -> int:
    """Return a size in bytes: `"2GiB"`, `"512MiB"`, `"10kB"`, or a plain integer of bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _within(Fraction(value), value, "size", "2GiB")
    return _within(_scaled(value, _SIZES, "size", "2GiB"), value, "size", "2GiB")


def parse_rate(value: object) -> int:
    """Return a rate in bytes per second from one in bits per second: `"50Mbit"`, `"1Gbit"`; never 0.

    A plain number is refused: half of its readers take it for bytes and half for bits.
    """
    rate_bytes_per_s = _within(_scaled(value, _RATES, "rate", "50Mbit") / 8, value, "rate", "50Mbit")
    if rate_bytes_per_s == 0:
        raise ValueError(f'cannot use {shown(value)} as a rate: it is under one byte per second; write e.g. "50Mbit"')
    return rate_bytes_per_s


def parse_duration(value: object) -> float:
    """Return a duration in seconds: `"10min"`, `"2s"`, `"500ms"`, `"1h"`, `"1d"`, or a plain number of seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) or not 0 <= value <= MAX_QUANTITY:
            raise _refusal(value, "duration", "10min")
        return float(value)
    return float(_scaled(value, _DURATIONS, "duration", "10min"))


def parse_percentage(value: object) -> float:
    """Return a percentage as a fraction of one: `"150%"` is 1.5.

    A plain number is refused, because 0.5 could mean a half or half a percent.
    """
    return float(_scaled(value, {"%": Fraction(1, 100)}, "percentage", "25%"))


def _scaled(value: object, units: Mapping[str, int | Fraction], kind: str, example: str) -> Fraction:
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _refusal(value, kind, example)
    number, unit = match.groups()
    if unit not in units:
        said = f"has the unknown unit '{unit}'" if unit else "has no unit"
        known = ", ".join(units)
        raise ValueError(f'cannot read {shown(value)} as a {kind}: it {said} (known: {known}); write e.g. "{example}"')
    return Fraction(number) * units[unit]


def _within(quantity: Fraction, value: object, kind: str, example: str) -> int:
    if not 0 <= quantity <= MAX_QUANTITY:
        raise _refusal(value, kind, example)
    return int(quantity)


def _refusal(value: object, kind: str, example: str) -> ValueError:
    return ValueError(f'cannot read {shown(value)} as a {kind}; write e.g. "{example}"')


def shown(value: object) -> str:
    """Return a value as TOML writes it, cut to a length that fits into a line."""
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
