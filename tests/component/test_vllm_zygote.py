"""Who outlives whom: the adapter's process, the fork server and its EngineCores, as real processes without vLLM."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.vllm_family import KEEPER, Family
from support.vllm_zygote import ORPHAN_S


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    family = Family(tmp_path / "fork-server")
    yield family
    family.close()


def test_the_next_adapter_gets_fork_server_and_cores_of_one_that_is_killed(family: Family) -> None:
    (zygote, core), (_, second) = family.launch(), family.launch(2)
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
    assert family.launch(3)[0] == zygote


def test_a_core_in_the_middle_of_other_weights_serves_nothing(family: Family) -> None:
    family.launch()
    family.tell("serving 1")
    family.tell("reloading 1")
    family.end_adapter()
    (core,) = family.next_adapter()["cores"]
    assert core["serving"] is None
    family.tell("serving 1")
    family.end_adapter()
    (core,) = family.next_adapter()["cores"]
    assert core["serving"]["settings"]["model"] == "m"


def test_all_end_when_nobody_follows_a_killed_adapter(family: Family) -> None:
    (zygote, core), (_, second) = family.launch(), family.launch(2)
    family.end_adapter()
    killed_s = time.monotonic()
    assert all(map(family.ended, (zygote, core, second)))
    assert time.monotonic() - killed_s > 0.9 * ORPHAN_S


def test_an_adapter_is_not_driven_out_by_another_one(family: Family) -> None:
    zygote, core = family.launch()
    assert family.intruder() is None
    assert family.tell("kill 1") == {"zygote": zygote, "Exited": core, "status": -signal.SIGKILL}


def test_all_end_at_once_when_three_adapters_in_a_row_die_early(family: Family) -> None:
    zygote, core = family.launch()
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
        zygote, core = family.launch()
        family.adapter.kill()
        killed_s = time.monotonic()
        assert family.ended(core)
        assert family.ended(zygote)
        assert time.monotonic() - killed_s < ORPHAN_S


def test_the_cores_end_when_the_fork_server_is_killed(family: Family) -> None:
    (zygote, core), (_, second) = family.launch(), family.launch(2)
    os.kill(zygote, signal.SIGKILL)
    assert family.ended(core)
    assert family.ended(second)


def test_fork_server_and_other_cores_survive_a_core_and_the_signal_is_told(family: Family) -> None:
    (zygote, core), (_, second) = family.launch(), family.launch(2)
    assert family.tell("kill 1") == {"zygote": zygote, "Exited": core, "status": -signal.SIGKILL}
    assert family.ended(core)
    assert family.running(zygote)
    assert family.running(second)
    assert family.launch(3)[0] == zygote


def test_stop_ends_even_a_core_that_ignores_sigterm(family: Family) -> None:
    zygote, core = family.launch()
    assert family.tell("stop") == {"zygote": zygote, "Exited": core, "status": -signal.SIGKILL}
    assert family.ended(zygote)
