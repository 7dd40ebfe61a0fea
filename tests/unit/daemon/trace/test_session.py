"""What the tracing tools show, and what they compile."""

from __future__ import annotations

from typing import Final

import pytest

from seedance.bpf.observe_abi import HISTOGRAM_SLOTS
from seedance.daemon.trace import _session, ack_interval, egress_delay, run_queue

TOOLS: Final = (ack_interval, egress_delay, run_queue)


def histogram(**slots: int) -> list[int]:
    filled = {int(name.removeprefix("slot_")): seen for name, seen in slots.items()}
    return [filled.get(slot, 0) for slot in range(HISTOGRAM_SLOTS)]


def test_a_difference_is_by_tenant_and_slot() -> None:
    before = {(1, 3): 5, (2, 0): 7}
    now = {(1, 3): 9, (1, 4): 1, (2, 0): 7, (3, 31): 2}
    assert _session.difference(now, before) == {1: histogram(slot_3=4, slot_4=1), 3: histogram(slot_31=2)}


def test_a_histogram_is_shown_from_its_first_to_its_last_filled_slot() -> None:
    assert _session.render("acme", "waits", histogram(slot_3=10, slot_5=5)) == [
        "acme: 15 waits, p50 < 16 µs, p90 < 64 µs, p99 < 64 µs",
        "  <    16 µs |" + "#" * 40 + "| 10",
        "  <    32 µs |" + " " * 40 + "| 0",
        "  <    64 µs |" + "#" * 20 + " " * 20 + "| 5",
    ]


@pytest.mark.parametrize(
    ("slot", "text"), [(0, "2 µs"), (8, "512 µs"), (9, "1.02 ms"), (19, "1.05 s"), (31, "4.29e+03 s")]
)
def test_the_end_of_a_slot_has_a_unit_that_suits_it(slot: int, text: str) -> None:
    (line,) = _session.render("acme", "waits", histogram(**{f"slot_{slot}": 1}))[1:]
    assert line.split("|")[0].strip() == f"< {text:>8}".strip()


@pytest.mark.parametrize("module", TOOLS)
def test_every_tool_says_what_it_is_and_names_what_it_uses(module: object) -> None:
    tool: _session.Tool = module.TOOL  # type: ignore[attr-defined]
    assert (module.__doc__ or "").partition("\n")[0].endswith(".")
    assert all(f"${name}" in tool.text for name in tool.offsets)
    assert all(f"$pins/{name}" in tool.text for name in tool.maps)
    assert "count(tenant" in tool.text
