"""What the engine host does when engines die or do not come up, with adapters under the test's control."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from support.fake_adapter import MODEL, FakeAdapter
from support.host_scene import scene, settle
from support.mps import control_daemon
from support.virtual_time import in_virtual_time, run_in_virtual_time

from seedance.engine.adapter import Output
from seedance.engine.channel import (
    Abort,
    Batch,
    Delta,
    EngineChanged,
    Refused,
    SetPaused,
    Submit,
    encode,
    pack_singles,
)
from seedance.engine.failover import CONTINUED, ON_CPU, RESTART_MAX_S, RESTARTING
from seedance.engine.gpu_memory import Action
from seedance.engine.request import FinishReason, Sampling, Urgency
from seedance.errors import EngineDead, EngineError
from seedance.qos.gpu import GpuPart


@in_virtual_time
async def test_dead_engines_generations_go_on_with_the_next_one() -> None:
    async with scene(start=False) as it:
        first, second = FakeAdapter(), FakeAdapter()
        it.start(first, second)
        await settle()
        it.heard()
        sampling = Sampling(max_tokens=5)
        soon = Urgency(deadline_s=9.0)
        await it.say(Submit(1, [1], sampling), Submit(2, [2], sampling, soon), Submit(3, [3], sampling))
        (one, *_), (two, *_), (three, *_) = first.submitted
        it.host.step_completed([Output(one, [7]), Output(two, [8, 9]), Output(three, [6], FinishReason.STOP)])
        it.heard()
        await it.say(SetPaused([1], is_paused=True))
        second.during_start = lambda: it.worker.sendall(encode(Submit(4, [4], sampling)) + encode(Abort([9])))
        first.die("killed")
        first.die("killed, told twice")
        assert it.heard() == [EngineChanged("recovering", "killed", MODEL, RESTARTING)]
        await settle()
        assert it.heard() == [EngineChanged("ready", "", MODEL, CONTINUED)]
        assert [key for key, *_ in second.submitted[:2]] == [two, one]
        assert second.submitted[:2] == [(two, "acme", [2], sampling), (one, "acme", [1], sampling)]
        assert second.emitted[:2] == [[8, 9], [7]]
        assert second.paused == {one: True}
        assert len(second.submitted) == 3, "what came meanwhile waits too"
        it.host.step_completed([Output(one, [11]), Output(two, [10], FinishReason.LENGTH)])
        assert it.heard() == [Batch([Delta(2, [10], FinishReason.LENGTH)], pack_singles([1, 11]))]
        assert (first.aborted, first.stopped) == ([], 1)
        assert it.states() == ["starting", "ready", "recovering", "ready"]


@in_virtual_time
async def test_engine_that_stands_by_goes_on_at_once_and_another_one_stands_by_then() -> None:
    async with scene(start=False) as it:
        first, second, third = adapters = FakeAdapter(), FakeAdapter(), FakeAdapter()
        it.start(*adapters, standby=True)
        await asyncio.sleep(5)
        it.heard()
        assert len(it.source.created) == 2
        await it.say(Submit(1, [1], Sampling(max_tokens=5)))
        it.host.step_completed([Output(first.submitted[0][0], [7])])
        it.heard()
        first.die("killed")
        assert it.heard() == [EngineChanged("ready", "", MODEL, CONTINUED)]
        assert second.emitted == [[7]]
        assert not third.starts, "who goes on has the machine to itself at first"
        await asyncio.sleep(5)
        assert third.starts
        third.die("while it stood by")
        assert it.states() == ["starting", "ready", "ready"]
        assert it.heard() == []


@in_virtual_time
async def test_starts_of_a_standby_that_fail_do_not_hold_up_the_engine_that_is_needed() -> None:
    async with scene(start=False) as it:
        first, broken = FakeAdapter(), FakeAdapter()
        broken.start_error = EngineDead("no memory for two")
        it.start(first, broken, standby=True)
        await asyncio.sleep(200)
        assert it.states() == ["starting", "ready"]
        broken.start_error = None
        first.die("killed")
        await settle()
        assert it.states() == ["starting", "ready", "recovering", "ready"]


@in_virtual_time
async def test_no_stream_waits_for_the_collector_when_an_engine_takes_over() -> None:
    collected: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        collected.append(phase)

    async with scene(start=False) as it:
        first = FakeAdapter()
        it.start(first, FakeAdapter(), standby=True)
        await asyncio.sleep(5)
        gc.disable()
        gc.callbacks.append(note)
        try:
            first.die("killed")
            await settle()
        finally:
            gc.callbacks.remove(note)
            gc.enable()
        assert it.states()[-1] == "ready"
        assert collected == []


@in_virtual_time
async def test_both_engines_dead_at_once_are_one_death() -> None:
    async with scene(start=False) as it:
        adapters = FakeAdapter(), FakeAdapter(), FakeAdapter()
        it.start(*adapters, standby=True)
        await asyncio.sleep(5)
        for adapter in (adapters[1], adapters[0]):
            adapter.die("killed")
        await settle()
        assert it.states() == ["starting", "ready", "recovering", "ready"]


@in_virtual_time
async def test_generation_that_ended_with_its_engines_last_words_is_ended() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=2)))
        it.host.step_completed([Output(it.adapter.submitted[0][0], [7, 8])])
        it.adapter.die("killed")
        await settle()
        assert [m for m in it.heard() if isinstance(m, Batch)][-1] == Batch([Delta(1, [], FinishReason.LENGTH)])
        assert len(it.adapter.submitted) == 1
        assert not it.host._generations


@in_virtual_time
async def test_what_waits_is_given_up_when_too_many_starts_have_failed() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        it.adapter.start_error = EngineDead("no memory")
        it.adapter.die("killed")
        await asyncio.sleep(2.5)
        assert it.states()[-1] == "recovering"
        await it.say(Abort([1]), Submit(2, [1], Sampling(max_tokens=3)))
        await asyncio.sleep(1.0)
        assert it.states()[-1] == "dead"
        assert it.heard() == [
            EngineChanged("recovering", "killed", MODEL, RESTARTING),
            EngineChanged("dead", "no memory", None),
        ]
        assert not it.host._generations
        await it.say(Submit(3, [1], Sampling(max_tokens=3)))
        (refused,) = it.heard()
        assert isinstance(refused, Refused)
        assert refused.code == "engine_unavailable"


@in_virtual_time
async def test_request_that_engines_die_of_is_not_given_to_a_fourth() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        for _ in range(2):
            it.adapter.die("of it")
            await asyncio.sleep(10)
        await it.say(Submit(2, [1], Sampling(max_tokens=3)))
        it.heard()
        it.adapter.die("of it")
        (refused, *_) = it.heard()
        assert isinstance(refused, Refused)
        assert (refused.stream, refused.code) == (1, "engine_unavailable")
        await asyncio.sleep(10)
        assert len(it.adapter.submitted) == 5


@in_virtual_time
async def test_next_engine_may_refuse_what_the_last_one_took() -> None:
    async with scene(start=False) as it:
        first, second = FakeAdapter(), FakeAdapter()
        second.refusal = EngineError("context_too_long", "cannot take so much")
        it.start(first, second)
        await settle()
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        it.heard()
        first.die("killed")
        await settle()
        assert [(m.stream, m.code) for m in it.heard() if isinstance(m, Refused)] == [(1, "context_too_long")]


@in_virtual_time
async def test_engine_on_the_processor_serves_until_the_other_is_up_again() -> None:
    async with scene(start=False) as it:
        gpu, broken, cpu, again = adapters = [FakeAdapter() for _ in range(4)]
        broken.start_error = EngineDead("no GPU")
        it.start(*adapters, attempts=1, cpu_python="/cpu/bin/python", cpu_kv_bytes=5)
        await settle()
        await it.say(Submit(1, [1], Sampling(max_tokens=9)))
        key = gpu.submitted[0][0]
        it.host.step_completed([Output(key, [7])])
        gpu.die("fell off the bus")
        await asyncio.sleep(0.5)
        assert [m.note for m in it.heard() if isinstance(m, EngineChanged)][-2:] == [RESTARTING, ON_CPU]
        assert cpu.emitted == [[7]]
        on_cpu = it.source.created[2]
        assert (on_cpu.python, on_cpu.kv_bytes, on_cpu.run_dir) == ("/cpu/bin/python", 5, "/run/e/cpu")
        it.host.step_completed([Output(key, [8])])
        await asyncio.sleep(1.0)
        assert again.emitted == [[7, 8]]
        assert (cpu.aborted, cpu.stopped) == ([key], 1)
        assert it.states() == ["starting", "ready", "recovering", "ready", "ready"]


@in_virtual_time
async def test_new_requests_wait_while_the_gpus_memory_is_low() -> None:
    async with scene() as it:
        assert it.host.engines is not None
        it.host.engines.memory_low(Action.HOLD)
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        it.host.engines.memory_low(Action.SHRINK)
        assert (it.adapter.submitted, it.adapter.shrunk) == ([], 1)
        it.host.engines.memory_low(Action.RELEASE)
        assert len(it.adapter.submitted) == 1
        it.heard()
        it.host.engines.memory_low(Action.MOVE)
        assert [m.note for m in it.heard() if isinstance(m, EngineChanged)] == [RESTARTING]
        await settle()
        assert len(it.adapter.submitted) == 2


@in_virtual_time
async def test_engine_that_does_not_come_up_is_tried_less_and_less_often() -> None:
    async with scene(start=False) as it:
        it.adapter.start_error = EngineDead("cannot load the weights")
        it.start()
        await asyncio.sleep(100)
        waits = [later - earlier for earlier, later in zip(it.adapter.starts, it.adapter.starts[1:], strict=False)]
        assert waits == pytest.approx([1, 2, 4, 8, 16, RESTART_MAX_S, RESTART_MAX_S])
        assert it.states() == ["starting", "dead"] * 8
        it.adapter.start_error = None
        await asyncio.sleep(RESTART_MAX_S)
        assert it.states()[-1] == "ready"
        # Short lives keep the wait long, a long one makes it short again.
        it.adapter.die("again")
        await asyncio.sleep(RESTART_MAX_S - 1)
        assert it.states()[-1] == "recovering"
        await asyncio.sleep(100)
        assert it.states()[-1] == "ready"
        it.adapter.die("again")
        await settle()
        assert it.states()[-1] == "ready"


def test_engine_with_limits_that_mps_keeps_stays_down_until_that_is_there(tmp_path: Path) -> None:
    part = GpuPart(threads=0.5, mps_directory=str(tmp_path))

    async def drive() -> None:
        async with scene(start=False) as it:
            it.start(gpu=part)
            await settle()
            starting, dead = it.heard()
            assert starting == EngineChanged("starting", "", None)
            assert isinstance(dead, EngineChanged)
            assert dead.state == "dead"
            assert dead.detail.startswith(
                "cannot keep the engine within engine.gpu.threads and engine.gpu.memory: no MPS"
            )
            assert f"CUDA_MPS_PIPE_DIRECTORY={tmp_path} nvidia-cuda-mps-control -d" in dead.detail
            assert it.adapter.starts == []
            with control_daemon(tmp_path):
                await asyncio.sleep(1.5)
                assert it.states() == ["starting", "dead", "starting", "ready"]
            it.adapter.die("with MPS")
            await asyncio.sleep(20)
            assert it.states()[-1] == "dead"
            assert len(it.adapter.starts) == 1

    run_in_virtual_time(drive())


@in_virtual_time
async def test_an_engine_without_such_limits_needs_no_mps() -> None:
    async with scene(start=False) as it:
        it.start(gpu=GpuPart(device="0", mps_directory="/nowhere"))
        await settle()
        assert it.states() == ["starting", "ready"]
