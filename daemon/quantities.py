"""Quantities for people: limits exactly, in the units of the tenants' files; and what was measured, in three digits."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

_SIZES: Final = [(f"{letter}iB", 1024**power) for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K"))]
_RATES: Final = [("Tbit", 10**12), ("Gbit", 10**9), ("Mbit", 10**6), ("kbit", 10**3)]
_PREFIXES: Final = ("", "k", "M", "G", "T")
_DURATIONS: Final = [("d", 86_400), ("h", 3600), ("min", 60)]


def exact_size(size_bytes: int) -> str:
    """Return a size as a file would say it, in the largest unit in which it is whole: "512MiB"."""
    return next((f"{size_bytes // unit}{name}" for name, unit in _SIZES if size_bytes % unit == 0), f"{size_bytes}B")


def exact_rate(rate_bytes_per_s: int) -> str:
    """Return a rate as a file would say it, in bits a second: "1500kbit"."""
    rate = rate_bytes_per_s * 8
    return next((f"{rate // unit}{name}" for name, unit in _RATES if rate % unit == 0), f"{rate}bit")


def exact_duration(duration_s: float) -> str:
    """Return a duration as a file would say it: "90min", "1.5s", "20ms"."""
    exact = Decimal(repr(duration_s))
    if exact < 1:
        return f"{_plain(exact * 1000)}ms"
    for name, unit in _DURATIONS:
        if exact % unit == 0:
            return f"{_plain(exact / unit)}{name}"
    return f"{_plain(exact)}s"


def _plain(number: Decimal) -> str:
    return f"{number.normalize():f}"


def scaled(quantity: float, unit: str) -> str:
    """Return a quantity of bytes or bits in three digits with a decimal prefix: "12.3Mbit"."""
    steps = 0
    while quantity >= 999.5 and steps < len(_PREFIXES) - 1:
        quantity /= 1000
        steps += 1
    prefix = _PREFIXES[steps]
    digits = 1 if prefix and quantity < 99.95 else 0
    return f"{quantity:.{digits}f}{prefix}{unit}"
