"""sched.bpf.c with real processes: what it counts against /proc/<pid>/schedstat, the scheduler's own account."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from support import observed

from seedance.bpf.observe import ObservedUsage, Observer

observed.require_bpf()
if not Path("/proc/self/schedstat").exists():
    pytest.skip("this kernel has no /proc/<pid>/schedstat to compare with", allow_module_level=True)

BUSY: Final = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
until = time.process_time() + float(sys.argv[2])
while time.process_time() < until:
    pass
print(flush=True)
sys.stdin.readline()
"""

SLEEPY: Final = """
import json, sys, threading
turns = int(sys.argv[1])
ping, pong = threading.Semaphore(0), threading.Semaphore(0)

def partner():
    for _ in range(turns):
        ping.acquire()
        pong.release()

thread = threading.Thread(target=partner)
thread.start()
for _ in range(turns):
    ping.release()
    pong.acquire()
thread.join()
print(json.dumps(None))
"""

CPU: Final = str(min(os.sched_getaffinity(0)))


@pytest.fixture
def cgroups() -> Iterator[list[Path]]:
    with observed.new_cgroup() as first, observed.new_cgroup() as second:
        yield [first, second]


@pytest.fixture
def observer(cgroups: list[Path]) -> Iterator[Observer]:
    observer = Observer(cgroup=None)
    try:
        assert "observe_cpu" not in observer.off
        observer.tenants_changed({observed.cgroup_id(path): index for index, path in enumerate(cgroups, start=1)})
        yield observer
    finally:
        observer.close()


def taken_s() -> float:
    """Return the seconds that interrupts and the host have taken from our processor (proc_stat(5))."""
    line = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{CPU} "))
    irq, softirq, steal = map(int, line.split()[6:9])
    return (irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def waits(usage: ObservedUsage) -> int:
    return sum(usage.run_queue_histogram)


def test_two_that_share_a_processor_are_each_charged_with_their_own(cgroups: list[Path], observer: Observer) -> None:
    with observed.Child(cgroups[0], BUSY, CPU, "0.5") as first, observed.Child(cgroups[1], BUSY, CPU, "0.5") as second:
        children = [first, second]
        before, taken_before_s = [child.account() for child in children], taken_s()
        for child in children:
            child.go()
        for child in children:
            child.wait_asleep()
        usage = observer.usage()
        accounts = [child.account() for child in children]
        taken = taken_s() - taken_before_s
    for index, (old, new) in enumerate(zip(before, accounts, strict=True), start=1):
        # The scheduler leaves out what interrupts and the host took from the processor meanwhile.
        assert -0.05 < usage[index].on_cpu_s - (new[0] - old[0]) < 0.05 + taken
        assert usage[index].run_queue_s == pytest.approx(new[1] - old[1], rel=0.10, abs=0.05)
    # Nobody runs for half a second without the other waiting: the test would be empty otherwise.
    assert sum(one.run_queue_s for one in usage.values()) > 0.3
    assert all(waits(one) > 0 for one in usage.values())


def test_each_waking_is_a_wait(cgroups: list[Path], observer: Observer) -> None:
    observed.run_child(cgroups[0], SLEEPY, "500")
    usage = observer.usage()
    assert waits(usage[1]) >= 500
    assert usage[2] == ObservedUsage(run_queue_histogram=(0,) * 32)


def test_what_runs_now_is_counted_up_to_now(cgroups: list[Path], observer: Observer) -> None:
    with observed.Child(cgroups[0], BUSY, CPU, "3600") as child:
        child.go()
        last = 0.0
        while last < 0.2:
            seen = observer.usage()[1].on_cpu_s
            assert seen >= last
            last = seen


def test_a_cgroup_that_was_taken_away_is_counted_no_more(cgroups: list[Path], observer: Observer) -> None:
    observer.tenants_changed({observed.cgroup_id(cgroups[1]): 2})
    observed.run_child(cgroups[0], SLEEPY, "100")
    assert observer.usage().keys() == {2}


def test_an_index_that_passes_to_another_cgroup_keeps_its_counts(cgroups: list[Path], observer: Observer) -> None:
    observed.run_child(cgroups[0], SLEEPY, "100")
    before = waits(observer.usage()[1])
    observer.tenants_changed({observed.cgroup_id(cgroups[1]): 1})
    observed.run_child(cgroups[1], SLEEPY, "100")
    assert waits(observer.usage()[1]) >= before + 100
