"""For tests of what observes: cgroups and a BPF file system of their own, and processes in such a cgroup."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from seedance.bpf import loader

_SERIAL: Final = itertools.count(1)
_CHILD_LIMIT_S: Final = 30.0


def require_bpf() -> None:
    """Skip the module that calls this where BPF programs cannot be loaded, or there is no cgroup v2."""
    if os.geteuid():
        pytest.skip("needs root", allow_module_level=True)
    if reason := loader.supported():
        pytest.skip(reason, allow_module_level=True)
    if cgroup2_mount() is None:
        pytest.skip("cgroup v2 is not mounted", allow_module_level=True)


def cgroup2_mount() -> Path | None:
    """Return where cgroup v2 is mounted."""
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return next((Path(fields[1]) for fields in lines if fields[2] == "cgroup2"), None)


@contextlib.contextmanager
def new_cgroup(parent: Path | None = None) -> Iterator[Path]:
    """Make a cgroup below `parent`, the root without one; it is removed at the end, when it has to be empty."""
    root = parent or cgroup2_mount()
    assert root is not None
    path = root / f"seedance-test-{os.getpid()}-{next(_SERIAL)}"
    path.mkdir()
    try:
        yield path
    finally:
        path.rmdir()


def cgroup_id(path: Path) -> int:
    """Return the number by which BPF programs know a cgroup."""
    return path.stat().st_ino


@contextlib.contextmanager
def new_bpffs(path: Path) -> Iterator[Path]:
    """Mount a BPF file system on a folder that is made for it."""
    path.mkdir()
    subprocess.run(["mount", "-t", "bpf", "bpf", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


class Child:
    """A Python program that runs in a cgroup from its first line on, and answers with one JSON value on its output."""

    def __init__(self, cgroup: Path, program: str, *arguments: str) -> None:
        # The first line waits until the process is where it belongs.
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.readline()\n" + program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self._process.pid
        (cgroup / "cgroup.procs").write_text(str(self.pid))

    def go(self) -> None:
        """Let it run."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def wait_asleep(self) -> None:
        """Wait until it has written a line and waits for one."""
        assert self._process.stdout is not None
        self._process.stdout.readline()
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.001)

    def account(self) -> tuple[float, float]:
        """Return its seconds on a processor and in a run queue, by the scheduler's own account."""
        on_cpu_ns, run_queue_ns, _ = map(int, Path(f"/proc/{self.pid}/schedstat").read_text().split())
        return on_cpu_ns / 1e9, run_queue_ns / 1e9

    def answer(self) -> Any:
        """Return what it answered when it has ended."""
        output, _ = self._process.communicate(timeout=_CHILD_LIMIT_S)
        assert self._process.returncode == 0
        return json.loads(output)

    def close(self) -> None:
        """End it if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_child(cgroup: Path, program: str, *arguments: str) -> Any:
    """Run a program in a cgroup to its end, and return its answer."""
    with Child(cgroup, program, *arguments) as child:
        child.go()
        return child.answer()
