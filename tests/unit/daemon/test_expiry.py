"""When a log of what clients may come back for is looked at."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from support.virtual_time import VirtualTimeLoop

from seedance.daemon.expiry import ExpiryTimer
from seedance.daemon.session_log import SessionLog


class Item:
    held_bytes = 1
    oldest_seq = 1


@pytest.fixture
def loop() -> Iterator[VirtualTimeLoop]:
    loop = VirtualTimeLoop()
    yield loop
    loop.close()


def test_it_looks_when_somebodys_time_is_up_and_each_second_before(loop: VirtualTimeLoop) -> None:
    log: SessionLog[Item] = SessionLog(b"k", 2.5, 100, os.urandom)
    looked: list[float] = []

    def look() -> None:
        looked.append(loop.time())
        log.expire(loop.time())
        timer.set()

    timer = ExpiryTimer(loop, log, look)
    kept = log.add("client", lambda name, token: Item())
    timer.set()
    loop.run_until_complete(asyncio.sleep(5.0))
    assert looked == []  # who is there may stay
    began_s = loop.time()
    log.left(kept, began_s)
    timer.set()
    loop.run_until_complete(asyncio.sleep(10.0))
    assert [at_s - began_s for at_s in looked] == pytest.approx([1.0, 2.0, 2.5])
    assert len(log) == 0


def test_it_waits_no_more_once_closed(loop: VirtualTimeLoop) -> None:
    log: SessionLog[Item] = SessionLog(b"k", 1.0, 100, os.urandom)
    timer = ExpiryTimer(loop, log, lambda: pytest.fail("closed"))
    log.left(log.add("client", lambda name, token: Item()), loop.time())
    timer.set()
    for _ in range(2):
        timer.close()
    loop.run_until_complete(asyncio.sleep(3.0))
