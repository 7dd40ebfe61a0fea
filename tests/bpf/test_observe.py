"""The Observer as a whole: what it keeps, and that whatever is missing is told and stops nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from support import observed

from seedance.bpf.loader import BpfObject
from seedance.bpf.maps import open_pinned
from seedance.bpf.observe import Observer

observed.require_bpf()

WORK: Final = """
import json, os
for _ in range(200):
    if os.fork() == 0:
        os._exit(0)
    os.wait()
print(json.dumps(None))
"""

UNPRIVILEGED: Final = """
import json, pathlib, sys
from seedance.bpf.observe import Observer
observer = Observer(cgroup=pathlib.Path(sys.argv[1]), cuda_library="libc.so.6")
observer.tenants_changed({1: 1})
print(json.dumps([observer.off, len(observer.usage()), len(observer.cuda_processes())]))
observer.close()
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with observed.new_cgroup() as path:
        yield path


@pytest.fixture
def pins(tmp_path: Path) -> Iterator[Path]:
    with observed.new_bpffs(tmp_path / "bpf") as mount:
        folder = mount / "seedance"
        folder.mkdir()
        yield folder


@contextlib.contextmanager
def observing(cgroup: Path, pins: Path | None) -> Iterator[Observer]:
    observer = Observer(cgroup=cgroup, pins=pins)
    try:
        assert observer.off.keys() == {"observe_cuda"}
        observer.tenants_changed({observed.cgroup_id(cgroup): 3})
        yield observer
    finally:
        observer.close()


def waits(observer: Observer) -> int:
    return sum(observer.usage()[3].run_queue_histogram)


def test_counts_go_on_after_a_restart(cgroup: Path, pins: Path) -> None:
    with observing(cgroup, pins) as first:
        observed.run_child(cgroup, WORK)
        before = first.usage()[3]
    with observing(cgroup, pins) as second:
        after = second.usage()[3]
        assert after.on_cpu_s >= before.on_cpu_s
        # What passes between the two is not charged to what ran before.
        assert after.on_cpu_s == pytest.approx(before.on_cpu_s, abs=0.01)
        assert after.run_queue_histogram == before.run_queue_histogram


def test_counts_begin_anew_without_pins(cgroup: Path) -> None:
    with observing(cgroup, None) as first:
        observed.run_child(cgroup, WORK)
        assert waits(first) >= 200
    with observing(cgroup, None) as second:
        assert waits(second) == 0


def test_the_tenants_of_a_former_run_that_are_gone_are_forgotten(cgroup: Path, pins: Path) -> None:
    with observing(cgroup, pins):
        observed.run_child(cgroup, WORK)
    second = Observer(cgroup=cgroup, pins=pins)
    try:
        second.tenants_changed({})
        assert second.usage() == {}
    finally:
        second.close()


def test_maps_that_another_version_left_are_replaced(cgroup: Path, pins: Path) -> None:
    with BpfObject("sched", pins=pins, entries={"tenant_cpu": 16, "cgroup_tenants": 16}):
        pass
    with open_pinned(pins / "tenant_cpu") as left:
        assert left.max_entries == 16
    with observing(cgroup, pins) as observer:
        observed.run_child(cgroup, WORK)
        assert waits(observer) >= 200
    with open_pinned(pins / "tenant_cpu") as replaced:
        assert replaced.max_entries > 16


def test_maps_are_pinned_by_the_names_that_bpftool_shows(cgroup: Path, pins: Path) -> None:
    with observing(cgroup, pins):
        names = {path.name for path in pins.iterdir()}
    assert {"cgroup_tenants", "tenant_cpu", "tenant_network"} <= names


def test_without_privileges_everything_is_off_with_its_reason(cgroup: Path) -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(source), *sys.path))}
    powerless = ("setpriv", "--inh-caps=-all", "--bounding-set=-all")
    command = [*powerless, sys.executable, "-c", UNPRIVILEGED, str(cgroup)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    off, tenants, processes = json.loads(result.stdout)
    assert off.keys() == {"observe_network", "observe_cpu", "observe_cuda"}
    assert all(reason.startswith("cannot ") and "Operation not permitted" in reason for reason in off.values())
    assert all("\n" not in reason for reason in off.values())
    assert (tenants, processes) == (0, 0)
