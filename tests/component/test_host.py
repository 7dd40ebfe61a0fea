"""The engine host as a process, with the synthetic engine, driven through its real sockets."""

from __future__ import annotations

import asyncio
import random
import signal
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from support.host import HostProcess, make_settings, running_host

from seedance.engine import host_link
from seedance.engine.channel import Batch, Delta, Submit, encode
from seedance.engine.request import FinishReason, Sampling
from seedance.engine.settings import FailoverSettings
from seedance.engine.synthetic_stream import expected_token_ids
from seedance.engine.synthetic_vocabulary import encode_text

PROMPT = encode_text("tell me of the river")
FAST = {"tokens_per_s": 500.0, "prompt_tokens_per_s": 0.0}


def with_host(**synthetic: Any) -> Callable[[Callable[[HostProcess], Awaitable[None]]], Callable[[], None]]:
    """Run a coroutine test with a host whose engine is ready."""

    def decorate(test: Callable[[HostProcess], Awaitable[None]]) -> Callable[[], None]:
        async def main() -> None:
            async with running_host(make_settings(**{**FAST, **synthetic})) as host:
                await test(host)

        # Not functools.wraps: pytest would look for a fixture named 'host'.
        def run() -> None:
            asyncio.run(main())

        run.__doc__ = test.__doc__
        return run

    return decorate


async def wait_until_idle(host: HostProcess) -> host_link.Statistics:
    """Ask until nothing runs or waits."""
    async with asyncio.timeout(20):
        while True:
            statistics = await host.statistics()
            if not statistics.engine.running and not statistics.engine.waiting:
                return statistics


@with_host()
async def test_streams_on_two_channels_are_the_expected_ones(host: HostProcess) -> None:
    workers = [host.attach(1, "acme"), host.attach(2, "globex")]
    for worker in workers:
        for stream in range(20):
            await worker.submit(stream, [*PROMPT, stream], max_tokens=30)
    for worker in workers:
        await worker.wait_for(lambda worker=worker: len(worker.finished) == 20)
        assert worker.states[0] == worker.order[0]
        assert worker.states[0].state == "ready"
        assert worker.states[0].model is not None
        for stream in range(20):
            assert worker.token_ids[stream] == expected_token_ids(7, [*PROMPT, stream], 30)
            assert worker.finished[stream] is FinishReason.LENGTH
    statistics = await wait_until_idle(host)
    assert statistics.engine.kv_blocks_used == 0
    assert [(channel.tenant, channel.open_streams) for channel in statistics.channels] == [("acme", 0), ("globex", 0)]
    assert [channel.tokens for channel in statistics.channels] == [600, 600]


@with_host(tokens_per_s=100.0)
async def test_step_is_one_batch_and_one_send_per_channel(host: HostProcess) -> None:
    workers = [host.attach(1), host.attach(2)]
    for worker in workers:
        for stream in range(64):
            await worker.submit(stream, [*PROMPT, stream], max_tokens=50)
    for worker in workers:
        await worker.wait_for(lambda worker=worker: len(worker.finished) == 64)
    statistics = await wait_until_idle(host)
    for worker, channel in zip(workers, statistics.channels, strict=True):
        assert channel.batches == len(worker.batches)
        # The state that every channel begins with is the other send.
        assert channel.sends == channel.batches + 1
        assert channel.batches <= statistics.engine.steps
        # All streams share the steps: far fewer batches than tokens.
        assert channel.tokens == 64 * 50
        assert channel.batches <= 60


@with_host(tokens_per_s=2_000.0)
async def test_worker_that_does_not_read_slows_nobody_and_loses_nothing(host: HostProcess) -> None:
    slow, quick = host.attach(1), host.attach(2)
    await slow.wait_for(lambda: slow.states)
    slow.reading.clear()
    for stream in range(60):
        await slow.submit(stream, [*PROMPT, stream], max_tokens=300, logprobs=5)
    await quick.submit(1, PROMPT, max_tokens=400)
    began = time.monotonic()
    await quick.wait_for(lambda: quick.finished)
    assert quick.token_ids[1] == expected_token_ids(7, PROMPT, 400)
    # 0.2 s by its pace; what the slow worker's streams cost the processor comes on top.
    assert time.monotonic() - began < 10
    statistics = await wait_until_idle(host)
    held = statistics.channels[0]
    assert held.backlog_tokens > 5_000
    assert held.batches < 250, "the steps that the worker missed were not merged"
    slow.reading.set()
    await slow.wait_for(lambda: len(slow.finished) == 60)
    for stream in range(60):
        assert slow.token_ids[stream] == expected_token_ids(7, [*PROMPT, stream], 300)
    drained = (await host.statistics()).channels[0]
    assert (drained.backlog_tokens, drained.backlog_bytes) == (0, 0)


@with_host(tokens_per_s=200.0)
async def test_random_aborts_leave_nothing_behind(host: HostProcess) -> None:
    choice = random.Random(3)
    worker = host.attach(1)
    stream = 0
    for _ in range(50):
        first = stream
        for stream in range(first, first + 10):
            await worker.submit(stream, [*PROMPT, stream % 256], max_tokens=100_000)
        stream += 1
        # Let a random number of steps pass, so that aborts fall before, in and after prefill.
        wanted = len(worker.batches) + choice.randrange(3)
        await worker.wait_for(lambda wanted=wanted: len(worker.batches) >= wanted)
        numbers = list(range(first, first + 10))
        choice.shuffle(numbers)
        await worker.abort(*numbers[:4], 999_999)
        for number in numbers[4:]:
            await worker.abort(number)
    assert stream == 500
    statistics = await wait_until_idle(host)
    assert statistics.engine.kv_blocks_used == 0
    assert statistics.channels[0].open_streams == 0
    assert worker.finished == {}


@with_host()
async def test_worker_that_dies_takes_its_generations_along(host: HostProcess) -> None:
    dying, living = host.attach(1), host.attach(2)
    for stream in range(10):
        await dying.submit(stream, PROMPT, max_tokens=20_000)
    await living.submit(1, PROMPT, max_tokens=20_000)
    await dying.wait_for(lambda: len(dying.token_ids) == 10)
    await dying.close()
    await host.wait_for(lambda: host.closed_channels)
    assert host.closed_channels[0].channel == 1
    statistics = await host.statistics()
    assert statistics.engine.running == 1
    assert [channel.channel for channel in statistics.channels] == [2]
    await living.abort(1)
    assert (await wait_until_idle(host)).engine.kv_blocks_used == 0


@pytest.mark.parametrize(
    "junk", [b"\xff\xff\xff\xff", struct.pack("<I", 4) + b"junk", encode(Batch([Delta(1, [2])]))], ids=str
)
def test_malformed_channel_is_closed_and_no_other(junk: bytes) -> None:
    async def main() -> None:
        async with running_host(make_settings(**FAST)) as host:
            bad, good = host.attach(1), host.attach(2)
            await bad.submit(1, PROMPT, max_tokens=20_000)
            await bad.wait_for(lambda: bad.batches)
            await bad.send(junk)
            async with asyncio.timeout(10):
                await bad.eof.wait()
            await host.wait_for(lambda: host.closed_channels)
            assert host.closed_channels[0].reason.startswith("cannot ")
            await good.submit(1, PROMPT, max_tokens=20)
            await good.wait_for(lambda: good.finished)
            assert (await wait_until_idle(host)).engine.kv_blocks_used == 0

    asyncio.run(main())


@with_host()
async def test_request_that_cannot_run_is_refused_alone(host: HostProcess) -> None:
    worker = host.attach(1)
    await worker.submit(1, PROMPT, max_tokens=20_000)
    for stream, prompt in ((1, PROMPT), (2, []), (3, [2**32 - 1]), (4, [1 << 20]), (5, [1] * 40_000), (6, [1 << 31])):
        await worker.submit(stream, prompt)
    await worker.wait_for(lambda: len(worker.refusals) == 6)
    assert [(refusal.stream, refusal.code) for refusal in worker.refusals] == [
        (1, "invalid_request"), (2, "invalid_request"), (3, "invalid_request"), (4, "invalid_request"),
        (5, "context_too_long"), (6, "invalid_request"),
    ]  # fmt: skip
    await worker.wait_for(lambda: len(worker.token_ids[1]) > 50)
    assert worker.token_ids[1] == expected_token_ids(7, PROMPT, len(worker.token_ids[1]))


def test_before_the_engine_is_started_requests_are_refused() -> None:
    async def main() -> None:
        async with running_host() as host:
            worker = host.attach(1)
            await worker.submit(1, PROMPT)
            await worker.wait_for(lambda: worker.refusals)
            assert worker.states[0].state == "stopped"
            assert worker.refusals[0].code == "engine_unavailable"
            host.start_engine(make_settings(**FAST))
            await worker.wait_for(lambda: worker.states[-1].state == "ready")
            await worker.submit(1, PROMPT)
            await worker.wait_for(lambda: worker.finished)

    asyncio.run(main())


@pytest.mark.parametrize("standby", [False, True])
def test_generations_outlive_two_engines_and_lose_nothing(standby: bool) -> None:
    async def main() -> None:
        # So slow that a step is hardly ever late, and brings more than one token of a stream.
        settings = make_settings(**{**FAST, "tokens_per_s": 50.0}, die_after_steps=20)
        settings = msgspec.structs.replace(settings, failover=FailoverSettings(standby=standby))
        async with running_host(settings) as host:
            workers = [host.attach(1), host.attach(2)]
            for worker in workers:
                for stream in range(25):
                    await worker.submit(stream, [*PROMPT, stream], max_tokens=45)
            for worker in workers:
                await worker.wait_for(lambda worker=worker: len(worker.finished) == 25)
                for stream in range(25):
                    assert worker.token_ids[stream] == expected_token_ids(7, [*PROMPT, stream], 45)
                    assert worker.finished[stream] is FinishReason.LENGTH
                states = [change.state for change in worker.states]
                # The second death comes before another engine stands by.
                expected = ["ready", *([] if standby else ["recovering"]), "ready", "recovering", "ready"]
                assert states == expected[: len(states)]
                assert len(states) > 1 + (not standby)
                assert all(change.model is not None for change in worker.states)
            assert [channel.tokens for channel in (await host.statistics()).channels] == [25 * 45] * 2

    asyncio.run(main())


@with_host(die_after_steps=10)
async def test_generation_whose_engines_keep_dying_is_ended(host: HostProcess) -> None:
    worker = host.attach(1)
    await worker.submit(1, PROMPT, max_tokens=1_000)
    await worker.wait_for(lambda: worker.refusals)
    assert (worker.refusals[0].stream, worker.refusals[0].code) == (1, "engine_unavailable")
    assert worker.token_ids[1] == expected_token_ids(7, PROMPT, len(worker.token_ids[1]))
    # The number is free again, though its first generation never finished.
    await worker.submit(1, PROMPT, max_tokens=5)
    await worker.wait_for(lambda: worker.finished)


@with_host()
async def test_detached_channel_ends_without_a_word(host: HostProcess) -> None:
    worker = host.attach(1)
    await worker.submit(1, PROMPT, max_tokens=20_000)
    await worker.wait_for(lambda: worker.batches)
    host.send(host_link.Detach(1))
    host.send(host_link.Detach(77))
    async with asyncio.timeout(10):
        await worker.eof.wait()
    assert (await wait_until_idle(host)).channels == []
    assert host.closed_channels == []
    again = host.attach(1)
    await again.submit(1, PROMPT)
    await again.wait_for(lambda: again.finished)


@with_host()
async def test_worker_that_reads_no_refusals_is_not_read_from_for_ever(host: HostProcess) -> None:
    worker, other = host.attach(1), host.attach(2)
    await worker.wait_for(lambda: worker.states)
    worker.reading.clear()
    sent = 0

    async def flood() -> None:
        nonlocal sent
        while True:
            await worker.send(b"".join(encode(Submit(sent + i, [], Sampling(max_tokens=1))) for i in range(100)))
            sent += 100

    # The flood ends in a full socket: it can only be cancelled there.
    flooding = asyncio.create_task(flood())
    before = -1
    while sent != before:
        before = sent
        await other.submit(sent, PROMPT, max_tokens=50)
        await other.wait_for(lambda: other.finished)
        other.finished.clear()
    held = (await host.statistics()).channels[0]
    assert 0 < held.backlog_bytes < 2 << 20
    worker.reading.set()
    await worker.wait_for(lambda: len(worker.refusals) >= before)
    flooding.cancel()
    await asyncio.wait([flooding])


@pytest.mark.parametrize("way", ["stop", "close", "SIGTERM"])
def test_host_ends_when_told(way: str) -> None:
    async def main() -> None:
        async with running_host(make_settings(**FAST)) as host:
            worker = host.attach(1)
            await worker.submit(1, PROMPT, max_tokens=20_000)
            await worker.wait_for(lambda: worker.batches)
            if way == "stop":
                host.send(host_link.Stop())
            elif way == "close":
                host.link.close()
            else:
                host.process.send_signal(signal.SIGTERM)
            assert await host.exit_code() == 0
            async with asyncio.timeout(10):
                await worker.eof.wait()

    asyncio.run(main())


@with_host()
async def test_interrupt_of_the_terminal_is_not_for_the_host(host: HostProcess) -> None:
    host.process.send_signal(signal.SIGINT)
    worker = host.attach(1)
    await worker.submit(1, PROMPT)
    await worker.wait_for(lambda: worker.finished)


@with_host()
async def test_packet_that_is_no_message_ends_the_host(host: HostProcess) -> None:
    host.link.send(b"junk")
    assert await host.exit_code() == 0


@with_host()
async def test_attach_without_descriptor_or_twice_is_a_broken_supervisor(host: HostProcess) -> None:
    host.attach(1)
    host.attach(1)
    assert await host.exit_code() == 0
