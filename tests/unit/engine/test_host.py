"""The engine host's decisions, with an adapter under the test's control and a clock that jumps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.batches import all_deltas
from support.mps import control_daemon
from support.virtual_time import run_in_virtual_time

from seedance.engine import host_link
from seedance.engine.adapter import EngineAdapter, EngineEvents, EngineState, EngineStatistics, Output
from seedance.engine.channel import (
    Abort,
    Batch,
    Delta,
    EngineChanged,
    Noted,
    QueueBound,
    Receiver,
    Refused,
    SetPaused,
    Submit,
    ToHost,
    ToWorker,
    encode,
    pack_singles,
)
from seedance.engine.failover import CONTINUED, ON_CPU, RESTART_MAX_S, RESTARTING
from seedance.engine.gpu_memory import Action
from seedance.engine.host import EngineHost
from seedance.engine.ledger import STREAMS, Ledger
from seedance.engine.packets import PacketSocket, pair
from seedance.engine.request import NOT_URGENT, FinishReason, ModelInfo, Sampling, TenantContext, Urgency
from seedance.engine.scheduling import TenantLimits, TenantStatistics
from seedance.engine.settings import EngineSettings, FailoverSettings
from seedance.engine.survivors import claim_of
from seedance.engine.vllm_control import Launch, LeftCore, VllmSettings
from seedance.errors import EngineDead, EngineError
from seedance.qos.gpu import GpuPart

MODEL = ModelInfo(
    name="m", tokenizer_dir="", max_model_len=100, vocab_size=50, eos_token_ids=(), created=0, engine="fake"
)
TENANT = TenantContext(name="acme", scheduling_class="gold", cache_salt="s")


class FakeAdapter:
    """An engine that does what the test says."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.submitted: list[tuple[int, str, list[int], Sampling]] = []
        self.urgencies: list[Urgency] = []
        self.emitted: list[list[int]] = []
        self.aborted: list[int] = []
        self.paused: dict[int, bool] = {}
        self.stopped = self.shrunk = 0
        self.fail_start: Exception | None = None
        self.refuse: EngineError | None = None
        self.during_start: Callable[[], None] = lambda: None
        self.statistics_never_come = False
        self.events: EngineEvents
        self.core_pid: int | None = None
        self.unclaimed: Collection[int] = ()
        self.claimable: dict[tuple[str, tuple[int, ...]], Output] = {}
        self.claims: list[str] = []
        self.remembered: list[ModelInfo] = []

    async def start(self, events: EngineEvents) -> ModelInfo:
        self.events = events
        self.starts.append(asyncio.get_running_loop().time())
        self.during_start()
        if self.fail_start is not None:
            raise self.fail_start
        return MODEL

    def submit(
        self,
        key: int,
        tenant: TenantContext,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        urgency: Urgency = NOT_URGENT,
        emitted_token_ids: Sequence[int] = (),
        claim: str = "",
    ) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.claims.append(claim)
        self.urgencies.append(urgency)
        self.emitted.append(list(emitted_token_ids))
        self.submitted.append((key, tenant.name, list(prompt_token_ids), sampling))

    def claim(self, claim: str, emitted_token_ids: Sequence[int]) -> Output | None:
        return self.claimable.pop((claim, tuple(emitted_token_ids)), None)

    def remember(self, model: ModelInfo) -> None:
        self.remembered.append(model)

    async def reload(self, name: str, model: str) -> ModelInfo:
        return msgspec.structs.replace(MODEL, name=name, tokenizer_dir=model)

    def abort(self, keys: Sequence[int]) -> None:
        self.aborted += keys

    def set_paused(self, keys: Sequence[int], is_paused: bool) -> None:
        self.paused = {**self.paused, **dict.fromkeys(keys, is_paused)}

    async def statistics(self) -> EngineStatistics:
        if self.statistics_never_come:
            await asyncio.Event().wait()
        return EngineStatistics(state=EngineState.READY, running=17, waiting=4)

    def give_up(self, reason: str) -> None:
        self.die(reason)

    def shrink(self) -> None:
        self.shrunk += 1

    def die(self, detail: str) -> None:
        self.events.state_changed(EngineState.DEAD, detail)

    async def stop(self) -> None:
        self.stopped += 1


class FakeSource:
    """The test's engines, one after the other, the last one again and again."""

    def __init__(self, *adapters: FakeAdapter) -> None:
        self.adapters = list(adapters)
        self.created: list[EngineSettings] = []
        self.rows: list[int] = []
        self.left_rows: list[int] = []
        self.most: list[int] = []
        self.stopped = 0

    async def left(self, settings: EngineSettings, most: int) -> Sequence[LeftCore]:
        self.most.append(most)
        vllm = VllmSettings(model="m", name="m", run_dir="/")
        launches = [Launch(number, vllm, "ipc://in", "ipc://out", row) for number, row in enumerate(self.left_rows)]
        return [LeftCore(launch, 100 + launch.launch, None) for launch in launches]

    def create(self, settings: EngineSettings, ledger: Ledger, left: LeftCore | None = None) -> EngineAdapter:
        assert left is None or left.engine_row == ledger.engine_row
        self.rows.append(ledger.engine_row)
        self.created.append(settings)
        return self.adapters.pop(0) if len(self.adapters) > 1 else self.adapters[0]

    async def stop(self) -> None:
        self.stopped += 1


class Scene:
    """A host in this process with a fake adapter, one worker's channel, and the supervisor's end of the link."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = pair()
        self.adapter = FakeAdapter()
        self.told: list[host_link.FromHost] = []
        self.host = EngineHost(theirs, loop)
        self.link = PacketSocket(
            ours, loop, lambda data, _: self.told.append(host_link.FROM_HOST.decode(data)), self._link_closed
        )
        self.worker, self._theirs = socket.socketpair()
        self.worker.setblocking(False)
        self._receiver: Receiver[ToWorker] = Receiver(ToWorker)

    def start(
        self,
        *adapters: FakeAdapter,
        queue: int = 0,
        gpu: GpuPart | None = None,
        left: Sequence[int] = (),
        ledger: Ledger | None = None,
        **failover: Any,
    ) -> None:
        """`left` are the rows of engines that another host left."""
        settings = EngineSettings(
            kind="synthetic",
            name="s",
            queue=queue,
            gpu=gpu or GpuPart(),
            run_dir="/run/e",
            failover=FailoverSettings(**failover),
        )
        self.source = FakeSource(*(adapters or [self.adapter]))
        self.source.left_rows += left
        self.host.start_engine(self.source, settings, ledger or Ledger.create())

    def _link_closed(self) -> None:
        """The host has gone; tests see it by what it stopped."""

    async def attach(self) -> None:
        with self._theirs:
            fds = [self._theirs.fileno()]
            self.link.send(host_link.TO_HOST.encode(host_link.Attach(1, TENANT)), fds)
        await settle()

    async def say(self, *messages: ToHost) -> None:
        self.worker.sendall(b"".join(map(encode, messages)))
        await settle()

    async def tell(self, message: host_link.ToHost, *fds: int) -> None:
        self.link.send(host_link.TO_HOST.encode(message), fds)
        await settle()

    def heard(self) -> list[ToWorker]:
        """Return what the worker has received since the last call."""
        with contextlib.suppress(BlockingIOError):
            return self._receiver.receive_data(self.worker.recv(1 << 20))
        return []

    def states(self) -> list[str]:
        return [message.state for message in self.told if isinstance(message, host_link.EngineChanged)]


async def settle() -> None:
    """Let everything happen that needs no time to pass."""
    for _ in range(20):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def scene(*, start: bool = True, queue: int = 0) -> AsyncIterator[Scene]:
    it = Scene()
    serving = asyncio.create_task(it.host.serve())
    if start:
        it.start(queue=queue)
    await settle()
    await it.attach()
    it.heard()
    try:
        yield it
    finally:
        it.host.stop()
        with contextlib.suppress(ZeroDivisionError):
            await serving
        it.link.close()
        it.worker.close()


def brought(it: Scene, key: int) -> list[int]:
    """Return all tokens of a generation so far, as another engine would get them."""
    generation = it.host._generations.get(key)
    assert generation is not None
    it.host._generations.fold()
    return generation.token_ids.tolist()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def sync() -> None:
        run_in_virtual_time(test())

    return sync


@run
async def test_generation_from_submit_to_end() -> None:
    async with scene() as it:
        sampling = Sampling(max_tokens=3)
        await it.say(Submit(40, [1, 2], sampling), Submit(41, [3], sampling))
        (first, *rest), (second, *_) = it.adapter.submitted
        assert rest == ["acme", [1, 2], sampling]
        it.host.step_completed([Output(first, [7], None, None, 16), Output(second, [8])])
        assert it.heard() == [Batch([Delta(40, [7], None, None, 16)], pack_singles([41, 8]))]
        it.host.step_completed([Output(second, [9], FinishReason.STOP), Output(first, [6])])
        assert it.heard() == [Batch([Delta(41, [9], FinishReason.STOP)], pack_singles([40, 6]))]
        it.host.step_completed([Output(first, [], FinishReason.ERROR, None, 0, "cannot go on")])
        assert it.heard() == [Batch([Delta(40, [], FinishReason.ERROR, None, 0, "cannot go on")])]
        assert it.adapter.aborted == []


@run
async def test_singles_of_a_step_go_to_their_streams_beside_its_outputs() -> None:
    async with scene() as it:
        sampling = Sampling(max_tokens=3)
        await it.say(*(Submit(stream, [1], sampling) for stream in (40, 41, 42)))
        first, second, third = (key for key, *_ in it.adapter.submitted)
        it.host.step_completed([], pack_singles([second, 7, first, 8, 9_999, 9]))
        it.host.step_completed([Output(second, [5])], pack_singles([first, 6]))
        it.host.step_completed([Output(third, [5], FinishReason.STOP)], pack_singles([first, 4]))
        assert it.heard() == [
            Batch([], pack_singles([41, 7, 40, 8])),
            Batch([], pack_singles([40, 6, 41, 5])),
            Batch([Delta(42, [5], FinishReason.STOP)], pack_singles([40, 4])),
        ]
        assert (brought(it, first), brought(it, second)) == ([8, 6, 4], [7, 5])


@run
async def test_generation_that_goes_on_behind_what_it_has_brought() -> None:
    async with scene() as it:
        sampling = Sampling(max_tokens=3, stop_token_ids=(9,))
        await it.say(Submit(40, [1, 2], sampling, NOT_URGENT, [5, 6]))
        assert it.adapter.emitted == [[5, 6]]
        assert brought(it, it.adapter.submitted[0][0]) == [5, 6]
        assert it.heard() == [Noted([40], CONTINUED)]
        ended = [([5, 6, 7], "length"), ([5, 9], "stop")]
        for stream, (emitted, reason) in enumerate(ended):
            await it.say(Submit(stream, [1, 2], sampling, NOT_URGENT, emitted))
            assert it.heard() == [Batch([Delta(stream, [], FinishReason(reason))])]
        assert len(it.adapter.submitted) == 1
        await it.say(Submit(7, [1] * 99, Sampling(max_tokens=3), NOT_URGENT, [5]))
        assert it.heard() == [Batch([Delta(7, [], FinishReason.LENGTH)])]


@run
async def test_outputs_of_nobody_are_dropped() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        key = it.adapter.submitted[0][0]
        await it.say(Abort([1, 2]))
        assert it.adapter.aborted == [key]
        it.host.step_completed([Output(key, [5]), Output(999, [5])])
        it.host.step_completed([])
        assert it.heard() == []


@run
async def test_what_waits_for_a_slow_worker_is_held_dropped_and_delivered() -> None:
    async with scene() as it:
        sampling = Sampling(max_tokens=100_000)
        await it.say(Submit(1, [1], sampling), Submit(2, [1], sampling))
        first, second = (key for key, *_ in it.adapter.submitted)
        channel = it.host._channels[1]
        sent = 0
        while channel.statistics().backlog_tokens == 0:
            it.host.step_completed([Output(first, [7] * 5_000)])
            sent += 1
        it.host.step_completed([Output(first, [7] * 5_000)])
        it.host.step_completed([Output(second, [8], FinishReason.STOP)])
        assert channel.statistics().backlog_tokens == 10_001
        await it.say(Submit(2, [1], sampling), Abort([1]))
        assert channel.statistics().backlog_tokens == 1, "an aborted stream's tokens are dropped"
        assert channel.statistics().backlog_bytes > 0
        heard: list[ToWorker] = []
        while channel.statistics().backlog_bytes or channel.statistics().backlog_tokens:
            heard += it.heard()
            await settle()
        heard += it.heard()
        refusals = [message for message in heard if isinstance(message, Refused)]
        assert [(refusal.stream, refusal.code) for refusal in refusals] == [(2, "invalid_request")]
        deltas = [delta for message in heard if isinstance(message, Batch) for delta in all_deltas(message)]
        assert sum(len(delta.token_ids) for delta in deltas if delta.stream == 1) == (sent - 1) * 5_000
        assert [delta for delta in deltas if delta.stream == 2] == [Delta(2, [8], FinishReason.STOP)]
        await it.say(Submit(2, [1], sampling))
        assert len(it.adapter.submitted) == 3


@run
async def test_refusals_carry_the_engines_reason() -> None:
    async with scene() as it:
        it.adapter.refuse = EngineError("context_too_long", "cannot take so much")
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        it.adapter.refuse = None
        await it.say(Submit(1, [1], Sampling(max_tokens=3)), Submit(1, [1], Sampling(max_tokens=3)))
        assert [(m.stream, m.code) for m in it.heard() if isinstance(m, Refused)] == [
            (1, "context_too_long"),
            (1, "invalid_request"),
        ]
        assert len(it.adapter.submitted) == 1


@run
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


@run
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


@run
async def test_starts_of_a_standby_that_fail_do_not_hold_up_the_engine_that_is_needed() -> None:
    async with scene(start=False) as it:
        first, broken = FakeAdapter(), FakeAdapter()
        broken.fail_start = EngineDead("no memory for two")
        it.start(first, broken, standby=True)
        await asyncio.sleep(200)
        assert it.states() == ["starting", "ready"]
        broken.fail_start = None
        first.die("killed")
        await settle()
        assert it.states() == ["starting", "ready", "recovering", "ready"]


@run
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


@run
async def test_both_engines_dead_at_once_are_one_death() -> None:
    async with scene(start=False) as it:
        adapters = FakeAdapter(), FakeAdapter(), FakeAdapter()
        it.start(*adapters, standby=True)
        await asyncio.sleep(5)
        for adapter in (adapters[1], adapters[0]):
            adapter.die("killed")
        await settle()
        assert it.states() == ["starting", "ready", "recovering", "ready"]


@run
async def test_generation_that_ended_with_its_engines_last_words_is_ended() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=2)))
        it.host.step_completed([Output(it.adapter.submitted[0][0], [7, 8])])
        it.adapter.die("killed")
        await settle()
        assert [m for m in it.heard() if isinstance(m, Batch)][-1] == Batch([Delta(1, [], FinishReason.LENGTH)])
        assert len(it.adapter.submitted) == 1
        assert not it.host._generations


@run
async def test_what_waits_is_given_up_when_too_many_starts_have_failed() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        it.adapter.fail_start = EngineDead("no memory")
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


@run
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


@run
async def test_next_engine_may_refuse_what_the_last_one_took() -> None:
    async with scene(start=False) as it:
        first, second = FakeAdapter(), FakeAdapter()
        second.refuse = EngineError("context_too_long", "cannot take so much")
        it.start(first, second)
        await settle()
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        it.heard()
        first.die("killed")
        await settle()
        assert [(m.stream, m.code) for m in it.heard() if isinstance(m, Refused)] == [(1, "context_too_long")]


@run
async def test_engine_on_the_processor_serves_until_the_other_is_up_again() -> None:
    async with scene(start=False) as it:
        gpu, broken, cpu, again = adapters = [FakeAdapter() for _ in range(4)]
        broken.fail_start = EngineDead("no GPU")
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


@run
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


@run
async def test_engine_that_does_not_come_up_is_tried_less_and_less_often() -> None:
    async with scene(start=False) as it:
        it.adapter.fail_start = EngineDead("cannot load the weights")
        it.start()
        await asyncio.sleep(100)
        waits = [later - earlier for earlier, later in zip(it.adapter.starts, it.adapter.starts[1:], strict=False)]
        assert waits == pytest.approx([1, 2, 4, 8, 16, RESTART_MAX_S, RESTART_MAX_S])
        assert it.states() == ["starting", "dead"] * 8
        it.adapter.fail_start = None
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


@run
async def test_an_engine_without_such_limits_needs_no_mps() -> None:
    async with scene(start=False) as it:
        it.start(gpu=GpuPart(device="0", mps_directory="/nowhere"))
        await settle()
        assert it.states() == ["starting", "ready"]


@run
async def test_ready_counts_only_with_the_model() -> None:
    async with scene(start=False) as it:

        def during_start() -> None:
            it.adapter.events.state_changed(EngineState.STARTING, "loading")
            it.adapter.events.state_changed(EngineState.READY, "16 blocks")

        it.adapter.during_start = during_start
        it.start()
        await settle()
        assert it.heard() == [
            EngineChanged("starting", "", None),
            EngineChanged("starting", "loading", None),
            EngineChanged("ready", "16 blocks", MODEL),
        ]


@run
async def test_bug_in_an_adapter_ends_the_host() -> None:
    it = Scene()
    it.adapter.fail_start = ZeroDivisionError("a bug")
    it.start()
    with pytest.raises(ZeroDivisionError):
        await it.host.serve()
    assert it.adapter.stopped == 1
    it.link.close()
    it.worker.close()
    it._theirs.close()


@run
async def test_statistics_do_not_wait_for_an_engine_that_is_stuck() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        await it.tell(host_link.QueryStatistics(5))
        it.adapter.statistics_never_come = True
        await it.tell(host_link.QueryStatistics(6))
        await asyncio.sleep(10)
        answers = [message for message in it.told if isinstance(message, host_link.Statistics)]
        assert [(answer.query, answer.engine.running, answer.engine.waiting) for answer in answers] == [
            (5, 17, 4),
            (6, 1, 0),
        ]
        assert answers[0].channels[0].open_streams == 1
        assert answers[0].cpu_s > 0


@run
async def test_end_of_the_link_stops_the_engine_and_aborts_nothing_twice() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        it.link.close()
        await settle()
        assert it.adapter.stopped == 1
        assert len(it.adapter.aborted) == 1


@run
async def test_engine_is_not_started_twice() -> None:
    async with scene() as it:
        settings = EngineSettings(kind="synthetic", name="s")
        ledger = Ledger.create()
        await it.tell(host_link.StartEngine(settings), ledger.fd)
        assert it.adapter.stopped == 1
        ledger.close()


@run
async def test_pauses_reach_the_engine_by_its_own_numbers() -> None:
    async with scene() as it:
        await it.say(Submit(7, [1], Sampling(max_tokens=3)), Submit(8, [1], Sampling(max_tokens=3)))
        first, second = (key for key, *_ in it.adapter.submitted)
        await it.say(SetPaused([7, 99], is_paused=True), SetPaused([8], is_paused=False))
        assert it.adapter.paused == {first: True, second: False}


@run
async def test_number_of_a_generation_that_lives_is_not_given_again() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        it.host._generations._key = it.adapter.submitted[0][0]
        await it.say(Submit(2, [1], Sampling(max_tokens=3)))
        keys = [key for key, *_ in it.adapter.submitted]
        assert len(set(keys)) == 2
        assert max(keys) < STREAMS


@run
async def test_descriptor_where_none_belongs_ends_the_host_and_is_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with scene() as it:
        fd = os.open("/dev/null", os.O_RDONLY)
        it.link.send(host_link.TO_HOST.encode(host_link.Detach(1)), [fd])
        os.close(fd)
        await settle()
        assert it.adapter.stopped == 1
    assert len(os.listdir("/proc/self/fd")) == before


@run
async def test_a_full_queue_is_told_and_kept() -> None:
    async with scene(queue=2) as it:
        sampling = Sampling(max_tokens=3)
        await it.say(*(Submit(stream, [1], sampling) for stream in (1, 2, 3)))
        full, refused = it.heard()
        assert full == QueueBound(1, 0.0, 2)
        assert isinstance(refused, Refused)
        assert (refused.stream, refused.code, refused.retry_after_s) == (3, "overloaded", 1.0)
        first, second = (key for key, *_ in it.adapter.submitted)
        it.host.step_completed([Output(first, [7])])
        free, batch = it.heard()
        assert isinstance(free, QueueBound) and isinstance(batch, Batch)
        assert free.most is None
        assert free.starts_per_s > 0
        await it.say(Submit(4, [1], sampling))
        assert [type(message) for message in it.heard()] == [QueueBound]
        await it.say(Abort([4]))
        assert it.heard() == [QueueBound(None, free.starts_per_s, 2)]
        await it.say(Submit(5, [1], sampling))
        it.heard()
        it.adapter.fail_start = EngineDead("no memory")
        it.adapter.die("killed")
        assert it.heard() == [EngineChanged("recovering", "killed", MODEL, RESTARTING)]
        await it.say(Submit(6, [1], sampling))
        assert [type(message) for message in it.heard()] == [Refused], "those that wait for an engine are in it"
        await asyncio.sleep(10)
        told = [message for message in it.heard() if isinstance(message, QueueBound)]
        assert told[-1].most is None, "those that waited are gone"
        assert second not in it.adapter.aborted


@run
async def test_how_urgent_a_request_is_reaches_the_engine() -> None:
    async with scene() as it:
        urgent = Urgency(12.5, 0.25, 0.01)
        await it.say(Submit(1, [1], Sampling(max_tokens=3), urgent), Submit(2, [1], Sampling(max_tokens=3)))
        assert it.adapter.urgencies == [urgent, NOT_URGENT]


# -- engines of a host that has died ----------------------------------------------------------------------------------


@run
async def test_host_goes_on_with_the_engines_of_the_last_one() -> None:
    async with scene(start=False) as it:
        ledger = Ledger.create()
        ledger.choose(3)
        ledger.set_limits(1, TenantLimits())
        told = TenantStatistics(
            step_s=1.5,
            prompt_tokens=1,
            cached_tokens=0,
            output_tokens=2,
            held_s=0.0,
            preemptions=0,
            recomputed_tokens=0,
            queue_s=0.0,
            started=1,
            running=1,
            waiting=0,
            kv_blocks=3,
            is_held=False,
        )
        ledger.set_statistics(1, told)
        active, standby = FakeAdapter(), FakeAdapter()
        it.start(active, standby, left=[3, 5], standby=True, ledger=ledger)
        await asyncio.sleep(5)
        assert (it.source.most, it.source.rows) == ([2], [3, 5])
        assert it.states() == ["ready"]
        assert it.host.engines is not None
        assert (it.host.engines.standing_by, len(it.host.engines.all)) == (1, 2)
        assert (ledger.active_row, ledger.statistics(1)) == (3, told)
        active.die("killed")
        await settle()
        assert ledger.active_row == 5
        assert ledger.statistics(1) is None


@run
async def test_engine_that_does_not_answer_its_new_host_is_followed_by_another_one() -> None:
    async with scene(start=False) as it:
        silent, fresh = FakeAdapter(), FakeAdapter()
        silent.fail_start = EngineDead("it does not answer")
        it.start(silent, fresh, left=[3])
        await asyncio.sleep(5)
        assert (silent.stopped, it.states()[-1]) == (1, "ready")
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        assert len(fresh.submitted) == 1


@run
async def test_what_an_engine_went_on_with_is_taken_over_by_who_asks_for_it_again() -> None:
    async with scene(start=False) as it:
        it.adapter.unclaimed = {0, 1}
        it.start(left=[0])
        await settle()
        assert it.adapter.remembered == [MODEL]
        sampling = Sampling(max_tokens=9)
        claims = [claim_of("acme", stream, [1, 2], sampling) for stream in range(4)]
        it.adapter.claimable = {
            (claims[1], (5,)): Output(0, [6, 7], None, None, 16),
            (claims[2], ()): Output(1, []),
            (claims[3], (5,)): Output(9, [6], FinishReason.STOP),
        }
        it.heard()
        await it.say(*(Submit(stream, [1, 2], sampling, NOT_URGENT, [5] if stream % 2 else []) for stream in range(4)))
        assert [key for key, *_ in it.adapter.submitted] == [2]
        assert it.adapter.claims == [claims[0]]
        assert it.heard() == [
            Batch([Delta(1, [6, 7], None, None, 16)]),
            Noted([1], CONTINUED, is_same=True),
            Batch([Delta(3, [6], FinishReason.STOP)]),
            Noted([3], CONTINUED, is_same=True),
        ]
        it.host.step_completed([Output(0, [8]), Output(1, [5]), Output(2, [5])])
        assert it.heard() == [Batch([], pack_singles([1, 8, 2, 5, 0, 5]))]
        assert brought(it, 0) == [5, 6, 7, 8]
        it.adapter.die("killed")
        await settle()
        again = dict(zip([key for key, *_ in it.adapter.submitted], it.adapter.emitted, strict=True))
        assert again == {0: [5, 6, 7, 8], 1: [5], 2: [5]}
        await it.say(Abort([1]))
        assert it.adapter.aborted == [0]
