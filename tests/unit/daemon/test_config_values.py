"""Values of the configuration file: what is taken, and what the refusal of the rest says."""

from __future__ import annotations

from typing import Any

import pytest

from seedance.daemon import config_values
from seedance.daemon.config_values import at_least
from seedance.qos import units
from seedance.qos.toml import Reader

_sizes = at_least(1024, units.parse_size, "32KiB")


@pytest.mark.parametrize(
    ("read", "value", "wanted"),
    [
        (config_values.read_rate, 0, 0.0),
        (config_values.read_rate, 0.5, 0.5),
        (config_values.read_connections, 0.001, 0.001),
        (config_values.read_horizon, "60s", 60.0),
        (config_values.read_folder, "/srv//models/../cpu", "/srv/cpu"),
        (config_values.read_devices, [], ()),
        (config_values.read_devices, ["eth0", "lo"], ("eth0", "lo")),
        (config_values.read_probability, "0%", 0.0),
        (config_values.read_part, "100%", 1.0),
        (config_values.read_tables, {"night": 1}, {"night": 1}),
        (config_values.read_duration, "1500ms", 1.5),
        (_sizes, "1KiB", 1024),
    ],
)
def test_what_is_taken(read: Reader, value: object, wanted: Any) -> None:
    assert read(value) == wanted


@pytest.mark.parametrize(
    ("read", "value", "reason"),
    [
        (config_values.read_rate, True, "a number from 0 to 1000000000"),
        (config_values.read_rate, -1, "a number from 0 to 1000000000"),
        (config_values.read_connections, 0, 'a number from 0.001 up, or "unlimited"'),
        (config_values.read_horizon, "61s", '"60s" at most'),
        (config_values.read_folder, "models", "write a whole path, from '/'"),
        (config_values.read_devices, ["sixteen-letters-"], 'write e.g. ["eth0", "lo"]'),
        (config_values.read_devices, "lo", 'write e.g. ["eth0", "lo"]'),
        (config_values.read_probability, "101%", '"100%" at most'),
        (config_values.read_part, "0%", 'something above "0%"'),
        (config_values.read_tables, 3, 'write e.g. "[classes.night]"'),
        (config_values.read_duration, "0s", ""),
        (_sizes, "1023B", 'it is too small to work; write e.g. "32KiB"'),
    ],
)
def test_what_is_refused(read: Reader, value: object, reason: str) -> None:
    with pytest.raises(ValueError, match="cannot") as caught:
        read(value)
    assert reason in str(caught.value)
