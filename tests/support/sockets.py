"""A driver under test, flows over real sockets, and an endpoint that records what happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from seedance.daemon.ring.driver import Driver, Flow
from seedance.daemon.ring.loop import RingLoop, new_loop

T = TypeVar("T")
LIMIT_S = 20.0
REST_S = 0.05
MOST_TURNS = 20


class Recorder:
    """An endpoint that keeps everything; `wait` blocks a test until a condition holds."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.chunks: list[bytes] = []
        self.eof = 0
        self.drained = 0
        self.lost: list[OSError | None] = []
        self._changed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        assert not self.lost, "data after the end"
        self.data += data
        self.chunks.append(data)
        self._changed.set()

    def eof_received(self) -> None:
        self.eof += 1
        self._changed.set()

    def backlog_drained(self) -> None:
        self.drained += 1
        self._changed.set()

    def connection_lost(self, error: OSError | None) -> None:
        self.lost.append(error)
        self._changed.set()

    async def wait(self, condition: Callable[[Recorder], bool]) -> None:
        """Return once `condition(self)` holds; fails after LIMIT_S."""
        async with asyncio.timeout(LIMIT_S):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()


class Rig:
    """A loop, its driver, and what a test opened on them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, driver: Driver) -> None:
        self.loop = loop
        self.driver = driver
        self._peers: list[socket.socket] = []
        self._turns = 0
        selector = loop._selector  # type: ignore[attr-defined]
        select = selector.select

        def counted(timeout: float | None = None) -> object:
            self._turns += 1
            return select(timeout)

        selector.select = counted

    def run(self, main: Callable[[], Awaitable[T]]) -> T:
        """Run a test's coroutine in the loop; afterwards no buffer may be missing, and the loop must be at rest."""

        async def bounded() -> T:
            async with asyncio.timeout(LIMIT_S):
                result = await main()
            before = self._turns
            await asyncio.sleep(REST_S)
            assert self._turns - before < MOST_TURNS, "the loop goes round though there is nothing to do"
            return result

        result = self.loop.run_until_complete(bounded())
        statistics = self.driver.statistics()
        assert statistics.buffers_free == statistics.buffers_total
        return result

    def flow(self, *, tcp: bool = False, send_buffer: int | None = None) -> tuple[Flow, Recorder, socket.socket]:
        """Return a flow over one end of a new connection, its endpoint, and the other end (blocking)."""
        ours, peer = tcp_pair() if tcp else socket.socketpair()
        if send_buffer is not None:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        ours.setblocking(False)
        peer.settimeout(LIMIT_S)
        self._peers.append(peer)
        recorder = Recorder()
        return self.driver.open(ours.detach(), recorder), recorder, peer

    def in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start a blocking call of the peer's side."""
        return self.loop.run_in_executor(None, call)

    async def turns(self, count: int = 3) -> None:
        """Let the loop take a few turns."""
        for _ in range(count):
            await asyncio.sleep(0)

    def close(self) -> None:
        """Close what is left."""
        for peer in self._peers:
            peer.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


@contextlib.contextmanager
def rig(io: str, receive_buffers: int | None = None) -> Iterator[Rig]:
    """Set up a loop of a kind; ends it, and checks that no descriptor has leaked."""
    before = len(os.listdir("/proc/self/fd"))
    if receive_buffers is None:
        loop, driver = new_loop(io)
    else:
        assert io == "io_uring"
        ring_loop = RingLoop(receive_buffers=receive_buffers)
        loop, driver = ring_loop, ring_loop.driver
    made = Rig(loop, driver)
    try:
        yield made
    finally:
        made.close()
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors leaked"


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return two ends of a TCP connection over loopback, without Nagle's delay."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    for end in (ours, peer):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, peer


def read_all(peer: socket.socket) -> bytes:
    """Read up to the end."""
    pieces = []
    while piece := peer.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def read_exactly(peer: socket.socket, size: int) -> bytes:
    """Read so many bytes, or less at the end."""
    data = bytearray()
    while len(data) < size and (piece := peer.recv(size - len(data))):
        data += piece
    return bytes(data)
