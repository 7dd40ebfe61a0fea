"""The text of a new tenant's file."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from seedance.daemon.tenant_file import new_text
from seedance.qos.quota import load


def test_the_file_says_what_was_asked_for() -> None:
    settings = {
        "keys": ["sha256:" + "a" * 64],
        "class": "gold",
        "cpu.max": "150%",
        "tokens.streams": 8,
        "best_effort": True,
        "network.egress": "8Mbit",
        "tokens.per_second": 100,
    }
    text = new_text("acme", settings)
    assert text == (
        '# The tenant "acme".\n'
        f'keys = ["sha256:{"a" * 64}"]\n'
        'class = "gold"\n'
        "best_effort = true\n"
        '\n[cpu]\nmax = "150%"\n'
        "\n[tokens]\nstreams = 8\nper_second = 100\n"
        '\n[network]\negress = "8Mbit"\n'
    )
    quota = load(text, "acme.toml", "acme")
    assert (quota.scheduling_class, quota.best_effort, quota.cpu.max_cores) == ("gold", True, 1.5)
    assert (quota.tokens.streams, quota.tokens.per_second) == (8, 100)
    assert quota.network.egress_bytes_per_s == 1_000_000


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_stays_what_it_was(text: str) -> None:
    assert tomllib.loads(new_text("a", {"class": text, "cpu.max": text})) == {"class": text, "cpu": {"max": text}}
