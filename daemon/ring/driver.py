"""The interface to sockets: what io_uring and its epoll twin both offer, and what they call.

Everything runs in the thread of the event loop. A `Flow` is one connected stream socket. What is sent on it leaves in
order; all that was sent to one flow between two flushes goes out as one send. The loop flushes by itself before it
waits, so that the answers to everything that one wake-up brought leave with a single system call.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

import msgspec

from seedance.daemon.ring.frame_store import StoredFrames


class Endpoint(Protocol):
    """The owner of a flow: told what happens on it; none of these may raise."""

    def data_received(self, data: bytes) -> None:
        """Take bytes from the peer; never empty."""

    def eof_received(self) -> None:
        """The peer sends no more; the flow can still send. Not called after an error."""

    def backlog_drained(self) -> None:
        """What had piled up because the peer read slowly is out."""

    def connection_lost(self, error: OSError | None) -> None:
        """The descriptor is closed: the last call on this endpoint. None: it was closed on our wish."""


class Flow(Protocol):
    """One connected stream socket; `endpoint` is told what happens on it, and may be replaced at any time."""

    endpoint: Endpoint

    @property
    def fd(self) -> int:
        """The descriptor, or -1 once it is closed or detached."""

    @property
    def backlog_bytes(self) -> int:
        """Bytes accepted by `send` that the kernel has not taken yet."""

    @property
    def waiting_bytes(self) -> int:
        """Of these, what waits because the peer reads slowly: 0 for a flow that keeps up."""

    def send(self, data: bytes) -> int:
        """Send in order after all that was sent before; nothing is sent on a closed flow, silently.

        Returns how many bytes wait because the peer reads slowly: 0 for a flow that keeps up.
        """

    def pause_reading(self) -> None:
        """Stop taking bytes from the peer; what is already on its way may still be delivered."""

    def resume_reading(self) -> None:
        """Take bytes from the peer again."""

    def close(self) -> None:
        """Send what was sent, then close; idempotent. Reading stops at once."""

    def abort(self) -> None:
        """Close at once and drop what has not been sent; idempotent."""

    def detach(self, detached: Callable[[int], None]) -> None:
        """Give the open descriptor away: called once nothing of ours is in flight on it.

        Bytes that arrive meanwhile still reach `data_received`, before `detached`. `connection_lost` is not called
        after a detach. When the connection breaks first, `connection_lost` is called and `detached` is not.
        """


class Listener(Protocol):
    """A listening socket that is being accepted from."""

    def close(self) -> None:
        """Stop accepting; the socket itself stays open and its owner's. Idempotent."""


class DriverStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, for status and tests."""

    driver: str
    flows: int
    enters: int
    sends: int
    partial_sends: int
    buffers_free: int
    buffers_total: int
    receive_buffers_exhausted: int


class Driver(Protocol):
    """One event loop's access to sockets."""

    def listen(self, listener: socket.socket, accepted: Callable[[int], None]) -> Listener:
        """Accept until closed; `accepted` owns each descriptor that it gets (non-blocking, close-on-exec)."""

    def open(self, fd: int, endpoint: Endpoint) -> Flow:
        """Take over a connected stream socket and start reading; the flow owns the descriptor from here."""

    def send_each(self, fds: memoryview, frames: StoredFrames) -> list[tuple[int, int]]:
        """Do as `Flow.send` for many flows, none of them twice: each gets the frame that stands where its `fd` does.

        `fds` are unsigned 32-bit numbers. The frames go to the kernel from where they lie. Returns `fd` and waiting
        bytes of those that do not keep up.
        """

    def flush(self) -> None:
        """Hand everything that was sent so far to the kernel now."""

    def statistics(self) -> DriverStatistics:
        """Return the counters."""
