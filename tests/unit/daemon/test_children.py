"""Backoff, exit texts, surveys, and children that end and come back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from seedance.daemon.children import Backoff, Child, Reaper, Survey, exit_text, has_child, wait_set


def test_pauses_double_up_to_ten_seconds_and_a_steady_life_resets_them() -> None:
    backoff = Backoff()
    pauses = []
    now = 0.0
    for _ in range(9):
        backoff.started(now)
        now += 1
        pauses.append(backoff.ended(now))
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])
    backoff.started(now)
    assert backoff.ended(now + 10) == 0
    backoff.started(now + 10)
    assert backoff.ended(now + 11) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-9, "killed by SIGKILL"),
        (-200, "killed by signal 200"),
    ],
)
def test_exit_text(status: int, text: str) -> None:
    assert exit_text(status) == text


def test_a_survey_ends_with_the_last_answer_or_in_time() -> None:
    async def scenario() -> None:
        survey = Survey()
        await survey.wait()  # nobody was asked
        survey.ask("a")
        survey.ask("b")
        survey.answered("a")
        survey.answered("unasked")
        asyncio.get_running_loop().call_soon(survey.answered, "b")
        async with asyncio.timeout(0.4):
            await survey.wait()
        survey.ask("silent")
        await survey.wait()
        async with asyncio.timeout(0.1):
            await survey.wait()

    asyncio.run(scenario())


def test_wait_set_says_whether() -> None:
    async def scenario() -> None:
        event = asyncio.Event()
        assert not await wait_set(event, 0.01)
        event.set()
        assert await wait_set(event, 0.01)

    asyncio.run(scenario())


MODULE = """
import socket, sys
link = socket.socket(fileno=3)
link.setblocking(True)
link.send(b"here " + sys.argv[1].encode())
if link.recv(100) == b"die":
    sys.exit(5)
"""


class Told:
    """What a `Child` called back."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()

    def received(self, data: bytes, fds: list[int]) -> None:
        self.events.put_nowait(data)

    def started(self) -> None:
        self.events.put_nowait("started")

    def ended(self, how: str) -> None:
        self.events.put_nowait(how)

    async def next(self) -> Any:
        async with asyncio.timeout(20):
            return await self.events.get()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Child, Told], Awaitable[None]]], None]:
    """Run a scenario with a child of the module above."""
    (tmp_path / "a_child.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    async def play(scenario: Callable[[Child, Told], Awaitable[None]]) -> None:
        told = Told()
        reaper = Reaper(asyncio.get_running_loop())
        child = Child("a child", ["a_child", "argument"], reaper, told.received, told.started, told.ended)
        try:
            child.start()
            await scenario(child, told)
        finally:
            await child.stop(5)
            reaper.close()
        assert child.pid == 0

    return lambda scenario: asyncio.run(play(scenario))


def test_a_child_has_its_link_and_comes_back_when_it_dies(run: Any) -> None:
    async def scenario(child: Child, told: Told) -> None:
        assert await told.next() == "started"
        assert await told.next() == b"here argument"
        first = child.pid
        assert os.getpgid(first) == first
        child.send(b"die")
        assert await told.next() == "exited with status 5"
        assert not child.is_running
        child.send(b"into the void")
        assert await told.next() == "started"
        assert await told.next() == b"here argument"
        assert (child.restarts, child.pid == first) == (1, False)
        os.kill(child.pid, signal.SIGKILL)
        assert await told.next() == "killed by SIGKILL"

    run(scenario)


def test_a_child_that_was_let_go_stays_away(run: Any) -> None:
    async def scenario(child: Child, told: Told) -> None:
        assert await told.next() == "started"
        assert await told.next() == b"here argument"
        child.let_end()
        child.send(b"die")
        assert await child.wait_gone(10)
        assert told.events.empty()

    run(scenario)


def test_a_child_is_one_until_it_is_reaped() -> None:
    assert not has_child(os.getpid())
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_child(child.pid)
    assert not has_child(child.pid)


def test_the_end_of_an_unwatched_child_is_collected() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        reaper = Reaper(loop)
        watched = loop.create_future()
        orphan = os.posix_spawn("/bin/true", ["true"], {})
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], {})
        reaper.watch(pid, watched.set_result)
        reaper.reap()
        async with asyncio.timeout(10):
            assert await watched == 7
            while Path(f"/proc/{orphan}").exists():
                await asyncio.sleep(0.01)
        reaper.close()

    asyncio.run(scenario())
