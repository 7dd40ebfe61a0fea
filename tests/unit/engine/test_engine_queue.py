"""The bound on all tenants' requests that wait: who is let in, and what the workers are told."""

from __future__ import annotations

import itertools
import random

import pytest

from seedance.engine.channel import QueueBound
from seedance.engine.engine_queue import EngineQueue


class Crowd:
    """Tenants that ask as a worker does, and are in the queue when they may."""

    def __init__(self, limit: int) -> None:
        self.queue = EngineQueue(limit)
        self.keys = itertools.count()
        self.waiting: dict[int, str] = {}

    def ask(self, tenant: str, times: int = 1) -> int:
        """Return how many requests were let in."""
        let_in = 0
        for _ in range(times):
            if self.queue.may_join(tenant):
                key = next(self.keys)
                self.queue.joined(key, tenant)
                self.waiting[key] = tenant
                let_in += 1
        return let_in

    def start(self, count: int, now: float) -> None:
        keys = list(self.waiting)[:count]
        for key in keys:
            del self.waiting[key]
        self.queue.started(keys, now)


def test_without_a_limit_there_is_always_a_place() -> None:
    crowd = Crowd(0)
    assert crowd.ask("acme", 5_000) == 5_000
    assert len(crowd.queue) == 0
    assert crowd.queue.news(0.0) is None


def test_a_tenant_that_fills_it_does_not_shut_the_others_out() -> None:
    crowd = Crowd(100)
    assert crowd.ask("flood", 500) == 100
    assert crowd.queue.news(0.0) == QueueBound(50, 0.0, 100)
    assert crowd.ask("small", 500) == 33
    assert crowd.ask("other", 500) == 25
    assert crowd.queue.news(1.0) == QueueBound(25, 0.0, 100)
    assert crowd.ask("flood") == 0
    crowd.start(100, 2.0)
    assert crowd.ask("flood") == 1
    news = crowd.queue.news(2.0)
    assert news is not None
    assert news.most is None
    assert news.starts_per_s == pytest.approx(10.0)
    assert crowd.queue.news(9.0) is None


def test_it_is_full_until_an_eighth_is_free() -> None:
    crowd = Crowd(80)
    crowd.ask("acme", 80)
    assert crowd.queue.news(0.0) == QueueBound(40, 0.0, 80)
    crowd.start(10, 0.5)
    assert crowd.queue.news(0.5) is None
    crowd.start(1, 0.6)
    told = crowd.queue.news(0.6)
    assert told is not None
    assert told.most is None
    assert crowd.queue.told is told


def test_what_is_known_is_told_again_once_a_second_with_the_rate_of_then() -> None:
    crowd = Crowd(10)
    crowd.ask("acme", 10)
    crowd.queue.news(0.0)
    crowd.start(1, 0.5)
    crowd.ask("acme")
    assert crowd.queue.news(0.9) is None
    again = crowd.queue.news(1.0)
    assert again is not None
    assert (again.most, again.starts_per_s > 0) == (5, True)
    crowd.ask("globex")
    assert crowd.queue.news(1.01) is None, "not with every request"
    news = crowd.queue.news(1.06)
    assert news is not None
    assert news.most == 3
    assert news.starts_per_s == pytest.approx(0.1, rel=0.1)


def test_who_is_refused_stays_away_until_the_queue_has_drained_so_far() -> None:
    crowd = Crowd(10)
    for at in range(300):
        crowd.ask("acme")
        crowd.start(1, at / 5)
    crowd.ask("acme", 10)
    crowd.ask("globex", 3)
    assert len(crowd.queue) == 13
    assert crowd.queue.wait_s(60.0) == pytest.approx(4 / 5, rel=0.1)


def test_ended_requests_make_room_once() -> None:
    crowd = Crowd(2)
    crowd.ask("acme", 2)
    crowd.queue.left([0, 0, 77])
    crowd.queue.started([0], 1.0)
    assert len(crowd.queue) == 1
    assert crowd.ask("acme", 2) == 1


@pytest.mark.parametrize("limit", [1, 2, 7, 64])
def test_never_twice_as_many_and_who_has_none_gets_in(limit: int) -> None:
    source = random.Random(limit)
    crowd = Crowd(limit)
    fullest = 0
    for turn in range(3_000):
        tenant = source.choice("abcdefghij" if turn % 100 < 90 else "z")
        before = len(crowd.queue)
        has_none = tenant not in crowd.waiting.values()
        let_in = crowd.ask(tenant)
        assert let_in or before >= limit
        assert let_in or not has_none or before >= 2 * limit
        if source.random() < 0.4:
            crowd.start(1, turn / 100)
        assert len(crowd.queue) == len(crowd.waiting) <= 2 * limit
        fullest = max(fullest, len(crowd.queue))
    assert fullest >= limit
