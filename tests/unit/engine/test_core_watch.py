"""The watch over a process that sleeps, in the place of an engine; time is the test's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from seedance.engine.core_watch import CoreWatch
from seedance.engine.ledger import EngineRecord, Ledger
from seedance.engine.progress import IDLE_S, STOPPED_S


class Adapter:
    def __init__(self, pid: int) -> None:
        self.core_pid: int | None = pid
        self.given_up: list[str] = []

    def give_up(self, reason: str) -> None:
        self.given_up.append(reason)
        self.core_pid = None


class Engine:
    def __init__(self, pid: int) -> None:
        self.adapter = Adapter(pid)
        self.ledger = Ledger.create().for_engine(3)


@pytest.fixture
def engine() -> Iterator[Engine]:
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        os.sched_yield()
    engine = Engine(process.pid)
    yield engine
    process.kill()
    process.communicate()
    engine.ledger.close()


def found_after(engine: Engine, limit_s: int) -> int:
    watch = CoreWatch(lambda: [engine])  # type: ignore[list-item]
    for now_s in range(limit_s):
        watch.look(float(now_s))
        if engine.adapter.given_up:
            return now_s
    return -1


def test_a_process_that_only_sleeps_hangs(engine: Engine) -> None:
    engine.ledger.set_engine(EngineRecord(beat_s=1.0))
    assert found_after(engine, 20) == IDLE_S
    assert engine.adapter.given_up == ["it hangs: no sign of life for 7 s, and nothing computes"]


def test_a_stopped_process_is_found_sooner(engine: Engine) -> None:
    assert engine.adapter.core_pid is not None
    os.kill(engine.adapter.core_pid, signal.SIGSTOP)
    os.waitid(os.P_PID, engine.adapter.core_pid, os.WSTOPPED | os.WNOWAIT)
    assert found_after(engine, 20) == STOPPED_S
    assert engine.adapter.given_up == ["its process was stopped by a signal"]


def test_signs_of_life_are_those_of_its_own_row(engine: Engine) -> None:
    watch = CoreWatch(lambda: [engine])  # type: ignore[list-item]
    other = engine.ledger.for_engine(4)
    for now_s in range(30):
        engine.ledger.set_engine(EngineRecord(beat_s=float(now_s)))
        watch.look(float(now_s))
    assert engine.adapter.given_up == []
    for now_s in range(30, 60):
        other.set_engine(EngineRecord(beat_s=float(now_s)))
        watch.look(float(now_s))
    assert len(engine.adapter.given_up) == 1
    other.close()


def test_a_process_that_is_gone_is_others_business(engine: Engine) -> None:
    engine.adapter.core_pid = 2**22 + 1
    assert found_after(engine, 20) == -1
