"""Facts that are read from a text or a quota."""

from __future__ import annotations

import pytest

from seedance.daemon.doctor.probe import limits_wanted, parse_kernel_options
from seedance.qos.quota import load


def test_kernel_options() -> None:
    text = '#\n# Linux/x86 7.0.4\nCONFIG_BPF=y\nCONFIG_NET_SCH_FQ=m\n# CONFIG_TLS is not set\nCONFIG_CC="gcc=x"\n'
    assert parse_kernel_options(text) == {"BPF": "y", "NET_SCH_FQ": "m", "CC": '"gcc=x"'}


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", []),
        ("[tokens]\nstreams = 3\n", []),
        ('[cpu]\nmax = "50%"\ncpuset = "0-1"\n', ["cpu", "cpuset"]),
        ('[memory]\nmax = "1GiB"\n[network]\negress = "8Mbit"\ningress = "4Mbit"\n', ["memory", "egress", "ingress"]),
        ('best_effort = true\n[cpu]\nmax = "50%"\n', []),
    ],
)
def test_limits_that_a_file_insists_on(text: str, limits: list[str]) -> None:
    assert limits_wanted(load(text, "t.toml", "t")) == limits
