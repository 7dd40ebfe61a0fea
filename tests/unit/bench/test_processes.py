from __future__ import annotations

import os
import subprocess

import pytest

from bench.processes import BenchError, real_time, spent_by_others


def test_what_a_process_and_its_children_spend_is_not_the_others() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            others = spent_by_others(os.getpid())
            assert not {os.getpid(), child.pid} & others.keys()
            assert os.getppid() in others
            assert os.getpid() in spent_by_others(child.pid)
        finally:
            child.kill()


def test_a_priority_that_is_not_allowed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, policy: int, parameters: os.sched_param) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with pytest.raises(BenchError, match="cannot take a real-time priority: Operation not permitted; run it as root"):
        real_time()
