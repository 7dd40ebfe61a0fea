"""The tracing tools with real processes and sockets: BCC compiles them, and they see what a tenant does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import observed
from support.exchange import exchange, mark_of

from seedance.bpf.observe import Observer
from seedance.bpf.observe_abi import HISTOGRAM_SLOTS
from seedance.daemon.trace import _headers, _session, ack_interval, egress_delay, run_queue
from seedance.errors import SeedanceError

observed.require_bpf()

INTERVAL_S = 0.2
LOOKS = 50
SLEEPS = """
import time
for _ in range(50):
    time.sleep(0.001)
print("null")
"""


def require_bcc() -> None:
    """Skip where BCC cannot work; what is missing is told by the tools themselves, and tested without it."""
    found = subprocess.run([_session.SYSTEM_PYTHON, "-I", "-c", "import bcc"], check=False, capture_output=True)
    if found.returncode:
        pytest.skip("BCC is not installed: apt install python3-bpfcc")
    if _headers.find(os.uname().release) is None and not _headers.BUILT_IN.exists():
        pytest.skip("there are no kernel headers: apt install linux-headers-amd64")


def without_bcc() -> str:
    """Return an interpreter that has no BCC."""
    found = subprocess.run([sys.executable, "-I", "-c", "import bcc"], check=False, capture_output=True)
    if not found.returncode:
        pytest.skip("the interpreter of the tests has BCC")
    return sys.executable


@pytest.fixture
def cgroup() -> Iterator[Path]:
    require_bcc()
    with observed.new_cgroup() as path:
        yield path


@pytest.fixture
def pins(tmp_path: Path) -> Iterator[Path]:
    with observed.new_bpffs(tmp_path / "bpf") as mount:
        yield mount


def seen_of(tool: _session.Tool, pins: Path, index: int, work: Callable[[], object], enough: int) -> list[int]:
    """Run a tool, do some work while it looks, and return a tenant's histogram when it holds enough."""
    intervals = _session.run(_session.program(tool, pins), interval_s=INTERVAL_S)
    total: Counter[int] = Counter()
    try:
        next(intervals)
        work()
        for _ in range(LOOKS):
            total.update(dict(enumerate(next(intervals).get(index, ()))))
            if total.total() >= enough:
                break
        else:
            pytest.fail(f"{total.total()} in {LOOKS} looks, not {enough}")
    finally:
        intervals.close()
    return [total[slot] for slot in range(HISTOGRAM_SLOTS)]


def test_ack_intervals_of_a_tenant(cgroup: Path, tmp_path: Path) -> None:
    histogram = seen_of(
        ack_interval.TOOL, tmp_path, 0xFEED, lambda: exchange(cgroup, mark_of(0xFEED), "0", rounds=300), 300
    )
    # 300 answers come at the server, each with its segment, and a few more segments begin and end the connection.
    assert sum(histogram) < 2 * 300


def test_egress_delays_of_a_tenant(cgroup: Path, tmp_path: Path) -> None:
    histogram = seen_of(
        egress_delay.TOOL, tmp_path, 0xFEED, lambda: exchange(cgroup, mark_of(0xFEED), "0", rounds=300), 300
    )
    # The loopback device has no queue: nothing waits for a second.
    assert sum(histogram[20:]) == 0


def test_a_queue_shows_in_the_egress_delays(cgroup: Path, tmp_path: Path) -> None:
    def work() -> None:
        exchange(cgroup, mark_of(0xFEED), bulk_bytes=1 << 20, rate="16mbit")

    histogram = seen_of(egress_delay.TOOL, tmp_path, 0xFEED, work, 10)
    # What the bucket does not let pass at once waits for milliseconds: 64 KiB take 33 ms at this rate.
    slot_of_1_ms = 10
    assert sum(histogram[slot_of_1_ms:]) > 0


def test_run_queue_of_a_tenant(cgroup: Path, pins: Path) -> None:
    observer = Observer(cgroup=None, pins=pins)
    try:
        observer.tenants_changed({observed.cgroup_id(cgroup): 0xFEED})
        seen_of(run_queue.TOOL, pins, 0xFEED, lambda: observed.run_child(cgroup, SLEEPS), 50)
    finally:
        observer.close()


def test_missing_maps_are_told(tmp_path: Path) -> None:
    assert _session.missing(run_queue.TOOL, tmp_path) == (
        f"cannot trace: there is no '{tmp_path}/cgroup_tenants'; seedanced makes it when [kernel] observe is on"
    )


def test_a_python_without_bcc_is_told() -> None:
    with pytest.raises(SeedanceError, match="has no BCC; `apt install python3-bpfcc` brings it"):
        list(_session.run("", interval_s=INTERVAL_S, count=1, python=without_bcc()))
    with pytest.raises(SeedanceError, match="'/no/python' does not start"):
        list(_session.run("", interval_s=INTERVAL_S, count=1, python="/no/python"))


def test_a_program_that_does_not_compile_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    require_bcc()
    with pytest.raises(SeedanceError, match="BCC could not run the program"):
        list(_session.run("this is no C", interval_s=INTERVAL_S, count=1))
    assert "error" in capfd.readouterr().err
