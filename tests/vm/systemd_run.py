"""Run tests, or any command, in a Debian 13 with systemd and a new kernel, under QEMU.

    PYTHONPATH=tests python -m vm.systemd_run [TEST... -- PYTEST-ARGUMENT...]
    PYTHONPATH=tests python -m vm.systemd_run --shell 'systemctl status'
    PYTHONPATH=tests python -m vm.systemd_run --build | --start | --install | --stop
    PYTHONPATH=tests python -m vm.systemd_run --counted [TEST...]

The image is built and booted once, cached by content; what a guest writes is forgotten when it ends. A run takes up the
booted machine, installs the wheel of this checkout as `make install` does, runs pytest files inside as root, and leaves
junit.xml, journal.txt, dmesg.txt and the console in the folder build/vm/NAME. A guest started by --start has seedance
installed and stays: --shell uses it, --live has tests use it, --install brings the checkout as it is now, --stop ends
it. Without one, --shell starts a bare guest for the command alone. With --counted the guest's clock counts its own
instructions (`systemd_guest.Clock`), for what measures latencies.

Exit status: pytest's own, or the command's; 1 also when the kernel complained or the tests left something behind; 77
when this machine cannot do it, with the reason; 69 when the guest did not start or ended early.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from vm.guest_init import BAD_LOG
from vm.leftovers import State, left_behind
from vm.run import BUILD, EX_SKIP, EX_UNAVAILABLE, Unavailable
from vm.systemd_guest import BOOT_S, Agent, Clock, Ended, Machine
from vm.systemd_image import LIB, TESTS_SITE, find_image, say
from vm.systemd_install import GUEST_ROOT, install

BPF_TESTS: Final = ("abi", "observe_abi", "offsets", "loading", "maps", "connections", "egress", "window")
"""What depends on the kernel alone; those that measure are for a machine that is not emulated."""

DEFAULT_TESTS: Final = ("tests/vm/systemd", *(f"tests/bpf/test_{name}.py" for name in BPF_TESTS))
ENVIRONMENT: Final = {
    "PYTHONPATH": TESTS_SITE,
    "SEEDANCE_GUEST": "systemd",
    "COLUMNS": "120",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # importing what no test here uses takes its time under emulation
}
JUNIT: Final = "/var/tmp/junit.xml"
TIMEOUT_S: Final = 900
SETTLE_S: Final = 10.0
"""The kernel frees BPF programs and network namespaces a while after their last user has gone."""


def main() -> int:
    """Do what the command line says."""
    options = parse(sys.argv[1:])
    machine = Machine(BUILD / options.name, options.clock)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EX_UNAVAILABLE))  # so that the machine ends too
    try:
        return act(machine, options)
    except Unavailable as exc:
        print(f"cannot run the guest with systemd here: {exc}")
        return EX_SKIP
    except Ended as exc:
        print(f"cannot tell how it went: {exc}; the console's end:")
        print(*machine.console.read_text(errors="replace").splitlines()[-20:], sep="\n")
        return EX_UNAVAILABLE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what follows "--" is for pytest."""
    own, *rest = split_at("--", arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=list(DEFAULT_TESTS), metavar="TEST")
    parser.add_argument("--name", default="systemd", help="of the guest, and of its folder below build/vm")
    parser.add_argument("--counted", action="store_true", help="let the guest's clock count its instructions")
    parser.add_argument("--cold", action="store_true", help="boot, instead of taking up a booted machine")
    parser.add_argument("--live", action="store_true", help="use the guest that runs, or start one and leave it")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="for pytest")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--shell", metavar="COMMAND", help="run this in the guest, print its output, and end")
    action.add_argument("--build", action="store_true", help="build the image, if need be, and do no more")
    action.add_argument("--start", action="store_true", help="start a guest with seedance installed, and leave it")
    action.add_argument("--install", action="store_true", help="install this checkout in the guest that runs")
    action.add_argument("--stop", action="store_true", help="end the guest that was left")
    options = parser.parse_args(own)
    options.arguments = rest[0] if rest else []
    options.clock = Clock.COUNTED if options.counted else Clock.HOST
    return options


def split_at(word: str, arguments: Sequence[str]) -> list[list[str]]:
    """Split a command line at the first `word`, which is dropped."""
    if word not in arguments:
        return [list(arguments)]
    place = arguments.index(word)
    return [list(arguments[:place]), list(arguments[place + 1 :])]


def act(machine: Machine, options: argparse.Namespace) -> int:
    if options.build:
        find_image()
        return 0
    if options.stop:
        machine.stop()
        return 0
    if options.install and not machine.pid:
        raise Unavailable(f"no guest runs in {machine.folder}: --start one")
    keep = options.live or options.start or options.install or (options.shell is not None and bool(machine.pid))
    with running(machine, keep=keep, cold=options.cold), machine.agent(BOOT_S) as agent:
        if options.shell is not None:
            return agent.run(
                ["/bin/bash", "-c", options.shell], stdout=sys.stdout.buffer, stderr=sys.stderr.buffer, cwd="/root"
            )
        with timed("installed"):
            install(agent, machine.folder)
        if options.start or options.install:
            return 0
        return run_tests(agent, machine.folder, options)


@contextlib.contextmanager
def running(machine: Machine, *, keep: bool, cold: bool) -> Iterator[None]:
    """Have the machine run: the one that does, or a new one; end it afterwards unless it is to be kept."""
    if not machine.pid:
        image = find_image()
        with timed("started"):
            machine.start(image, cold=cold)
    elif not keep:
        raise Unavailable(f"a guest already runs in {machine.folder}: use it with --live, or end it with --stop")
    try:
        yield
    finally:
        if not keep:
            machine.stop()


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    say(f"{what} in {time.monotonic() - began:.1f} s")


# --- a run of tests ------------------------------------------------------------------------------------------------


def run_tests(agent: Agent, results: Path, options: argparse.Namespace) -> int:
    """Run pytest in the guest, bring back what it leaves, and judge."""
    before = state(agent)
    with timed("tested"):
        status = agent.run(
            pytest_command(options.tests, options.arguments, options.timeout),
            stdout=sys.stdout.buffer,
            cwd=GUEST_ROOT,
            environment=ENVIRONMENT,
        )
    complaints = [f"the tests left behind: {line}" for line in settled(agent, before)]
    log = agent.check(["dmesg", "--notime"])
    complaints += [f"the kernel's log has: {line}" for line in bad_lines(log)]
    for name, command in {
        "junit.xml": ["cat", JUNIT],
        "journal.txt": ["journalctl", "--boot", "--no-pager", "--output=short-precise"],
        "dmesg.txt": ["dmesg"],
    }.items():
        with (results / name).open("wb") as file:
            agent.run(command, stdout=file)
    print(*complaints, sep="\n", end="\n" if complaints else "")
    return status or int(bool(complaints))


def pytest_command(tests: Sequence[str], arguments: Sequence[str], timeout_s: float) -> list[str]:
    """Return the command that runs tests in the guest, by the Python that seedance is installed for."""
    return [
        *("timeout", "--kill-after=30", str(timeout_s), f"{LIB}/bin/python", "-m", "pytest", "-q", "-rs"),
        *("--durations=10", "-p", "no:cacheprovider", "--color=no", f"--junitxml={JUNIT}", *arguments, *tests),
    ]


def state(agent: Agent) -> State:
    """Return what the guest holds now that tests can leave behind."""
    found: State = json.loads(agent.check(["python3", f"{GUEST_ROOT}/tests/vm/leftovers.py"]))
    return found


def settled(agent: Agent, before: State) -> list[str]:
    """Return what the tests left behind, once nothing more of it goes away."""
    deadline = time.monotonic() + SETTLE_S
    while (lines := left_behind(before, state(agent))) and time.monotonic() < deadline:
        time.sleep(1)
    return lines


def bad_lines(log: str) -> list[str]:
    """Return the lines of a kernel's log that tell of something wrong with it."""
    return [line for line in log.splitlines() if any(mark in line for mark in BAD_LOG)]


if __name__ == "__main__":
    sys.exit(main())
