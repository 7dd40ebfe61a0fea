"""Log lines as the journal and a terminal get them."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from seedance.daemon.logs import start_logging


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Give pytest its handlers back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("asyncio").setLevel(logging.NOTSET)


def _log() -> None:
    logging.getLogger("x").debug("unseen")
    logging.getLogger("x").info("two\nlines")
    try:
        raise KeyError("inside")
    except KeyError:
        logging.getLogger("x").exception("failed")


class Journal:
    """A socket as the journal's; entries are read as systemd's JOURNAL_NATIVE_PROTOCOL document says."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.path)
        self.sock.settimeout(5)

    def entry(self) -> dict[str, str]:
        data, fds, _, _ = socket.recv_fds(self.sock, 1 << 20, 1)
        if fds:
            assert data == b""
            assert fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & 0xF == 0xF
            with open(fds[0], "rb") as file:
                data = os.pread(file.fileno(), 1 << 30, 0)
        fields: dict[str, str] = {}
        while data:
            line, _, rest = data.partition(b"\n")
            name, equals, value = line.partition(b"=")
            if not equals:
                length = int.from_bytes(rest[:8], "little")
                value, end, rest = rest[8 : 8 + length], rest[8 + length : 9 + length], rest[9 + length :]
                assert end == b"\n"
            assert name.decode() not in fields
            fields[name.decode()] = value.decode()
            data = rest
        return fields


@pytest.fixture
def stderr_in_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the environment say that standard error leads to the journal, as systemd does."""
    status = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")


@pytest.fixture
def journal(tmp_path: Path, stderr_in_journal: None) -> Iterator[Journal]:
    """A journal that standard error is said to lead to."""
    journal = Journal(tmp_path / "journal")
    with journal.sock:
        yield journal


def test_the_journal_gets_fields(journal: Journal, capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("gateway", "info", journal=journal.path)
    _log()
    entry = journal.entry()
    assert entry.pop("CODE_FILE") == __file__
    assert entry.pop("CODE_LINE").isdecimal()
    assert entry == {
        "MESSAGE": "two ⏎ lines",
        "PRIORITY": "6",
        "SYSLOG_IDENTIFIER": "seedanced",
        "SEEDANCE_PROCESS": "gateway",
        "LOGGER": "x",
        "CODE_FUNC": "_log",
    }
    failed = journal.entry()
    first, *_, last = failed["MESSAGE"].splitlines()
    assert (first, last, failed["PRIORITY"]) == ("failed", "KeyError: 'inside'", "3")
    assert capsys.readouterr().err == ""


def test_a_worker_names_its_tenant_once_and_a_stream_with_each_entry(journal: Journal) -> None:
    start_logging("worker", "debug", tenant="acme", journal=journal.path)
    log = logging.getLogger("x")
    log.warning("it")
    log.debug("it", extra={"stream": "s-7"})
    log.error("it", extra={"tenant": "globex", "stream": 7})
    found = [journal.entry() for _ in range(3)]
    assert [(entry["TENANT"], entry.get("STREAM"), entry["PRIORITY"]) for entry in found] == [
        ("acme", None, "4"),
        ("acme", "s-7", "7"),
        ("globex", "7", "3"),
    ]


def test_what_a_client_chose_is_no_field(journal: Journal) -> None:
    start_logging("worker", "info", journal=journal.path)
    logging.getLogger("x").info("id %s", "a", extra={"stream": "1\nPRIORITY=0\n\ud800"})
    entry = journal.entry()
    assert (entry["PRIORITY"], entry["STREAM"]) == ("6", "1\nPRIORITY=0\n\\ud800")


def test_a_long_entry_goes_in_a_sealed_file(journal: Journal) -> None:
    start_logging("worker", "info", journal=journal.path)
    logging.getLogger("x").info("%s", "x" * 5_000_000)
    assert journal.entry()["MESSAGE"] == "x" * 5_000_000


def test_what_the_journal_does_not_take_goes_to_standard_error(
    journal: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    start_logging("worker", "info", journal=journal.path)
    sent = 0
    while not (text := capsys.readouterr().err):  # its queue is full before long
        logging.getLogger("x").info("entry %d", sent)
        sent += 1
    assert text == f"<6>worker: entry {sent - 1}\n"
    assert [journal.entry()["MESSAGE"] for _ in range(sent - 1)] == [f"entry {number}" for number in range(sent - 1)]


def test_without_a_journal_there_it_gets_priorities_on_every_line(
    stderr_in_journal: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_logging("gateway", "info", journal=str(tmp_path / "none"))
    _log()
    first, second, *trace = capsys.readouterr().err.splitlines()
    assert first == "<6>gateway: two ⏎ lines"
    assert second == "<3>gateway: failed"
    assert trace[-1] == "<3>gateway: KeyError: 'inside'"
    assert all(line.startswith("<3>gateway: ") for line in trace)


@pytest.mark.parametrize("stream", ["8:1234", "", "x"])
def test_a_file_gets_times_and_levels_although_the_journal_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: str
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", stream)
    start_logging("zygote", "info")
    logging.getLogger("x").info("it")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} info    zygote: it\n", capsys.readouterr().err)


def test_a_terminal_gets_times_and_levels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    start_logging("zygote", "debug")
    start_logging("worker", "debug")  # a forked process takes its own name
    _log()
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} debug   worker: unseen", lines[0])
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} info    worker: two ⏎ lines", lines[1])
