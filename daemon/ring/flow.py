"""A flow of the ring driver: its state, and what its owner may do with it."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from seedance.daemon.ring.driver import Endpoint

OPEN, CLOSING, LINGERING, ENDING, DETACHING, CLOSED = range(6)
TURN_BYTES: Final = 64 << 10
"""What is sent to a flow in one turn beyond this is its backlog: its owner learns of it, and no copy grows on."""
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # struct linger


class FlowDriver(Protocol):
    """What a flow asks of its driver."""

    def arm_receive(self, flow: RingFlow) -> None:
        """Start receiving, unless a receive is in flight or the peer has ended."""

    def cancel_receive(self, flow: RingFlow) -> None:
        """Stop receiving."""

    def close_flow(self, flow: RingFlow) -> None:
        """Go on from CLOSING."""

    def fall_behind(self, flow: RingFlow) -> None:
        """Go on with a backlog that was made before the socket was asked."""

    def end_flow(self, flow: RingFlow, error: OSError | None) -> None:
        """Drop everything and close."""

    def detach_flow(self, flow: RingFlow) -> None:
        """Go on from DETACHING."""


class RingFlow:
    """One stream socket on the ring; see `driver.Flow`. What is not in there is for this package alone.

    `number` is the descriptor, `out` what the next batch takes, `backlog` what comes after it (None: keeping up).
    `receiving` and `waiting_writable` say what is in flight.
    """

    __slots__ = (
        "_driver",
        "_mark",
        "backlog",
        "detached",
        "endpoint",
        "eof",
        "error",
        "number",
        "out",
        "paused",
        "receiving",
        "state",
        "tag",
        "waiting_writable",
    )

    def __init__(
        self, driver: FlowDriver, mark: Callable[[RingFlow], None], fd: int, endpoint: Endpoint, tag: int
    ) -> None:
        """`mark` is told when there is something in `out`, which is not told again before it was taken."""
        self._driver = driver
        self._mark = mark
        self.endpoint = endpoint
        self.number = fd
        self.tag = tag
        self.state = OPEN
        self.out: bytes | None = None
        self.backlog: bytearray | None = None
        self.detached: Callable[[int], None] | None = None
        self.error: OSError | None = None
        self.receiving = self.waiting_writable = self.paused = self.eof = False

    @property
    def fd(self) -> int:
        return self.number if self.state < ENDING else -1

    @property
    def backlog_bytes(self) -> int:
        return len(self.backlog or b"") + len(self.out or b"")

    @property
    def waiting_bytes(self) -> int:
        return len(self.backlog or b"")

    def send(self, data: bytes) -> int:
        if self.state:
            return 0
        if self.backlog is not None:
            self.backlog += data
            return len(self.backlog)
        out = self.out
        if out is None:
            self.out = data
            self._mark(self)
        elif len(out) < TURN_BYTES:
            self.out = out + data
        else:
            self.backlog = bytearray(data)
            self._driver.fall_behind(self)
            return len(data)
        return 0

    def pause_reading(self) -> None:
        if self.state == OPEN and not self.paused:
            self.paused = True
            self._driver.cancel_receive(self)

    def resume_reading(self) -> None:
        if self.state == OPEN and self.paused:
            self.paused = False
            self._driver.arm_receive(self)

    def close(self) -> None:
        if self.state == OPEN:
            self.state = CLOSING
            self._driver.close_flow(self)

    def abort(self) -> None:
        if self.state in (OPEN, CLOSING, LINGERING, DETACHING):
            with borrowed(self.number) as handle:
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._driver.end_flow(self, None)

    def detach(self, detached: Callable[[int], None]) -> None:
        if self.state == OPEN:
            self.state = DETACHING
            self.detached = detached
            self._driver.detach_flow(self)


@contextlib.contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket object over a descriptor that stays somebody else's; the family does not matter to what we call."""
    handle = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        yield handle
    finally:
        handle.detach()
