"""A tenant as the gateway serves it: who waits for its worker, and the links to its workers.

A connection stays the gateway's until the worker says that it has taken it, which it does before it looks at it. What
a worker leaves untaken when it ends goes to the next one, and no connection is served twice.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Protocol

from seedance.daemon.greeting import Greeting
from seedance.daemon.links import TO_GATEWAY, TO_WORKER, Handover, TenantEntry, ToGateway
from seedance.engine.packets import PacketSocket


class Listener(Protocol):
    """Who is told what happens on the links to a tenant's workers."""

    def worker_said(self, link: WorkerLink, message: ToGateway, fds: list[int]) -> None:
        """Take a message; owns `fds` unless it raises RemoteProtocolError."""

    def worker_ended(self, link: WorkerLink) -> None:
        """See to the connections that the worker has not taken: they are `link.in_flight`."""


class WorkerLink:
    """The handover link to one worker of a tenant; owns the connections in flight.

    A link that is `leaving` gets no more connections, and closes with the last one in flight: its end tells the worker
    that there are no more.
    """

    __slots__ = ("_listener", "_packets", "held", "in_flight", "leaving", "route", "worker")

    def __init__(
        self, route: Route, worker: int, sock: socket.socket, loop: asyncio.AbstractEventLoop, listener: Listener
    ) -> None:
        self.route = route
        self.worker = worker
        self.held = 0
        self.in_flight: deque[Greeting] = deque()
        self.leaving = False
        self._listener = listener
        self._packets = PacketSocket(sock, loop, self._received, self._closed)

    @property
    def is_ready(self) -> bool:
        """Whether another connection would go out at once."""
        return not (self._packets.queue_bytes or self._packets.peer_is_gone)

    def hand_over(self, greeting: Greeting) -> None:
        """Send a connection to the worker."""
        handover = Handover(greeting.peer, greeting.listener, bytes(greeting.data))
        self.in_flight.append(greeting)
        self._packets.send(TO_WORKER.encode(handover), [greeting.sock.fileno()])

    def taken(self) -> bool:
        """Let go of the first connection in flight, the worker's now; returns whether there was one.

        A worker may outlive a gateway, and then speak of connections that this one has not handed over.
        """
        if not self.in_flight:
            return False
        self.in_flight.popleft().take().close()
        if self.leaving:
            self.leave()
        else:
            self.held += 1
        return True

    def released(self, count: int) -> int:
        """Count connections that the worker has closed; returns by how many there are fewer now."""
        count = min(max(count, 0), self.held)
        self.held -= count
        return count

    def leave(self) -> None:
        """Hand over no more, and close once nothing is in flight."""
        self.leaving = True
        if not self.in_flight:
            self.close()

    def close(self) -> None:
        """Close the link and let go of what is in flight: it is the worker's, if it lives. Idempotent."""
        self._packets.close()
        while self.in_flight:
            self.in_flight.popleft().take().close()

    def _received(self, data: bytes, fds: list[int]) -> None:
        self._listener.worker_said(self, TO_GATEWAY.decode(data), fds)

    def _closed(self) -> None:
        self._listener.worker_ended(self)


class Route:
    """One tenant: who waits, and the link that gets its new connections."""

    __slots__ = ("entry", "link", "retry", "waiting", "wanted")

    def __init__(self, entry: TenantEntry) -> None:
        self.entry = entry
        self.link: WorkerLink | None = None
        self.waiting: deque[Greeting] = deque()
        self.wanted = False
        self.retry: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """How many connections wait, are in flight or are its worker's."""
        count = len(self.waiting)
        return count if self.link is None else count + len(self.link.in_flight) + self.link.held
