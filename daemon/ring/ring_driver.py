"""The driver on io_uring: multishot accept and receive, batched sends, and the ends of flows.

Sends are `send_queue`'s. This module receives, accepts, and ends flows in the right order: a descriptor is closed only
when no operation of ours is left on it. Receive and poll are cancelled first, and their last completions (the ones
without CQE_F_MORE) are waited for. So no completion can reach the next owner of a number, and a close really closes: an
armed receive would hold the socket open.

    OPEN ── close ──► CLOSING ── all sent ──► LINGERING ── peer's end, or 2 s ──► ENDING ──► CLOSED
      ├──── abort, error ─────────────────────────────────────────────────────────►┘
      └──── detach ──► DETACHING ── all sent ──► CLOSED (the descriptor lives on, elsewhere)
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Final

from seedance.daemon.ring import abi, send_queue
from seedance.daemon.ring.driver import DriverStatistics, Endpoint
from seedance.daemon.ring.flow import CLOSED, CLOSING, DETACHING, ENDING, LINGERING, OPEN, RingFlow, borrowed
from seedance.daemon.ring.frame_store import StoredFrames
from seedance.daemon.ring.operations import (
    KIND_ACCEPT,
    KIND_CANCEL,
    KIND_RECEIVE,
    KIND_SHIFT,
    KIND_WRITABLE,
    TAG_MASK,
    Owners,
)
from seedance.daemon.ring.receive import ReceiveBuffers
from seedance.daemon.ring.send_queue import SendQueue
from seedance.daemon.ring.uring import Uring

RECEIVE_BUFFERS: Final = 256
RECEIVE_BUFFER_BYTES: Final = 4096
_LINGER_S: Final = 2.0
_ACCEPT_AGAIN_S: Final = 0.1
_OUT_OF_RESOURCES: Final = frozenset((-errno.EMFILE, -errno.ENFILE, -errno.ENOMEM, -errno.ENOBUFS))


class RingListener:
    """A listening socket with a multishot accept on it."""

    __slots__ = ("_driver", "accepted", "closed", "number", "tag")

    def __init__(self, driver: RingDriver, fd: int, accepted: Callable[[int], None], tag: int) -> None:
        self._driver, self.number, self.accepted, self.tag = driver, fd, accepted, tag
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._driver.stop_accepting(self)


class RingDriver:
    """Sockets on one ring; see `driver.Driver` for the interface and `loop.RingSelector` for who calls the rest."""

    def __init__(self, ring: Uring, loop: asyncio.AbstractEventLoop, receive_buffers: int = RECEIVE_BUFFERS) -> None:
        """Use so many receive buffers, a power of two.

        Raises KernelError when the kernel does not do what this driver stands on.
        """
        self.ring = ring
        self._loop = loop
        send_queue.check(ring)
        self._receive_buffers = ReceiveBuffers(ring.fd, 0, receive_buffers, RECEIVE_BUFFER_BYTES)
        self._owners: Owners[RingFlow | RingListener] = Owners()
        self._queue = SendQueue(ring, self._caught_up)
        self._mark = self._queue.mark
        self.settle = self._queue.settle
        """Account for the sends of the last enter, before any other completion is looked at; return those."""
        self._flows = 0
        self._closing: list[RingFlow] = []
        self._ended: list[RingFlow] = []
        self._lingering: dict[RingFlow, float] = {}
        self._linger_timer: asyncio.TimerHandle | None = None
        self._exhausted = 0

    # -- the interface ------------------------------------------------------------------------------------------------

    def listen(self, listener: socket.socket, accepted: Callable[[int], None]) -> RingListener:
        tag = self._owners.new_tag()
        owner = RingListener(self, listener.fileno(), accepted, tag)
        self._owners.put(tag, owner)
        self._arm_accept(owner)
        return owner

    def open(self, fd: int, endpoint: Endpoint) -> RingFlow:
        tag = self._owners.new_tag()
        flow = RingFlow(self, self._mark, fd, endpoint, tag)
        self._owners.put(tag, flow)
        self._queue.add(flow)
        self._flows += 1
        self.arm_receive(flow)
        return flow

    def send_each(self, fds: memoryview, frames: StoredFrames) -> list[tuple[int, int]]:
        return self._queue.send_each(fds, frames)

    def flush(self) -> None:
        self.stage()
        if self._queue.in_flight:
            self._queue.finish()

    def statistics(self) -> DriverStatistics:
        return DriverStatistics(
            driver="io_uring",
            flows=self._flows,
            enters=self.ring.enters,
            sends=self._queue.sends,
            partial_sends=self._queue.partial_sends,
            buffers_free=self._queue.pool.free,
            buffers_total=self._queue.pool.total,
            receive_buffers_exhausted=self._exhausted,
        )

    def close(self) -> None:
        """Close every flow and listener at once, without telling the endpoints, and the buffers."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self.flush()
        for owner in self._owners.all():
            if isinstance(owner, RingFlow):
                self.cancel_receive(owner)
                self._cancel_writable(owner)
            else:
                owner.close()
        self.ring.submit()
        for owner in self._owners.all():
            if isinstance(owner, RingFlow):
                os.close(owner.number)
                owner.state = CLOSED
        self.ring.completions()
        self._receive_buffers.close()
        self._queue.pool.close()

    # -- the loop's ---------------------------------------------------------------------------------------------------

    def stage(self) -> bool:
        """Turn what waits to be sent into SQEs; returns whether to come back right after the coming enter."""
        self._receive_buffers.publish()
        goes_on = self._queue.stage()
        return goes_on or (bool(self._closing) and any(flow.backlog is None for flow in self._closing))

    def dispatch(self, user_data: int, result: int, flags: int) -> None:
        """Act on one completion that is neither a poll's of the selector nor a send's."""
        kind = user_data >> KIND_SHIFT
        if kind == KIND_CANCEL:
            return
        owner = self._owners.get(user_data & TAG_MASK)
        if isinstance(owner, RingListener):
            self._accepted(owner, result, flags)
        elif kind == KIND_RECEIVE:
            self._received(owner, result, flags)
        else:
            assert kind == KIND_WRITABLE
            owner.waiting_writable = False
            self._queue.work_off(owner)
            self._release_if_idle(owner)

    def end_turn(self) -> None:
        """Do what could not be done while completions were being read."""
        while self._queue.failed:
            self.end_flow(*self._queue.failed.pop())
        if self._closing:
            self._closing = [flow for flow in self._closing if not self._shut_down_if_sent(flow)]
        while self._ended:
            self._release(self._ended.pop())

    # -- completions --------------------------------------------------------------------------------------------------

    def _received(self, flow: RingFlow, result: int, flags: int) -> None:
        data = b""
        if flags & abi.CQE_F_BUFFER:
            data = self._receive_buffers.take(flags >> abi.CQE_BUFFER_SHIFT, max(result, 0))
        if data and flow.state == OPEN and flags & abi.CQE_F_MORE:  # nearly always; what follows would say the same
            self._call(flow, flow.endpoint.data_received, data)
            return
        if not flags & abi.CQE_F_MORE:
            flow.receiving = False
        self._tell(flow, result, data)
        if flow.receiving:
            return
        if flow.state == LINGERING and flow.eof:
            self.end_flow(flow, None)
        elif flow.state in (OPEN, CLOSING, LINGERING) and not flow.paused:
            self.arm_receive(flow)
        else:
            self._release_if_idle(flow)

    def _tell(self, flow: RingFlow, result: int, data: bytes) -> None:
        if result > 0:
            if flow.state in (OPEN, DETACHING):
                self._call(flow, flow.endpoint.data_received, data)
        elif result == 0:
            flow.eof = True
            if flow.state == OPEN:
                self._call(flow, flow.endpoint.eof_received)
        elif result == -errno.ENOBUFS:
            self._exhausted += 1
        elif result != -errno.ECANCELED:
            self.end_flow(flow, OSError(-result, os.strerror(-result)))

    def _accepted(self, listener: RingListener, result: int, flags: int) -> None:
        if result >= 0:
            if listener.closed:
                os.close(result)
            else:
                try:
                    listener.accepted(result)
                except Exception as exc:  # a bug of ours must not end the loop
                    self._loop.call_exception_handler({"message": "cannot take a connection", "exception": exc})
        if flags & abi.CQE_F_MORE:
            return
        if listener.closed:
            self._owners.remove(listener.tag)
        elif result in _OUT_OF_RESOURCES:
            self._loop.call_later(_ACCEPT_AGAIN_S, self._accept_again, listener)
        elif result >= 0 or result == -errno.ECONNABORTED:
            self._arm_accept(listener)
        else:
            listener.closed = True
            self._owners.remove(listener.tag)
            error = OSError(-result, os.strerror(-result))
            self._loop.call_exception_handler({"message": "cannot accept connections any more", "exception": error})

    def _accept_again(self, listener: RingListener) -> None:
        if listener.closed:
            self._owners.remove(listener.tag)
        else:
            self._arm_accept(listener)

    def _caught_up(self, flow: RingFlow) -> None:
        if flow.state == OPEN:
            self._loop.call_soon(self._drained, flow)
        else:
            self._release_if_idle(flow)

    def _drained(self, flow: RingFlow) -> None:
        if flow.state == OPEN:
            self._call(flow, flow.endpoint.backlog_drained)

    def _call(self, flow: RingFlow, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception as exc:  # a bug of ours must not end the loop, nor anybody else's flow
            self._loop.call_exception_handler({"message": "cannot go on with a connection", "exception": exc})
            flow.abort()

    # -- ending -------------------------------------------------------------------------------------------------------

    def close_flow(self, flow: RingFlow) -> None:
        self._queue.hindered.add(flow.number)
        if flow.paused:
            flow.paused = False
            self.arm_receive(flow)
        if self._queue.in_flight or not self._shut_down_if_sent(flow):
            self._closing.append(flow)

    def _shut_down_if_sent(self, flow: RingFlow) -> bool:
        """Once all is sent, tell the peer so and read on until it has seen that: closing with unread input resets."""
        if flow.state != CLOSING:
            return True
        if flow.out is not None or flow.backlog is not None:
            return False
        flow.state = LINGERING
        if flow.eof:
            self.end_flow(flow, None)
            return True
        try:
            with borrowed(flow.number) as handle:
                handle.shutdown(socket.SHUT_WR)
        except OSError as exc:
            self._queue.failed.append((flow, exc))
        self._lingering[flow] = self._loop.time() + _LINGER_S
        if self._linger_timer is None:
            self._linger_timer = self._loop.call_later(_LINGER_S, self._linger_over)
        return True

    def _linger_over(self) -> None:
        now = self._loop.time()
        self._linger_timer = None
        for flow, deadline in list(self._lingering.items()):  # in order of their deadlines
            if deadline > now:
                self._linger_timer = self._loop.call_later(deadline - now, self._linger_over)
                break
            self.end_flow(flow, None)

    def detach_flow(self, flow: RingFlow) -> None:
        self._queue.hindered.add(flow.number)
        self.cancel_receive(flow)
        self.flush()
        self._release_if_idle(flow)

    def fall_behind(self, flow: RingFlow) -> None:
        self._queue.fall_behind(flow)

    def end_flow(self, flow: RingFlow, error: OSError | None) -> None:
        if flow.state in (ENDING, CLOSED):
            return
        flow.state = ENDING
        flow.error = error
        self._queue.hindered.add(flow.number)
        flow.out = flow.backlog = None
        self._lingering.pop(flow, None)
        self.cancel_receive(flow)
        self._cancel_writable(flow)
        self._release_if_idle(flow)

    def _release_if_idle(self, flow: RingFlow) -> None:
        if flow.state not in (ENDING, DETACHING) or flow.receiving or flow.waiting_writable:
            return
        if flow.out is None and flow.backlog is None:
            if self._queue.in_flight:  # an SQE of ours may still name the descriptor
                self._ended.append(flow)
            else:
                self._release(flow)

    def _release(self, flow: RingFlow) -> None:
        if flow.state == CLOSED:
            return
        state, flow.state = flow.state, CLOSED
        self._owners.remove(flow.tag)
        self._queue.remove(flow)
        self._flows -= 1
        if state == DETACHING:
            assert flow.detached is not None
            self._call(flow, flow.detached, flow.number)
        else:
            os.close(flow.number)
            self._call(flow, flow.endpoint.connection_lost, flow.error)

    # -- operations ---------------------------------------------------------------------------------------------------

    def arm_receive(self, flow: RingFlow) -> None:
        if flow.receiving or flow.eof:
            return  # while it is being cancelled: it is armed again when that is through
        flow.receiving = True
        self.ring.push(
            abi.OP_RECV,
            flow.number,
            KIND_RECEIVE << KIND_SHIFT | flow.tag,
            flags=abi.IOSQE_BUFFER_SELECT,
            ioprio=abi.RECV_MULTISHOT,
        )

    def _arm_accept(self, listener: RingListener) -> None:
        self.ring.push(
            abi.OP_ACCEPT,
            listener.number,
            KIND_ACCEPT << KIND_SHIFT | listener.tag,
            ioprio=abi.ACCEPT_MULTISHOT,
            op_flags=socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC,
        )

    def stop_accepting(self, listener: RingListener) -> None:
        """Cancel a closed listener's accept, at once: its owner may close the socket next."""
        self._cancel(KIND_ACCEPT, listener.tag)
        self.ring.submit()

    def cancel_receive(self, flow: RingFlow) -> None:
        if flow.receiving:
            self._cancel(KIND_RECEIVE, flow.tag)

    def _cancel_writable(self, flow: RingFlow) -> None:
        if flow.waiting_writable:
            self._cancel(KIND_WRITABLE, flow.tag)

    def _cancel(self, kind: int, tag: int) -> None:
        self.ring.push(
            abi.OP_ASYNC_CANCEL,
            -1,
            KIND_CANCEL << KIND_SHIFT,
            address=kind << KIND_SHIFT | tag,
            flags=abi.IOSQE_CQE_SKIP_SUCCESS,
        )
