"""Who dies with whom: the adapter's process, the fork server and its EngineCores, as real processes without vLLM."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

LIMIT_S = 10.0


class Family:
    """A stand-in for an adapter's process, with a fork server below it; pidfds tell who has ended."""

    def __init__(self) -> None:
        self.adapter = subprocess.Popen(
            [sys.executable, "-m", "support.vllm_zygote", "adapter"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._fds: dict[int, int] = {}

    def tell(self, line: str) -> dict[str, Any]:
        assert self.adapter.stdin is not None
        assert self.adapter.stdout is not None
        self.adapter.stdin.write(line + "\n")
        self.adapter.stdin.flush()
        said = json.loads(self.adapter.stdout.readline())
        assert isinstance(said, dict)
        return said

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
        self.adapter.kill()
        self.adapter.communicate()


@pytest.fixture
def family() -> Iterator[Family]:
    family = Family()
    yield family
    family.close()


def launch(family: Family, number: int = 1) -> tuple[int, int]:
    said = family.tell(f"launch {number}")
    zygote, core = said["zygote"], said["Launched"]
    family.watch(zygote, core)
    return zygote, core


def test_all_end_when_the_adapters_process_is_killed(family: Family) -> None:
    (zygote, core), (_, second) = launch(family), launch(family, 2)
    family.adapter.kill()
    assert all(map(family.ended, (zygote, core, second)))


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
