"""When a tenant's queue is full, and how long it is told to be."""

from __future__ import annotations

import pytest

from seedance.daemon.start_queue import StartQueue
from seedance.engine.channel import QueueBound


def test_a_queue_is_full_beyond_its_limit() -> None:
    queue = StartQueue()
    assert queue.refusal(128, 128, 0.0) is None
    assert queue.refusal(10_000, None, 0.0) is None
    refusal = queue.refusal(129, 128, 0.0)
    assert refusal is not None
    assert refusal.retry_after_s == 1.0
    assert refusal.message == (
        "cannot take this request: 129 wait for the engine already, and limit 'requests.queue' is 128; try again in 1 s"
    )


@pytest.mark.parametrize("rate", [2, 20])
def test_how_long_it_stands_follows_from_how_it_drains(rate: int) -> None:
    queue = StartQueue()
    for at in range(60 * rate):
        queue.started(1, at / rate)
    refusal = queue.refusal(20, 10, 60.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(10 / rate, rel=0.1)


def test_it_is_never_told_to_be_for_ever_nor_for_no_time() -> None:
    queue = StartQueue()
    queue.started(1, 0.0)
    later = queue.refusal(20, 10, 100.0)
    queue.started(100_000, 100.0)
    soon = queue.refusal(20, 10, 100.0)
    assert later is not None
    assert soon is not None
    assert (later.retry_after_s, soon.retry_after_s) == (60.0, 0.1)


def test_more_answers_than_the_engine_s_queue_holds_are_never_taken() -> None:
    queue = StartQueue()
    queue.bound = QueueBound(None, 0.0, 32)
    assert queue.refusal(0, None, 0.0, streams=32) is None
    refusal = queue.refusal(0, None, 0.0, streams=33)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == ("invalid_request", None)
    assert "holds 32" in refusal.message


def test_a_full_engine_leaves_each_tenant_its_part() -> None:
    queue = StartQueue()
    queue.bound = QueueBound(8, 4.0)
    assert queue.refusal(7, 128, 0.0) is None
    refusal = queue.refusal(8, 128, 0.0)
    assert refusal is not None
    assert (refusal.limit, refusal.code) == ("engine.queue", "overloaded")
    assert refusal.retry_after_s == pytest.approx(1 / 4.0)
    assert queue.refusal(5, None, 0.0, streams=3) is None
    many = queue.refusal(5, None, 0.0, streams=4)
    assert many is not None
    assert "the engine's queue is full, and 5 of yours are in it; try again in 1 s" in many.message
    for at in range(60):
        queue.started(1, float(at))
    own = queue.refusal(17, None, 60.0)
    assert own is not None
    assert own.retry_after_s == pytest.approx(10.0, rel=0.1), "by how fast the tenant's own requests start"
    assert queue.refusal(4, 2, 60.0, streams=9) is not None
    queue.bound = QueueBound(None, 4.0)
    assert queue.refusal(10_000, None, 60.0) is None
