"""Who of one tenant's waiting requests is next.

They stand in the order of their `order_s`. One whose deadline is near goes before them: of several, the one that became
urgent first. It goes before no request of a higher priority, and whoever has waited for `PATIENCE_S` is passed by at
most every second one: a tenant that puts deadlines on most of its requests still serves the others.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from seedance.engine.states import Request

PATIENCE_S: Final = 10.0
_SPARE_ENTRIES: Final = 64


class TenantQueue:
    """Waiting requests in turn; each operation takes logarithmic time, amortised.

    A request that has left, or comes back, has another `ticket` than its entries; those fall out once they are first,
    or when there are too many of them.
    """

    __slots__ = ("_by_order", "_by_urgency", "_has_passed")

    def __init__(self) -> None:
        self._by_order = _Heap()
        self._by_urgency = _Heap()
        self._has_passed = False

    def push(self, request: Request) -> None:
        """Let a request stand in its place; its `ticket` must be a new one."""
        self._by_order.push(request.order_s, request)
        if request.has_deadline:
            self._by_urgency.push(request.urgent_s, request)

    def head(self, now_s: float) -> Request | None:
        """Return the request whose turn is first; None when nobody waits."""
        entries = self._by_order.entries
        first = entries[0][2] if entries and entries[0][1] == entries[0][2].ticket else self._by_order.first()
        if first is None or not self._by_urgency.entries:
            return first
        soon = self._by_urgency.first()
        if soon is None or soon.urgent_s > now_s or soon.priority < first.priority:
            return first
        return first if self._has_passed and first.queued_s < now_s - PATIENCE_S else soon

    def take(self, request: Request) -> None:
        """Take out a request whose turn it is."""
        self._has_passed = request is not self._by_order.first()
        request.ticket = 0

    def clear(self) -> None:
        """Forget everybody."""
        self._by_order.clear()
        self._by_urgency.clear()


_Entry: TypeAlias = "tuple[float, int, Request]"


class _Heap:
    """Requests by a time, and their tickets."""

    __slots__ = ("_most", "entries")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._most = _SPARE_ENTRIES

    def push(self, at_s: float, request: Request) -> None:
        heapq.heappush(self.entries, (at_s, request.ticket, request))
        if len(self.entries) > self._most:
            self.entries = [entry for entry in self.entries if entry[1] == entry[2].ticket]
            heapq.heapify(self.entries)
            self._most = 2 * len(self.entries) + _SPARE_ENTRIES

    def first(self) -> Request | None:
        entries = self.entries
        while entries:
            _, ticket, request = entries[0]
            if ticket == request.ticket:
                return request
            heapq.heappop(entries)
        return None

    def clear(self) -> None:
        self.entries.clear()
