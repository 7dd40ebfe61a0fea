"""Run the test layers in order, each under its own time limit, up to the first that fails.

    python tests/layers.py [--expect "vm e2e"] [LAYER...]

A layer that measures no time may run beside those before it: such layers begin at once, one after the other, and are
waited for and shown when their turn comes. Beside them, what all layers need is set up first. Every layer that did not
run says why. With `--expect`, a layer of that list that was skipped is a failure. Exit status: 0 all well, 1 something
failed or was skipped though expected, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Final

ROOT: Final = Path(__file__).resolve().parent.parent
REPORTS: Final = ROOT / "build" / "reports"
SKIPPED: Final = 77
"""Exit status of a command that could not run here, as in liburing's and systemd's tests; it prints the reason last."""

_TIMED_OUT: Final = 124
_NO_TESTS: Final = 5
_GRACE_S: Final = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a command or a layer went; `reasons` says why what was skipped was."""

    status: int
    reasons: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        if self.status == _TIMED_OUT:
            return "timed out"
        return {0: "passed", SKIPPED: "skipped"}.get(self.status, "failed")


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Tests of one kind. `parts` of set-up come first; then its folder under pytest, or else its own commands.

    `is_beside`: it may run beside the layers before it, of which then none may measure time either.
    """

    name: str
    limit_s: float
    parts: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    is_beside: bool = False

    @property
    def folder(self) -> Path:
        return ROOT / "tests" / self.name


_BIN: Final = Path(sys.executable).parent
LAYERS: Final = (
    Layer(
        "lint",
        300,
        commands=(
            (str(_BIN / "ruff"), "format", "--check", "--quiet", "."),
            (str(_BIN / "ruff"), "check", "--quiet", "."),
            (str(_BIN / "mypy"),),
        ),
    ),
    Layer("unit", 300),
    Layer("property", 300),
    Layer("fuzz", 180),
    Layer("packaging", 300),
    Layer("image", 900, parts=("vm",), commands=((sys.executable, "-m", "vm.systemd_run", "--build"),), is_beside=True),
    Layer("baseline", 900, parts=("vm",), commands=((sys.executable, "-m", "vm.run"),), is_beside=True),
    Layer("bpf", 300),
    Layer("component", 1200),
    Layer("vm", 1200, parts=("vm",), commands=((sys.executable, "-m", "vm.systemd_run"),)),
    Layer("e2e", 1200, parts=("engine", "model")),
)


def run(command: Sequence[str], limit_s: float) -> int:
    """Run a command in a process group of its own; return its exit status, 124 when it took too long."""
    return _finish(_start(command), limit_s)


def _start(command: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # tests start hundreds of processes: none is to compile all anew
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stdout=output, stderr=output)


def _finish(process: subprocess.Popen[bytes], limit_s: float) -> int:
    with process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end_group(process)
            return _TIMED_OUT
        except BaseException:
            _end_group(process)
            raise


def _end_group(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_pytest(layer: Layer, limit_s: float) -> Outcome:
    """Run a layer's folder; a layer of which not one test ran counts as skipped."""
    if not any(layer.folder.rglob("test_*.py")):
        return Outcome(SKIPPED, ("it has no tests",))
    report = REPORTS / f"{layer.name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", f"--junitxml={report}", str(layer.folder)]
    status = run(command, limit_s)
    if status == _NO_TESTS:
        return Outcome(SKIPPED, ("it has no tests",))
    if status != 0:
        return Outcome(status)
    return read_report(report)


def read_report(report: Path) -> Outcome:
    """Tell from a junit file whether anything ran, and why what was skipped was."""
    cases = list(ET.parse(report).iter("testcase"))
    skipped = [skip.get("message", "") for case in cases for skip in case.iter("skipped")]
    reasons = tuple(dict.fromkeys(reason.removeprefix("Skipped: ") for reason in skipped))
    return Outcome(0 if len(skipped) < len(cases) else SKIPPED, reasons)


def run_layer(layer: Layer) -> Outcome:
    """Set a layer up and run it."""
    if unable := set_up(layer):
        return unable
    deadline = time.monotonic() + layer.limit_s
    for command in layer.commands:
        if status := run(command, deadline - time.monotonic()):
            return _of_command(status)
    return Outcome(0) if layer.commands else run_pytest(layer, layer.limit_s)


def set_up(layer: Layer) -> Outcome | None:
    """Set up what a layer needs, unless that was done; return why it cannot be, if so."""
    return _set_up(layer.parts) if layer.parts else None


@functools.cache
def _set_up(parts: tuple[str, ...]) -> Outcome | None:
    done = subprocess.run(["packaging/setup.sh", *parts], cwd=ROOT, check=False, stderr=subprocess.PIPE)
    text = done.stderr.decode(errors="replace")
    sys.stderr.write(text)
    return Outcome(SKIPPED, (text.strip().rpartition("\n")[2] or "its set-up failed",)) if done.returncode else None


def _of_command(status: int) -> Outcome:
    return Outcome(status, ("see above",) if status == SKIPPED else ())


class Beside:
    """Layers that run one after the other, beside others, from the beginning of the block on; its end ends them.

    The first one of `layers` is nobody's: it would only be waited for.
    """

    def __init__(self, layers: Sequence[Layer], folder: Path = REPORTS) -> None:
        self._layers = [layer for layer in layers[1:] if layer.is_beside]
        self._folder = folder
        self._pool = ThreadPoolExecutor(1)
        self._going: dict[str, Future[Outcome]] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False

    def __enter__(self) -> Beside:
        for layer in self._layers:
            self._going[layer.name] = self._pool.submit(self._run, layer, set_up(layer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_over = True
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    _end_group(self._process)
        self._pool.shutdown()

    def _run(self, layer: Layer, unable: Outcome | None) -> Outcome:
        self._output(layer).unlink(missing_ok=True)
        if unable:
            return unable
        (command,) = layer.commands
        with self._lock, self._output(layer).open("wb") as output:
            if self._is_over:
                return Outcome(SKIPPED)
            self._process = _start(("nice", *command), output)
        return _of_command(_finish(self._process, layer.limit_s))

    def run(self, layer: Layer) -> Outcome:
        """Run a layer, or wait for it and show what it has put out; return how it went."""
        if layer.name not in self._going:
            return run_layer(layer)
        outcome = self._going[layer.name].result()
        if self._output(layer).exists():
            sys.stdout.write(self._output(layer).read_text(errors="replace"))
        return outcome

    def _output(self, layer: Layer) -> Path:
        return self._folder / f"{layer.name}.log"


def run_layers(
    layers: Sequence[Layer], expected: frozenset[str], run_one: Callable[[Layer], Outcome] = run_layer
) -> int:
    """Run layers up to the first failure, print how each went, and return the exit status."""
    table: list[tuple[str, str, str, tuple[str, ...]]] = []
    failed = False
    for layer in layers:
        print(f"=== {layer.name}", flush=True)
        began = time.monotonic()
        outcome = run_one(layer)
        missed = outcome.status == SKIPPED and layer.name in expected
        failed = outcome.status not in (0, SKIPPED) or missed
        word = "skipped, though expected" if missed else outcome.word
        table.append((layer.name, word, f"{time.monotonic() - began:.1f} s", outcome.reasons))
        if failed:
            break
    print("\nlayers:")
    for name, word, seconds, reasons in table:
        print(f"  {name:<10} {word:<10} {seconds:>8}")
        for reason in reasons:
            print(f"    skipped: {reason}")
    return int(failed)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line names, or everything."""
    known = {layer.name: layer for layer in LAYERS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", metavar="LAYER", help=" ".join(known))
    parser.add_argument("--expect", default="", help="layers that may not be skipped, in one word separated by spaces")
    options = parser.parse_args(arguments)
    expected = frozenset(options.expect.split())
    if unknown := {*options.layers, *expected} - known.keys():
        parser.error(f"cannot run {', '.join(sorted(unknown))}: the layers are {', '.join(known)}")
    REPORTS.mkdir(parents=True, exist_ok=True)
    chosen = [layer for layer in LAYERS if layer.name in options.layers or not options.layers]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what runs ends, too
    with Beside(chosen) as beside:
        for layer in chosen:
            set_up(layer)
        return run_layers(chosen, expected, beside.run)


if __name__ == "__main__":
    sys.exit(main())
