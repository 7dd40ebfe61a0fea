"""What the comparisons share as programs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.openai_servers import ServerProcess
from bench.processes import BenchError
from bench.program import command_line, run, started


@pytest.fixture(autouse=True)
def at_sigterm() -> Iterator[None]:
    """What this process does at SIGTERM, afterwards as before."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_folder_is_a_whole_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    parser = command_line("Compare")
    assert parser.parse_args([]).build == tmp_path / "build" / "bench"
    assert parser.parse_args(["--build", "x"]).build == tmp_path / "x"
    assert parser.description == "Compare; see bench/README.md."


def test_what_cannot_go_on_ends_with_its_text() -> None:
    def fail(failure: Exception) -> None:
        raise failure

    for failure in (BenchError("cannot go on"), LookupError("cannot find it")):
        with pytest.raises(SystemExit) as ended:
            run(lambda failure=failure: fail(failure), (BenchError, LookupError))  # type: ignore[misc]
        assert ended.value.code == str(failure)
    with pytest.raises(ZeroDivisionError):
        run(lambda: fail(ZeroDivisionError()))


def test_sigterm_unwinds_a_comparison() -> None:
    with pytest.raises(SystemExit) as ended:
        run(lambda: signal.raise_signal(signal.SIGTERM))
    assert ended.value.code == 128 + signal.SIGTERM


class Server(ServerProcess):
    def __init__(self, *, starts: bool) -> None:
        self.said: list[str] = []
        self._starts = starts

    def start(self) -> None:
        self.said.append("start")
        if not self._starts:
            raise BenchError("cannot start")

    def stop(self) -> None:
        self.said.append("stop")


def test_a_server_is_stopped_whatever_happens() -> None:
    server = Server(starts=True)
    with pytest.raises(ZeroDivisionError), started(server):
        raise ZeroDivisionError
    assert server.said == ["start", "stop"]
    server = Server(starts=False)
    with pytest.raises(BenchError), started(server):
        pass
    assert server.said == ["start", "stop"]
