"""What a process does about itself, tried in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from support.slices import slices_missing

from seedance.daemon.process import age_s


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def test_the_name_is_what_ps_shows() -> None:
    code = """
from seedance.daemon.process import set_name
set_name("seed-w:a-very-long-tenant")
print(open("/proc/self/comm").read())
"""
    assert _run(code) == "seed-w:a-very-l"


@pytest.mark.skipif(slices_missing() != "", reason=slices_missing())
def test_a_short_slice_is_the_process_s_own() -> None:
    code = """
import os, subprocess, sys
sys.path.insert(0, "tests")
from support.slices import slice_s
from seedance.daemon.process import shorten_slice
usual_s = slice_s()
shorten_slice(200e-6)
child_s = float(subprocess.check_output([sys.executable, "-c", "from support.slices import slice_s; print(slice_s())"],
    env={**os.environ, "PYTHONPATH": "tests"}))
print(slice_s(), child_s == usual_s != slice_s(), os.getpriority(os.PRIO_PROCESS, 0))
"""
    assert _run(code) == f"0.0002 True {os.getpriority(os.PRIO_PROCESS, 0)}"


def test_the_child_of_a_dead_parent_dies_when_it_said_so() -> None:
    code = """
import os, signal, time
from seedance.daemon.process import die_with_parent, adopt_orphans
adopt_orphans()
ready, told = os.pipe()
parent = os.fork()
if parent == 0:
    child = os.fork()
    if child == 0:
        die_with_parent()
        os.write(told, str(os.getpid()).encode())
    signal.pause()
child = int(os.read(ready, 100))
os.kill(parent, signal.SIGKILL)
ended = {os.waitpid(-1, 0) for _ in range(2)}  # the orphan has come to us
print(ended == {(parent, signal.SIGKILL), (child, signal.SIGKILL)})
"""
    assert _run(code) == "True"


def test_closing_all_but_some_keeps_these_and_the_first_three() -> None:
    code = """
import os
from seedance.daemon.process import close_all_but
fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(6)]
os.dup2(fds[0], 200)
close_all_but([fds[3], fds[1]])
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
print([is_open(fd) for fd in [0, 1, 2, *fds, 200]] == [True] * 3 + [False, True, False, True, False, False, False])
"""
    assert _run(code) == "True"


def test_age_counts_from_the_start_of_the_process() -> None:
    first = age_s()
    started = time.monotonic()
    assert 0 < first < 24 * 3600
    while time.monotonic() - started < 0.05:
        pass
    assert 0.04 < age_s() - first < 10
