"""The service manager's protocol, against a real socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from seedance.daemon.notify import Watchdog, discard, notify, status_text, store, watchdog_interval_s


@pytest.mark.parametrize("abstract", [False, True])
def test_fields_arrive_one_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"seedance-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if abstract else name)
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
        assert notify(READY=1, STATUS="engine ready")
        assert manager.recv(1000) == b"READY=1\nSTATUS=engine ready\n"


def test_descriptors_are_stored_and_discarded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, (tmp_path / "file").open("wb") as file:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        assert store("sessions-acme", file.fileno())
        data, (fd,), _, _ = socket.recv_fds(manager, 1000, 1)
        assert data == b"FDSTORE=1\nFDNAME=sessions-acme\nFDPOLL=0\n"
        assert os.path.sameopenfile(fd, file.fileno())
        os.close(fd)
        assert discard("sessions-acme")
        assert manager.recv(1000) == b"FDSTOREREMOVE=1\nFDNAME=sessions-acme\n"


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


def test_a_daemon_whose_processes_answer_is_fed() -> None:
    watchdog = Watchdog(10)
    assert watchdog.feed(0)
    for turn in range(5):
        now = turn * 5.0
        assert watchdog.feed(now)
        watchdog.asked("gateway", now)
        watchdog.asked("engine host", now)
        watchdog.answered("gateway")
        watchdog.answered("engine host")
    assert watchdog.late(1e9) == []


def test_one_that_owes_an_answer_for_too_long_is_late() -> None:
    watchdog = Watchdog(10)
    watchdog.asked("zygote", 100)
    watchdog.asked("gateway", 100)
    watchdog.asked("gateway", 109)  # a later question does not make the debt younger
    assert watchdog.feed(110)
    assert not watchdog.feed(110.1)
    assert watchdog.late(110.1) == ["gateway", "zygote"]
    watchdog.answered("gateway")
    assert watchdog.late(111) == ["zygote"]
    watchdog.answered("somebody")


def test_one_that_is_started_again_owes_nothing() -> None:
    watchdog = Watchdog(10)
    watchdog.asked("engine host", 0)
    assert not watchdog.feed(20)
    watchdog.gone("engine host")
    watchdog.gone("engine host")
    assert watchdog.feed(20)
    watchdog.asked("engine host", 21)
    assert watchdog.feed(31)
    assert not watchdog.feed(32)


def test_the_status_is_one_line() -> None:
    assert status_text("engine starting:\n loading", tenants=1, connections=0) == (
        "engine starting: loading; 1 tenant; 0 connections"
    )
    text = status_text("serving 'm'", tenants=3, connections=1, bad_files=2, off=["cpu", "egress"], late=["zygote"])
    assert text == ("serving 'm'; 3 tenants; 1 connection; 2 bad files; limits off: cpu, egress; no answer from zygote")
    assert len(status_text("x" * 10_000, tenants=0, connections=0)) == 501
