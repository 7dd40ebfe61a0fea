"""Who outlives whom: the adapter's process, the fork server and its EngineCores, as real processes without vLLM."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from support.vllm_zygote import ORPHAN_S

LIMIT_S = 10.0
KEEPER = "import subprocess, sys; subprocess.run(sys.argv[1:])"


class Family:
    """Stand-ins for adapters' processes, one after the other, with a fork server below them; pidfds tell who ended."""

    def __init__(self, address: Path, *keeper: str) -> None:
        """`keeper` is a command that starts the first adapter."""
        self.address = address
        self.adapter = self._start("first", *keeper)
        self._fds: dict[int, int] = {}

    def _command(self, which: str) -> list[str]:
        return [sys.executable, "-m", "support.vllm_zygote", which, str(self.address)]

    def _start(self, which: str, *before: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*before, *self._command(which)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def said(self) -> dict[str, Any]:
        assert self.adapter.stdout is not None
        said = json.loads(self.adapter.stdout.readline())
        assert isinstance(said, dict)
        return said

    def tell(self, line: str) -> dict[str, Any]:
        assert self.adapter.stdin is not None
        self.adapter.stdin.write(line + "\n")
        self.adapter.stdin.flush()
        return self.said()

    def end_adapter(self) -> None:
        self.adapter.kill()
        self.adapter.communicate()

    def next_adapter(self) -> dict[str, Any]:
        """Start the adapter of the next host; returns what the fork server has told it."""
        self.adapter = self._start("next")
        left: dict[str, Any] = self.said()["left"]
        return left

    def intruder(self) -> object:
        """Return what the fork server tells an adapter that comes while there is one."""
        done = subprocess.run(
            self._command("next"),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return json.loads(done.stdout)["left"]

    def watch(self, *pids: int) -> None:
        for pid in pids:
            self._fds[pid] = os.pidfd_open(pid)

    def ended(self, pid: int) -> bool:
        """Wait until `pid` has ended, at most LIMIT_S."""
        return bool(select.select([self._fds[pid]], [], [], LIMIT_S)[0])

    def running(self, pid: int) -> bool:
        return not select.select([self._fds[pid]], [], [], 0)[0]

    def close(self) -> None:
        for fd in self._fds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        self.end_adapter()


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    family = Family(tmp_path / "fork-server")
    yield family
    family.close()


def launch(family: Family, number: int = 1) -> tuple[int, int]:
    said = family.tell(f"launch {number}")
    zygote, core = said["zygote"], said["Launched"]
    family.watch(zygote, core)
    return zygote, core


def test_the_next_adapter_gets_fork_server_and_cores_of_one_that_is_killed(family: Family) -> None:
    (zygote, core), (_, second) = launch(family), launch(family, 2)
    family.tell("serving 1")
    family.end_adapter()
    left = family.next_adapter()
    assert (left["identity"], left["hosts"], left["launches"]) == ("me", 2, 2)
    (one, other) = left["cores"]
    assert (one["pid"], one["launch"]["launch"], one["serving"]["figures"]) == (core, 1, "figures")
    assert (other["pid"], other["serving"]) == (second, None)
    time.sleep(1.1 * ORPHAN_S)  # nothing announces that nothing happens
    assert all(map(family.running, (zygote, core, second)))
    assert family.tell("kill 1") == {"zygote": zygote, "Exited": core, "status": -signal.SIGKILL}
    assert launch(family, 3)[0] == zygote


def test_all_end_when_nobody_follows_a_killed_adapter(family: Family) -> None:
    (zygote, core), (_, second) = launch(family), launch(family, 2)
    family.end_adapter()
    killed_s = time.monotonic()
    assert all(map(family.ended, (zygote, core, second)))
    assert time.monotonic() - killed_s > 0.9 * ORPHAN_S


def test_an_adapter_is_not_driven_out_by_another_one(family: Family) -> None:
    zygote, core = launch(family)
    assert family.intruder() is None
    assert family.tell("kill 1") == {"zygote": zygote, "Exited": core, "status": -signal.SIGKILL}


def test_all_end_at_once_when_three_adapters_in_a_row_die_early(family: Family) -> None:
    zygote, core = launch(family)
    for _ in range(2):
        family.end_adapter()
        family.next_adapter()
        assert family.running(core)
    family.end_adapter()
    killed_s = time.monotonic()
    assert family.ended(core)
    assert family.ended(zygote)
    assert time.monotonic() - killed_s < ORPHAN_S


def test_all_end_at_once_with_the_process_that_starts_hosts(tmp_path: Path) -> None:
    with closing(Family(tmp_path / "fork-server", sys.executable, "-c", KEEPER)) as family:
        zygote, core = launch(family)
        family.adapter.kill()
        killed_s = time.monotonic()
        assert family.ended(core)
        assert family.ended(zygote)
        assert time.monotonic() - killed_s < ORPHAN_S


def test_the_cores_end_when_the_fork_server_is_killed(family: Family) -> None:
    (zygote, core), (_, second) = launch(family), launch(family, 2)
    os.kill(zygote, signal.SIGKILL)
    assert family.ended(core)
    assert family.ended(second)


def test_fork_server_and_other_cores_survive_a_core_and_the_signal_is_told(family: Family) -> None:
    (zygote, core), (_, second) = launch(family), launch(family, 2)
    assert family.tell("kill 1") == {"zygote": zygote, "Exited": core, "status": -signal.SIGKILL}
    assert family.ended(core)
    assert family.running(zygote)
    assert family.running(second)
    assert launch(family, 3)[0] == zygote


def test_stop_ends_even_a_core_that_ignores_sigterm(family: Family) -> None:
    zygote, core = launch(family)
    assert family.tell("stop") == {"zygote": zygote, "Exited": core, "status": -signal.SIGKILL}
    assert family.ended(zygote)
