"""The zygote as a process, with a worker that says what it finds itself to be."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from seedance.daemon import links
from seedance.daemon.config import HttpConfig, WorkerConfig
from seedance.qos.quota import Quota

CODE = """
import os, socket, sys, threading
from seedance.daemon.zygote import Zygote

loaded = []

def preload(tokenizer_dir):
    if tokenizer_dir == "broken":
        raise ValueError("no such tokenizer")
    loaded.append(tokenizer_dir)

def run(handover, engine, control, journal_fd, settings):
    assert os.pread(journal_fd, 4, 0) == b"page"
    word = handover.recv(100).decode()
    control.send(f"{os.getpid()} {os.getpgid(0)} {settings.quota.tenant} {sorted(os.listdir('/proc/self/fd'))} {loaded}".encode())
    if word == "crash":
        raise RuntimeError("as told")
    engine.recv(1)
    return int(word)

link = socket.socket(fileno=int(sys.argv[1]))
Zygote(link, run, preload).serve()
"""  # noqa: E501


class Zygote:
    """The process, and the supervisor's end of its link."""

    def __init__(self) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.settimeout(20)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CODE, str(theirs.fileno())], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE
            )
        self.stderr = b""

    def order(self, order: links.ZygoteOrder, *fds: int) -> None:
        socket.send_fds(self.link, [links.ZYGOTE_ORDERS.encode(order)], fds)

    def report(self) -> tuple[links.ZygoteReport, list[int]]:
        data, fds, _, _ = socket.recv_fds(self.link, 65536, 1)
        return links.ZYGOTE_REPORTS.decode(data), fds

    def close(self) -> None:
        self.link.close()
        _, self.stderr = self.process.communicate(timeout=20)


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    assert zygote.report() == (links.ZygoteReady(), [])
    yield zygote
    zygote.close()
    assert zygote.process.returncode == 0


def _spawn(number: int, tenant: str = "acme") -> links.Spawn:
    settings = links.WorkerSettings(
        quota=Quota(tenant=tenant), worker=WorkerConfig(), http=HttpConfig(), log_level="info", session_key=b"key"
    )
    return links.Spawn(number, settings)


class Ends:
    """Our ends of a worker's three sockets, and what its journal is to be."""

    def __init__(self, zygote: Zygote, order: links.Spawn) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        self.handover, self.engine, self.control = (ours for ours, _ in pairs)
        self.control.settimeout(20)
        with tempfile.TemporaryFile() as journal:
            journal.write(b"page")
            journal.flush()
            zygote.order(order, *(theirs.fileno() for _, theirs in pairs), journal.fileno())
        for _, theirs in pairs:
            theirs.close()

    def close(self) -> None:
        for sock in (self.handover, self.engine, self.control):
            sock.close()


def test_it_says_that_it_is_there(zygote: Zygote) -> None:
    zygote.order(links.Query())
    assert zygote.report() == (links.ZygoteReady(), [])


def test_a_worker_is_its_own_process_with_its_four_descriptors_and_nothing_else(zygote: Zygote) -> None:
    ends = Ends(zygote, _spawn(4, "globex"))
    report, [pidfd] = zygote.report()
    assert isinstance(report, links.Spawned)
    assert report.worker == 4
    ends.handover.send(b"3")
    pid, group, tenant, rest = ends.control.recv(1000).decode().split(maxsplit=3)
    assert (int(pid), int(group), tenant) == (report.pid, report.pid, "globex")
    assert rest.count("'") // 2 == 3 + 4 + 1  # standard ones, ours, and the listing's own
    assert Path(f"/proc/{pid}/comm").read_text() == "seed-w:globex\n"
    assert select.select([pidfd], [], [], 0)[0] == []
    ends.engine.send(b"x")
    assert zygote.report() == (links.Exited(4, 3), [])
    assert select.select([pidfd], [], [], 0)[0] == [pidfd]
    os.close(pidfd)
    ends.close()


def test_a_crash_and_a_kill_are_told_apart(zygote: Zygote) -> None:
    ends = Ends(zygote, _spawn(1))
    os.close(zygote.report()[1][0])
    ends.handover.send(b"crash")
    assert zygote.report() == (links.Exited(1, 70), [])
    ends.close()
    ends = Ends(zygote, _spawn(2))
    _, [pidfd] = zygote.report()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    assert zygote.report() == (links.Exited(2, -9), [])
    ends.close()
    zygote.close()
    assert b"RuntimeError: as told" in zygote.stderr
    assert b"seed-w:acme" in zygote.stderr


def test_what_was_preloaded_is_in_the_worker_and_a_broken_model_does_no_harm(zygote: Zygote) -> None:
    for name in ("broken", "tiny"):
        zygote.order(links.Preload(name))
        assert zygote.report() == (links.Preloaded(name, "no such tokenizer" if name == "broken" else ""), [])
    ends = Ends(zygote, _spawn(1))
    os.close(zygote.report()[1][0])
    ends.handover.send(b"0")
    assert ends.control.recv(1000).decode().endswith("['tiny']")
    ends.close()
    assert zygote.report() == (links.Exited(1, 0), [])


def test_an_order_without_its_descriptors_is_refused(zygote: Zygote) -> None:
    zygote.order(_spawn(9))
    report, _ = zygote.report()
    assert isinstance(report, links.SpawnFailed)
    assert report.worker == 9


def test_what_is_no_order_ends_the_zygote(zygote: Zygote) -> None:
    zygote.link.send(b"nonsense")
    assert zygote.link.recv(100) == b""
