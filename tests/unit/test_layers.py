"""The runner of the layers: what stops it, what counts as skipped, and what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import layers
import pytest
from layers import SKIPPED, Layer, Outcome, read_report, run, run_layers

NAMES = ("lint", "unit", "vm")


def run_with(outcomes: dict[str, Outcome], expected: str = "") -> tuple[int, list[str]]:
    ran: list[str] = []

    def run_one(layer: Layer) -> Outcome:
        ran.append(layer.name)
        return outcomes.get(layer.name, Outcome(0))

    return run_layers([Layer(name, 1) for name in NAMES], frozenset(expected.split()), run_one), ran


@pytest.mark.parametrize(
    ("summary", "outcomes", "expected", "status", "ran"),
    [
        ("all pass", {}, "lint unit vm", 0, NAMES),
        ("the first failure is the last to run", {"unit": Outcome(1)}, "", 1, NAMES[:2]),
        ("too slow is a failure", {"lint": Outcome(124)}, "", 1, NAMES[:1]),
        ("skipped is well", {"vm": Outcome(SKIPPED, ("no QEMU",))}, "", 0, NAMES),
        ("skipped though expected is not", {"vm": Outcome(SKIPPED, ("no QEMU",))}, "vm", 1, NAMES),
        ("an infrastructure failure is no skip", {"vm": Outcome(69)}, "", 1, NAMES),
    ],
)
def test_what_stops_the_run(
    summary: str, outcomes: dict[str, Outcome], expected: str, status: int, ran: tuple[str, ...]
) -> None:
    assert run_with(outcomes, expected) == (status, list(ran)), summary


def test_every_layer_that_did_not_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    run_with({"vm": Outcome(SKIPPED, ("no QEMU here",))})
    assert "vm         skipped" in (text := capsys.readouterr().out)
    assert "skipped: no QEMU here" in text


def report(path: Path, *cases: str) -> Path:
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


PASSED = "<testcase name='a'/>"
LEFT_OUT = "<testcase name='b'><skipped message='Skipped: no GPU'/></testcase>"


def test_a_layer_of_which_something_ran_has_passed(tmp_path: Path) -> None:
    assert read_report(report(tmp_path / "r.xml", PASSED, LEFT_OUT, LEFT_OUT)) == Outcome(0, ("no GPU",))


def test_a_layer_of_which_nothing_ran_was_skipped(tmp_path: Path) -> None:
    assert read_report(report(tmp_path / "r.xml", LEFT_OUT)) == Outcome(SKIPPED, ("no GPU",))


def test_a_command_that_takes_too_long_is_ended() -> None:
    assert run([sys.executable, "-c", "import signal; signal.pause()"], 0.2) == 124
    assert run([sys.executable, "-c", "raise SystemExit(3)"], 30) == 3


def test_unknown_layers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        layers.main(["unti"])
    assert ended.value.code == 2
    assert "cannot run unti" in capsys.readouterr().err


def test_ci_expects_layers_that_exist() -> None:
    text = (layers.ROOT / ".ci" / "run").read_text()
    expected = text.partition('EXPECT="')[2].partition('"')[0].split()
    assert set(expected) <= {layer.name for layer in layers.LAYERS}
    assert {"lint", "unit", "component", "packaging", "vm", "e2e"} <= set(expected)
