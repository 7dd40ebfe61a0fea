"""Log lines as the journal and a terminal get them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

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


def test_the_journal_gets_priorities_on_every_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "8:1234")
    start_logging("gateway", "info")
    _log()
    first, second, *trace = capsys.readouterr().err.splitlines()
    assert first == "<6>gateway: two ⏎ lines"
    assert second == "<3>gateway: failed"
    assert trace[-1] == "<3>gateway: KeyError: 'inside'"
    assert all(line.startswith("<3>gateway: ") for line in trace)


def test_a_terminal_gets_times_and_levels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    start_logging("zygote", "debug")
    start_logging("worker", "debug")  # a forked process takes its own name
    _log()
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} debug   worker: unseen", lines[0])
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} info    worker: two ⏎ lines", lines[1])
