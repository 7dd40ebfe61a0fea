"""The runner of the layers: what stops it, what counts as skipped, and what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import layers
import pytest
from layers import SKIPPED, Beside, Layer, Outcome, read_report, run, run_layers

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


FIRST = Layer("first", 1)


def beside(script: str, limit_s: float = 30, name: str = "guest") -> Layer:
    return Layer(name, limit_s, commands=((sys.executable, "-c", script),), is_beside=True)


def wait_for(path: Path) -> None:
    os.close(os.open(path, os.O_RDONLY))  # a FIFO opens when the other side does


def test_a_layer_beside_others_runs_before_its_turn_and_is_shown_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "begun")
    layer = beside(f"open({str(tmp_path / 'begun')!r}, 'w'); print('hello'); raise SystemExit(3)")
    with Beside([FIRST, layer], tmp_path) as running:
        wait_for(tmp_path / "begun")
        assert capsys.readouterr().out == ""
        assert running.run(layer) == Outcome(3)
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.parametrize("status", [0, 1, SKIPPED])
def test_a_layer_beside_others_goes_as_its_command_goes(tmp_path: Path, status: int) -> None:
    layer = beside(f"raise SystemExit({status})")
    with Beside([FIRST, layer], tmp_path) as running:
        assert running.run(layer).status == status


def test_a_layer_beside_others_has_its_limit_from_when_it_began(tmp_path: Path) -> None:
    layer = beside("import signal; signal.pause()", 0.2)
    with Beside([FIRST, layer], tmp_path) as running:
        assert running.run(layer) == Outcome(124)


def test_layers_beside_others_run_one_after_the_other(tmp_path: Path) -> None:
    made, free = tmp_path / "made", tmp_path / "free"
    os.mkfifo(free)
    one = beside(f"open({str(free)!r}).read(); open({str(made)!r}, 'x')", name="one")
    other = beside(f"open({str(made)!r})", name="other")
    with Beside([FIRST, one, other], tmp_path) as running:
        free.write_text("go on")
        assert running.run(other) == Outcome(0)
        assert running.run(one) == Outcome(0)


def test_what_has_not_begun_never_does(tmp_path: Path) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    one = beside(f"import signal; open({str(held)!r}, 'w'); signal.pause()", name="one")
    other = beside(f"open({str(tmp_path / 'begun')!r}, 'x')", name="other")
    with Beside([FIRST, one, other], tmp_path):
        wait_for(held)
    assert not (tmp_path / "begun").exists()


def test_what_has_not_had_its_turn_is_ended(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    layer = beside(f"import signal; held = open({str(tmp_path / 'alive')!r}, 'w'); signal.pause()")
    with Beside([FIRST, layer], tmp_path):
        reader = os.open(tmp_path / "alive", os.O_RDONLY)
    try:
        assert os.read(reader, 1) == b"", "nobody holds the other end any more"
    finally:
        os.close(reader)


def test_the_first_layer_runs_in_its_turn_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    layer = beside("print('seen as it comes')")
    with Beside([layer], tmp_path) as running:
        assert list(tmp_path.iterdir()) == []
        assert running.run(layer) == Outcome(0)
    assert capfd.readouterr().out == "seen as it comes\n"


def test_what_runs_beside_others_is_one_command_and_nothing_before_it_measures_time() -> None:
    names = [layer.name for layer in layers.LAYERS]
    for layer in layers.LAYERS:
        if layer.is_beside:
            assert len(layer.commands) == 1
            assert not {"bpf", "component", "vm", "e2e"} & set(names[: names.index(layer.name)])


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
