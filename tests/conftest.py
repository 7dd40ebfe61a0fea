"""The layer of each test, by its folder; and at the end, how many ran in each and why others did not."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline per example: other work on the machine says nothing about the code.
settings.register_profile("calm", deadline=None)
settings.load_profile("calm")

_TESTS = Path(__file__).parent


def _layer(item_path: Path) -> str:
    return item_path.relative_to(_TESTS).parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the marker of its layer, so that `-m 'not e2e'` works."""
    for item in items:
        item.add_marker(_layer(item.path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each layer that skipped something: a layer that did not run at all is easily overlooked."""
    ran: collections.Counter[str] = collections.Counter()
    skipped: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            layer = _layer(_TESTS.parent / report.nodeid.partition("::")[0])
            if outcome == "skipped":
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
                skipped[layer][reason.removeprefix("Skipped: ")] += 1
            else:
                ran[layer] += 1
    for layer, reasons in sorted(skipped.items()):
        word = "partly skipped" if ran[layer] else "SKIPPED"
        for reason, count in reasons.items():
            terminalreporter.write_line(f"layer {layer} {word}: {count} × {reason}")
