from __future__ import annotations

import pytest

from seedance.engine.decoding import Decoding
from seedance.engine.states import Request, Tenant
from seedance.engine.tenant_queue import _SPARE_ENTRIES, PATIENCE_S, TenantQueue

pytestmark = pytest.mark.unit


class Line:
    """A queue, and requests in it by name; each came at the time that it is given."""

    def __init__(self) -> None:
        self.queue = TenantQueue()
        self.tenant = Tenant(1, Decoding(16))
        self.tickets = 0

    def push(self, name: str, came_s: float, *, urgent_s: float | None = None, priority: int = 0) -> Request:
        request = Request(name, self.tenant, 10, 10, came_s)
        request.priority = priority
        if urgent_s is not None:
            request.urgent_s = urgent_s
        self.push_again(request)
        return request

    def push_again(self, request: Request) -> None:
        self.tickets += 1
        request.ticket = self.tickets
        self.queue.push(request)

    def take(self, now_s: float) -> object:
        head = self.queue.head(now_s)
        if head is None:
            return None
        self.queue.take(head)
        return head.key

    def take_all(self, now_s: float) -> list[object]:
        taken = []
        while (key := self.take(now_s)) is not None:
            taken.append(key)
        return taken


def test_who_came_first_is_first() -> None:
    line = Line()
    line.push("second", 2.0)
    line.push("first", 1.0)
    line.push("third", 2.0)
    assert line.take_all(9.0) == ["first", "second", "third"]


def test_who_is_urgent_goes_before_from_then_on() -> None:
    line = Line()
    line.push("first", 1.0)
    line.push("later", 2.0, urgent_s=6.0)
    line.push("sooner", 3.0, urgent_s=5.0)
    assert [line.queue.head(now_s).key for now_s in (4.9, 5.0, 7.0)] == ["first", "sooner", "sooner"]  # type: ignore[union-attr]
    assert line.take_all(7.0) == ["sooner", "later", "first"]


def test_who_is_urgent_goes_before_no_higher_priority() -> None:
    line = Line()
    line.push("high", 1.0, priority=1)
    line.push("plain", 2.0)
    line.push("urgent", 3.0, urgent_s=0.0)
    assert line.take_all(5.0) == ["high", "urgent", "plain"]


def test_who_has_waited_for_long_is_passed_by_every_second_one() -> None:
    line = Line()
    for number in range(3):
        line.push(f"plain {number}", 0.0)
        line.push(f"urgent {number}", 1.0, urgent_s=2.0)
    assert line.take(PATIENCE_S) == "urgent 0"
    assert line.take(PATIENCE_S) == "urgent 1"
    assert line.take_all(PATIENCE_S + 0.1) == ["plain 0", "urgent 2", "plain 1", "plain 2"]


def test_who_has_left_or_came_back_is_there_once() -> None:
    line = Line()
    left, back = line.push("left", 1.0, urgent_s=1.0), line.push("back", 2.0, urgent_s=2.0)
    line.push("stays", 3.0, urgent_s=3.0)
    left.ticket = 0
    assert line.take(5.0) == "back"
    line.push_again(back)
    assert line.take_all(5.0) == ["back", "stays"]
    line.push("cleared", 4.0, urgent_s=0.0)
    line.queue.clear()
    assert line.take(5.0) is None


@pytest.mark.parametrize("urgent_s", [1e9, 0.0])
def test_those_who_have_left_take_no_room(urgent_s: float) -> None:
    line = Line()
    line.push("stays", 0.0)
    for number in range(1000):
        line.push(str(number), 1.0, urgent_s=urgent_s).ticket = 0
    for heap in (line.queue._by_order, line.queue._by_urgency):
        assert len(heap.entries) <= _SPARE_ENTRIES + 4
    assert line.take_all(2.0) == ["stays"]
