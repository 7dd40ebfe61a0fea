"""Values that the configuration file has and tenant files do not: what each may be, in base units.

A reader takes a value as TOML has it, and raises ValueError saying what would be right.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final

from seedance.qos import units
from seedance.qos.toml import Reader, above_zero, text

_MAX_PER_S: Final = 1e9
_LEAST_CONNECTIONS_PER_S: Final = 0.001
_LONGEST_HORIZON_S: Final = 60.0
# IFNAMSIZ is 16 with the closing zero; dev_valid_name() forbids "/", ":" and white space.
_DEVICE: Final = re.compile(r"[^\s/:]{1,15}")

read_duration: Final = above_zero(units.parse_duration)


def read_rate(value: object) -> float:
    """Read a number of something a second; 0 stands for as fast as it goes."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_PER_S:
        raise ValueError(f"cannot take {units.shown(value)}; write a number from 0 to {_MAX_PER_S:.0f}")
    return float(value)


def read_connections(value: object) -> float:
    """Read how many connections a source may make in a second."""
    rate = read_rate(value)
    if rate < _LEAST_CONNECTIONS_PER_S:
        least = f"{_LEAST_CONNECTIONS_PER_S:g}"
        raise ValueError(f'cannot take {units.shown(value)}; write a number from {least} up, or "unlimited"')
    return rate


def read_horizon(value: object) -> float:
    """Read how far ahead the kernel may hold a packet back, in seconds."""
    horizon_s = units.parse_duration(value)
    if not 0 < horizon_s <= _LONGEST_HORIZON_S:
        raise ValueError(f'cannot take {units.shown(value)}; write e.g. "2s", "{_LONGEST_HORIZON_S:g}s" at most')
    return horizon_s


def read_folder(value: object) -> str:
    """Read a path from the root on, of a folder or a file."""
    path = text(value)
    if not path.startswith("/"):
        raise ValueError(f"cannot take {units.shown(value)}: write a whole path, from '/'")
    return os.path.normpath(path)


def read_devices(value: object) -> tuple[str, ...]:
    """Read a list of network devices."""
    if not isinstance(value, list) or not all(isinstance(name, str) and _DEVICE.fullmatch(name) for name in value):
        raise ValueError('cannot take anything but a list of network devices; write e.g. ["eth0", "lo"]')
    return tuple(value)


def read_probability(value: object) -> float:
    """Read a percentage that may be 0, as a number up to 1."""
    probability = units.parse_percentage(value)
    if probability > 1:
        raise ValueError(f'cannot take {units.shown(value)} as a probability; write "100%" at most')
    return probability


def read_part(value: object) -> float:
    """Read a percentage of something that may not be nothing, as a number up to 1."""
    part = units.parse_percentage(value)
    if not 0 < part <= 1:
        raise ValueError(f'cannot take {units.shown(value)} as a part; write something above "0%", "100%" at most')
    return part


def read_tables(value: object) -> dict[str, object]:
    """Read tables of any names, whose content somebody else reads."""
    if not isinstance(value, dict):
        raise ValueError('cannot take a value where tables belong; write e.g. "[classes.night]"')
    return value


def at_least(least: int, read: Reader, example: str) -> Reader:
    """Return a reader of quantities that are `least` or more; `example` is one, as it is written."""

    def read_at_least(value: object) -> Any:
        quantity = read(value)
        if quantity < least:
            raise ValueError(f'cannot take {units.shown(value)}: it is too small to work; write e.g. "{example}"')
        return quantity

    return read_at_least
