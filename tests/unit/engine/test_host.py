"""The engine host's decisions, with an adapter under the test's control and a clock that jumps."""

from __future__ import annotations

import asyncio
import os

import pytest
from support.batches import all_deltas
from support.fake_adapter import MODEL
from support.host_scene import Scene, brought, scene, settle
from support.virtual_time import in_virtual_time

from seedance.engine import host_link
from seedance.engine.adapter import EngineState, Output
from seedance.engine.channel import (
    Abort,
    Batch,
    Delta,
    EngineChanged,
    Noted,
    QueueBound,
    Refused,
    SetPaused,
    Submit,
    ToWorker,
    pack_singles,
)
from seedance.engine.failover import CONTINUED, RESTARTING
from seedance.engine.ledger import STREAMS, Ledger
from seedance.engine.request import NOT_URGENT, FinishReason, Sampling, Urgency
from seedance.engine.settings import EngineSettings
from seedance.errors import EngineDead, EngineError


@in_virtual_time
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


@in_virtual_time
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


@in_virtual_time
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


@in_virtual_time
async def test_outputs_of_nobody_are_dropped() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        key = it.adapter.submitted[0][0]
        await it.say(Abort([1, 2]))
        assert it.adapter.aborted == [key]
        it.host.step_completed([Output(key, [5]), Output(999, [5])])
        it.host.step_completed([])
        assert it.heard() == []


@in_virtual_time
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


@in_virtual_time
async def test_refusals_carry_the_engines_reason() -> None:
    async with scene() as it:
        it.adapter.refusal = EngineError("context_too_long", "cannot take so much")
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        it.adapter.refusal = None
        await it.say(Submit(1, [1], Sampling(max_tokens=3)), Submit(1, [1], Sampling(max_tokens=3)))
        assert [(m.stream, m.code) for m in it.heard() if isinstance(m, Refused)] == [
            (1, "context_too_long"),
            (1, "invalid_request"),
        ]
        assert len(it.adapter.submitted) == 1


@in_virtual_time
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


@in_virtual_time
async def test_bug_in_an_adapter_ends_the_host() -> None:
    it = Scene()
    it.adapter.start_error = ZeroDivisionError("a bug")
    it.start()
    with pytest.raises(ZeroDivisionError):
        await it.host.serve()
    assert it.adapter.stopped == 1
    it.link.close()
    it.worker.close()
    it._theirs.close()


@in_virtual_time
async def test_statistics_do_not_wait_for_an_engine_that_is_stuck() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        it.adapter.running, it.adapter.waiting = 17, 4
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


@in_virtual_time
async def test_end_of_the_link_stops_the_engine_and_aborts_nothing_twice() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        it.link.close()
        await settle()
        assert it.adapter.stopped == 1
        assert len(it.adapter.aborted) == 1


@in_virtual_time
async def test_engine_is_not_started_twice() -> None:
    async with scene() as it:
        settings = EngineSettings(kind="synthetic", name="s")
        ledger = Ledger.create()
        await it.tell(host_link.StartEngine(settings), ledger.fd)
        assert it.adapter.stopped == 1
        ledger.close()


@in_virtual_time
async def test_pauses_reach_the_engine_by_its_own_numbers() -> None:
    async with scene() as it:
        await it.say(Submit(7, [1], Sampling(max_tokens=3)), Submit(8, [1], Sampling(max_tokens=3)))
        first, second = (key for key, *_ in it.adapter.submitted)
        await it.say(SetPaused([7, 99], is_paused=True), SetPaused([8], is_paused=False))
        assert it.adapter.paused == {first: True, second: False}


@in_virtual_time
async def test_number_of_a_generation_that_lives_is_not_given_again() -> None:
    async with scene() as it:
        await it.say(Submit(1, [1], Sampling(max_tokens=3)))
        it.host._generations._key = it.adapter.submitted[0][0]
        await it.say(Submit(2, [1], Sampling(max_tokens=3)))
        keys = [key for key, *_ in it.adapter.submitted]
        assert len(set(keys)) == 2
        assert max(keys) < STREAMS


@in_virtual_time
async def test_descriptor_where_none_belongs_ends_the_host_and_is_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with scene() as it:
        fd = os.open("/dev/null", os.O_RDONLY)
        it.link.send(host_link.TO_HOST.encode(host_link.Detach(1)), [fd])
        os.close(fd)
        await settle()
        assert it.adapter.stopped == 1
    assert len(os.listdir("/proc/self/fd")) == before


@in_virtual_time
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
        it.adapter.start_error = EngineDead("no memory")
        it.adapter.die("killed")
        assert it.heard() == [EngineChanged("recovering", "killed", MODEL, RESTARTING)]
        await it.say(Submit(6, [1], sampling))
        assert [type(message) for message in it.heard()] == [Refused], "those that wait for an engine are in it"
        await asyncio.sleep(10)
        told = [message for message in it.heard() if isinstance(message, QueueBound)]
        assert told[-1].most is None, "those that waited are gone"
        assert second not in it.adapter.aborted


@in_virtual_time
async def test_how_urgent_a_request_is_reaches_the_engine() -> None:
    async with scene() as it:
        urgent = Urgency(12.5, 0.25, 0.01)
        await it.say(Submit(1, [1], Sampling(max_tokens=3), urgent), Submit(2, [1], Sampling(max_tokens=3)))
        assert it.adapter.urgencies == [urgent, NOT_URGENT]
