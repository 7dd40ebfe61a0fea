"""The service manager's protocol, against a real socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from seedance.daemon.notify import notify, watchdog_interval_s


@pytest.mark.parametrize("abstract", [False, True])
def test_fields_arrive_one_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"seedance-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if abstract else name)
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
        assert notify(READY=1, STATUS="engine ready")
        assert manager.recv(1000) == b"READY=1\nSTATUS=engine ready\n"


def test_without_a_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify(READY=1)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert notify(READY=1)


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [("", "", None), ("0", "", None), ("3000000", "", 1.5), ("3000000", "1", None), ("soon", "", None)],
)
def test_the_watchdog_is_fed_twice_in_its_time(
    monkeypatch: pytest.MonkeyPatch, usec: str, pid: str, expected: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", pid)
    assert watchdog_interval_s() == expected


def test_a_watchdog_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_interval_s() == 10
