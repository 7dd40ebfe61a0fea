"""The epoll twin of the ring driver: the same interface over an asyncio selector loop, for kernels without io_uring.

Sends are gathered as on the ring and leave at the end of the turn, one system call each; what a socket does not take
waits in its backlog for a writable event.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Final

from seedance.daemon.ring.driver import DriverStatistics, Endpoint
from seedance.daemon.ring.flow import TURN_BYTES
from seedance.daemon.ring.frame_store import StoredFrames

_READ_BYTES: Final = 64 << 10
_LINGER_S: Final = 2.0
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # struct linger
_OPEN, _CLOSING, _LINGERING, _DETACHING, _CLOSED = range(5)


class EpollFlow:
    """One stream socket; see `driver.Flow`."""

    __slots__ = (
        "_backlog",
        "_detached",
        "_driver",
        "_eof",
        "_linger",
        "_out",
        "_reading",
        "_socket",
        "_state",
        "endpoint",
    )

    def __init__(self, driver: EpollDriver, fd: int, endpoint: Endpoint) -> None:
        self._driver = driver
        self.endpoint = endpoint
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._state = _OPEN
        self._out: bytes | None = None
        self._backlog: bytearray | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._detached: Callable[[int], None] | None = None
        self._eof = self._reading = False
        self._set_reading(True)

    @property
    def fd(self) -> int:
        return self._socket.fileno() if self._state != _CLOSED else -1

    @property
    def backlog_bytes(self) -> int:
        return len(self._backlog or b"") + len(self._out or b"")

    @property
    def waiting_bytes(self) -> int:
        return len(self._backlog or b"")

    def send(self, data: bytes) -> int:
        if self._state:
            return 0
        if self._backlog is not None:
            self._backlog += data
            return len(self._backlog)
        if self._out is None:
            self._out = data
            self._driver._to_send(self)
        elif len(self._out) < TURN_BYTES:
            self._out += data
        else:
            self._backlog = bytearray(data)
            return len(data)
        return 0

    def pause_reading(self) -> None:
        if self._state == _OPEN:
            self._set_reading(False)

    def resume_reading(self) -> None:
        if self._state == _OPEN and not self._eof:
            self._set_reading(True)

    def close(self) -> None:
        if self._state == _OPEN:
            self._state = _CLOSING
            if not self._eof:
                self._set_reading(True)
            self._go_on_if_sent()

    def abort(self) -> None:
        if self._state != _CLOSED:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._end(None)

    def detach(self, detached: Callable[[int], None]) -> None:
        if self._state == _OPEN:
            self._state = _DETACHING
            self._detached = detached
            self._set_reading(False)
            self._send_out()
            self._go_on_if_sent()

    # -- the driver's -------------------------------------------------------------------------------------------------

    def _set_reading(self, wanted: bool) -> None:
        if wanted != self._reading:
            self._reading = wanted
            loop = self._driver._loop
            if wanted:
                loop.add_reader(self._socket, self._readable)
            else:
                loop.remove_reader(self._socket)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._end(exc)
            return
        if data:
            if self._state == _OPEN:
                self._call(self.endpoint.data_received, data)
            return
        self._eof = True
        self._set_reading(False)
        if self._state == _OPEN:
            self._call(self.endpoint.eof_received)
        elif self._state == _LINGERING:
            self._end(None)

    def _send_out(self) -> None:
        data, self._out = self._out, None
        if data is None or self._state in (_LINGERING, _CLOSED):
            return
        self._driver._sends += 1
        sent = self._try_send(data)
        if (sent < len(data) or self._backlog is not None) and self._state != _CLOSED:
            self._driver._partial_sends += 1
            self._backlog = bytearray(data[sent:]) + (self._backlog or b"")
            self._driver._loop.add_writer(self._socket, self._writable)
        self._go_on_if_sent()

    def _writable(self) -> None:
        assert self._backlog is not None
        del self._backlog[: self._try_send(bytes(self._backlog[: 256 << 10]))]
        if self._backlog or self._state == _CLOSED:
            return
        self._backlog = None
        self._driver._loop.remove_writer(self._socket)
        if self._state == _OPEN:
            self._call(self.endpoint.backlog_drained)
        self._go_on_if_sent()

    def _try_send(self, data: bytes) -> int:
        try:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as exc:
            self._end(exc)
            return 0

    def _go_on_if_sent(self) -> None:
        if self._out is None and self._backlog is None:
            if self._state == _CLOSING:
                self._shut_down()
            elif self._state == _DETACHING:
                assert self._detached is not None
                self._forget()
                self._driver._loop.call_soon(self._detached, self._socket.detach())

    def _shut_down(self) -> None:
        """Tell the peer that all is sent, and read on until it has seen that: closing with unread input resets."""
        self._state = _LINGERING
        if self._eof:
            self._end(None)
            return
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as exc:
            self._end(exc)
            return
        self._linger = self._driver._loop.call_later(_LINGER_S, self._end, None)

    def _end(self, error: OSError | None) -> None:
        if self._state == _CLOSED:
            return
        self._forget()
        self._driver._ended.add(self)
        # Later in the turn, so that nobody is told of the end while still inside a call of his own.
        self._driver._loop.call_soon(self._release, error)

    def _release(self, error: OSError | None) -> None:
        """Tell of the end, and only then give the descriptor back: what is known by its number is another's next."""
        self._driver._ended.discard(self)
        try:
            self.endpoint.connection_lost(error)
        finally:
            self._socket.close()

    def _forget(self) -> None:
        self._state = _CLOSED
        self._set_reading(False)
        self._driver._loop.remove_writer(self._socket)
        if self._linger is not None:
            self._linger.cancel()
        self._out = self._backlog = None
        self._driver._flows.pop(self._socket.fileno(), None)

    def _call(self, callback: Callable[..., None], *arguments: bytes) -> None:
        try:
            callback(*arguments)
        except Exception as exc:  # a bug of ours must not end anybody else's flow
            self._driver._loop.call_exception_handler({"message": "cannot go on with a connection", "exception": exc})
            self.abort()


class EpollListener:
    """A listening socket that is accepted from when it is readable."""

    __slots__ = ("_accepted", "_closed", "_loop", "_socket")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, listener: socket.socket, accepted: Callable[[int], None]
    ) -> None:
        self._loop, self._socket, self._accepted = loop, listener, accepted
        self._closed = False
        listener.setblocking(False)
        loop.add_reader(listener, self._readable)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket)

    def _readable(self) -> None:
        for _ in range(64):  # then the others' turn
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor or memory left: try again in a moment
                self._loop.remove_reader(self._socket)
                self._loop.call_later(0.1, self._again)
                return
            connection.setblocking(False)
            self._accepted(connection.detach())

    def _again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket, self._readable)


class EpollDriver:
    """Sockets on an asyncio selector loop; see `driver.Driver`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._flows: dict[int, EpollFlow] = {}  # by descriptor
        self._dirty: list[EpollFlow] = []
        self._ended: set[EpollFlow] = set()  # and their endpoints do not know it yet
        self._sends = self._partial_sends = 0

    def listen(self, listener: socket.socket, accepted: Callable[[int], None]) -> EpollListener:
        return EpollListener(self._loop, listener, accepted)

    def open(self, fd: int, endpoint: Endpoint) -> EpollFlow:
        os.set_inheritable(fd, False)
        flow = EpollFlow(self, fd, endpoint)
        self._flows[fd] = flow
        return flow

    def send_each(self, fds: memoryview, frames: StoredFrames) -> list[tuple[int, int]]:
        sent = [(fd, self._flows[fd].send(frame)) for fd, frame in frames.to(fds) if fd in self._flows]
        return [(fd, waiting_bytes) for fd, waiting_bytes in sent if waiting_bytes]

    def flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for flow in dirty:
            flow._send_out()

    def statistics(self) -> DriverStatistics:
        return DriverStatistics(
            driver="epoll",
            flows=len(self._flows),
            enters=0,
            sends=self._sends,
            partial_sends=self._partial_sends,
            buffers_free=0,
            buffers_total=0,
            receive_buffers_exhausted=0,
        )

    def close(self) -> None:
        """Close every flow at once, without telling the endpoints."""
        for flow in [*self._flows.values(), *self._ended]:
            flow._forget()
            flow._socket.close()

    def _to_send(self, flow: EpollFlow) -> None:
        if not self._dirty:
            self._loop.call_soon(self.flush)
        self._dirty.append(flow)
