"""The driver on io_uring: multishot accept and receive, and batched sends that need no completion.

Theory of operation. What is sent to a flow between two turns of the loop is one frame of the next batch. A batch is up
to 256 frames, joined into one pool buffer, and one SQE each: MSG_DONTWAIT makes the kernel finish the send inside the
enter, MSG_WAITALL makes a short send post its count instead of passing for a full one, and CQE_SKIP_SUCCESS makes a
full send post nothing (never without WAITALL: a short send would be lost silently; checked at start). So the common
case costs no completion, and its buffer is free when the enter returns. The last batch of a turn is left for the enter
that waits: one system call a turn.

A flow whose socket did not take everything falls behind: the rest is its backlog, everything later is appended to that,
and it is sent piece by piece as the socket polls writable, until it is empty. One send at most is in flight on a
socket, because the kernel keeps no order between two.

A descriptor is closed only when no operation of ours is left on it: receive and poll are cancelled first, and their
last completions (the ones without CQE_F_MORE) are waited for. So no completion can reach the next owner of a number,
and a close really closes: an armed receive would hold the socket open.

    OPEN ── close ──► CLOSING ── all sent ──► LINGERING ── peer's end, or 2 s ──► ENDING ──► CLOSED
      ├──── abort, error ─────────────────────────────────────────────────────────►┘
      └──── detach ──► DETACHING ──► CLOSED (the descriptor lives on, elsewhere)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final

from seedance.daemon.ring import abi
from seedance.daemon.ring.driver import DriverStatistics, Endpoint
from seedance.daemon.ring.pool import Buffer, BufferPool
from seedance.daemon.ring.receive import ReceiveBuffers
from seedance.daemon.ring.uring import Uring
from seedance.errors import KernelError

KIND_SHIFT: Final = 56
KIND_POLL: Final = 1  # the selector's
KIND_ACCEPT: Final = 2
KIND_RECEIVE: Final = 3
KIND_SEND: Final = 4
KIND_WRITABLE: Final = 5
KIND_CANCEL: Final = 6

_TAG_MASK: Final = (1 << KIND_SHIFT) - 1
_GENERATION_SHIFT: Final = 32
_INDEX_MASK: Final = (1 << _GENERATION_SHIFT) - 1
_GENERATION_MASK: Final = (1 << (KIND_SHIFT - _GENERATION_SHIFT)) - 1

BATCH_SENDS: Final = 256
BATCH_BYTES: Final = 256 << 10
_PIECE_BYTES: Final = 64 << 10  # of a backlog at a time: more than a small SO_SNDBUF takes, little to copy in vain
_SEND_FLAGS: Final = socket.MSG_NOSIGNAL | socket.MSG_WAITALL | socket.MSG_DONTWAIT
RECEIVE_BUFFERS: Final = 1024
RECEIVE_BUFFER_BYTES: Final = 4096
_LINGER_S: Final = 2.0
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # struct linger

_OPEN, _CLOSING, _LINGERING, _ENDING, _DETACHING, _CLOSED = range(6)


class RingFlow:
    """One stream socket on the ring; see `driver.Flow`."""

    __slots__ = (
        "_backlog",
        "_detached",
        "_driver",
        "_eof",
        "_error",
        "_fd",
        "_out",
        "_paused",
        "_receiving",
        "_sqe_head",
        "_sqe_tail",
        "_state",
        "_tag",
        "_waiting_writable",
        "endpoint",
    )

    def __init__(self, driver: RingDriver, fd: int, endpoint: Endpoint, tag: int) -> None:
        self._driver = driver
        self.endpoint = endpoint
        self._fd = fd
        self._tag = tag
        self._state = _OPEN
        self._out: bytes | None = None
        self._backlog: bytearray | None = None
        self._detached: Callable[[int], None] | None = None
        self._error: OSError | None = None
        self._receiving = self._waiting_writable = self._paused = self._eof = False
        self._sqe_head = abi.SQE_HEAD.pack(abi.OP_SEND, abi.IOSQE_CQE_SKIP_SUCCESS, 0, fd, 0)
        self._sqe_tail = abi.SQE_TAIL.pack(_SEND_FLAGS, KIND_SEND << KIND_SHIFT | tag, 0, 0, 0, 0, 0)

    @property
    def fd(self) -> int:
        return self._fd if self._state < _ENDING else -1

    @property
    def backlog_bytes(self) -> int:
        return len(self._backlog or b"") + len(self._out or b"")

    def send(self, data: bytes) -> int:
        if self._state:
            return 0
        if self._backlog is not None:
            self._backlog += data
            return len(self._backlog)
        if self._out is None:
            self._out = data
            self._driver._dirty.append(self)
        else:
            self._out += data
        return 0

    def pause_reading(self) -> None:
        if self._state == _OPEN and not self._paused:
            self._paused = True
            self._driver._cancel_receive(self)

    def resume_reading(self) -> None:
        if self._state == _OPEN and self._paused:
            self._paused = False
            self._driver._arm_receive(self)

    def close(self) -> None:
        if self._state == _OPEN:
            self._state = _CLOSING
            self._driver._close(self)

    def abort(self) -> None:
        if self._state in (_OPEN, _CLOSING, _LINGERING):
            with _borrowed(self._fd) as handle:
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._driver._end(self, None)

    def detach(self, detached: Callable[[int], None]) -> None:
        if self._state == _OPEN:
            self._state = _DETACHING
            self._detached = detached
            self._driver._detach(self)


class RingListener:
    """A listening socket with a multishot accept on it."""

    __slots__ = ("_accepted", "_closed", "_driver", "_fd", "_tag")

    def __init__(self, driver: RingDriver, fd: int, accepted: Callable[[int], None], tag: int) -> None:
        self._driver, self._fd, self._accepted, self._tag = driver, fd, accepted, tag
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._driver._cancel(KIND_ACCEPT, self._tag)
            self._driver.ring.submit()  # the owner may close the socket next

    def _arm(self) -> None:
        self._driver.ring.push(
            abi.OP_ACCEPT,
            self._fd,
            KIND_ACCEPT << KIND_SHIFT | self._tag,
            ioprio=abi.ACCEPT_MULTISHOT,
            op_flags=socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC,
        )


class RingDriver:
    """Sockets on one ring; see `driver.Driver` for the interface and `loop.RingSelector` for who calls the rest."""

    def __init__(self, ring: Uring, loop: asyncio.AbstractEventLoop, receive_buffers: int = RECEIVE_BUFFERS) -> None:
        """Use `receive_buffers` (a power of two) receive buffers. Raises KernelError when the kernel does not do what this driver stands on."""
        self.ring = ring
        self._loop = loop
        _check_skipped_sends(ring)
        self._receive_buffers = ReceiveBuffers(ring.fd, 0, receive_buffers, RECEIVE_BUFFER_BYTES)
        self._pool = BufferPool(2, BATCH_BYTES)
        self._owners: list[RingFlow | RingListener | None] = []
        self._free: list[int] = []
        self._generation = 0
        self._flows = 0
        self._dirty: list[RingFlow] = []
        self._batch: list[RingFlow] = []
        self._batch_sizes: list[int] = []
        self._batch_behind: list[RingFlow] = []  # flows of the batch that are working off a backlog
        self._buffer: Buffer | None = None
        self._closing: list[RingFlow] = []
        self._lost: list[tuple[RingFlow, OSError]] = []
        self._ended: list[RingFlow] = []
        self._lingering: dict[RingFlow, float] = {}
        self._linger_timer: asyncio.TimerHandle | None = None
        self._sends = self._partial_sends = self._exhausted = 0

    # -- the interface ------------------------------------------------------------------------------------------------

    def listen(self, listener: socket.socket, accepted: Callable[[int], None]) -> RingListener:
        tag = self._new_tag()
        owner = RingListener(self, listener.fileno(), accepted, tag)
        self._owners[tag & _INDEX_MASK] = owner
        owner._arm()
        return owner

    def open(self, fd: int, endpoint: Endpoint) -> RingFlow:
        tag = self._new_tag()
        flow = RingFlow(self, fd, endpoint, tag)
        self._owners[tag & _INDEX_MASK] = flow
        self._flows += 1
        self._arm_receive(flow)
        return flow

    def flush(self) -> None:
        self.stage()
        if self._batch:
            self._finish_batch()

    def statistics(self) -> DriverStatistics:
        return DriverStatistics(
            driver="io_uring",
            flows=self._flows,
            enters=self.ring.enters,
            sends=self._sends,
            partial_sends=self._partial_sends,
            buffers_free=self._pool.free,
            buffers_total=self._pool.total,
            receive_buffers_exhausted=self._exhausted,
        )

    def close(self) -> None:
        """Close every flow and listener at once, without telling the endpoints, and the buffers."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        for owner in self._owners:
            if isinstance(owner, RingFlow):
                self._cancel_receive(owner)
                self._cancel_writable(owner)
            elif owner is not None:
                owner.close()
        self.flush()
        self.ring.submit()
        for owner in self._owners:
            if isinstance(owner, RingFlow):
                os.close(owner._fd)
                owner._state = _CLOSED
        self._owners.clear()
        self._flows = 0
        self.ring.completions()
        self._receive_buffers.close()
        self._pool.close()

    # -- sending ------------------------------------------------------------------------------------------------------

    def stage(self) -> bool:
        """Turn everything that waits to be sent into SQEs; the last batch is left for the coming enter.

        Returns whether there is more to do right after that enter, completions or not.
        """
        self._receive_buffers.publish()
        while self._dirty:
            if self._batch:
                self._finish_batch()
            flows, self._dirty = self._dirty[:BATCH_SENDS], self._dirty[BATCH_SENDS:]
            self._stage_batch(flows)
        return bool(self._batch_behind or self._closing)

    def _stage_batch(self, flows: list[RingFlow]) -> None:
        batch = [flow for flow in flows if flow._out is not None]
        frames: list[bytes] = [flow._out for flow in batch]  # type: ignore[misc]
        data = b"".join(frames)
        if len(data) > BATCH_BYTES:
            frames = self._cut(batch, frames)
            data = b"".join(frames)
        if not batch:
            return
        buffer = self._pool.lend()
        assert buffer is not None  # one batch at a time is in flight
        buffer.fill(data)
        self._pool.give_to_kernel(buffer, len(batch))
        address = buffer.address
        sqes: list[bytes] = []
        append, pack = sqes.append, abi.SQE_ADDRESS.pack
        sizes = []
        for flow, frame in zip(batch, frames, strict=True):
            size = len(frame)
            flow._out = None
            append(flow._sqe_head)
            append(pack(address, size))
            append(flow._sqe_tail)
            sizes.append(size)
            address += size
        self.ring.push_packed(b"".join(sqes))
        self._batch, self._batch_sizes, self._buffer = batch, sizes, buffer
        self._batch_behind = [flow for flow in batch if flow._backlog is not None]
        self._sends += len(batch)

    def _cut(self, batch: list[RingFlow], frames: list[bytes]) -> list[bytes]:
        """Share one buffer among large frames: what is over a flow's part becomes its backlog."""
        part = BATCH_BYTES // len(batch)
        for flow, frame in zip(batch, frames, strict=True):
            if len(frame) > part:
                if flow._backlog is None:
                    flow._backlog = bytearray()
                flow._backlog[:0] = frame[part:]
        return [frame[:part] for frame in frames]

    def _finish_batch(self) -> None:
        self.ring.submit()
        self.ring.put_back(self.settle(self.ring.completions()))

    def settle(self, completions: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Account for the batch that the last enter submitted; return the completions that are not sends'.

        Must come before anything else is sent, so that what a socket did not take stays ahead of what follows.
        """
        batch, buffer = self._batch, self._buffer
        if buffer is not None:
            self._batch, self._buffer = [], None
            others = [entry for entry in completions if entry[0] >> KIND_SHIFT != KIND_SEND]
            if len(others) != len(completions):
                positions = {flow._tag: at for at, flow in enumerate(batch)}
                starts = [0]
                for size in self._batch_sizes:
                    starts.append(starts[-1] + size)
                for user_data, result, _ in completions:
                    if user_data >> KIND_SHIFT == KIND_SEND:
                        at = positions[user_data & _TAG_MASK]
                        self._fell_short(batch[at], result, buffer.read(starts[at] + max(result, 0), starts[at + 1]))
                completions = others
            self._pool.complete(buffer, len(batch))
            behind, self._batch_behind = self._batch_behind, []
            for flow in behind:
                self._work_off(flow)
            if self._closing:
                self._closing = [flow for flow in self._closing if not self._shut_down_if_sent(flow)]
        return completions

    def _fell_short(self, flow: RingFlow, result: int, rest: bytes) -> None:
        if flow._state in (_ENDING, _CLOSED):
            return
        if result < 0 and result != -errno.EAGAIN:
            self._lost.append((flow, OSError(-result, os.strerror(-result))))
            return
        self._partial_sends += 1
        if flow._backlog is None:
            flow._backlog = bytearray(rest)
        else:
            flow._backlog[:0] = rest
        flow._waiting_writable = True
        self.ring.push(
            abi.OP_POLL_ADD, flow._fd, KIND_WRITABLE << KIND_SHIFT | flow._tag, op_flags=select.POLLOUT
        )

    def _work_off(self, flow: RingFlow) -> None:
        """Stage the next piece of a backlog, unless the socket is full; or note that it is empty."""
        if flow._backlog is None or flow._waiting_writable or flow._state in (_ENDING, _CLOSED):
            return
        if flow._backlog:
            flow._out = bytes(flow._backlog[:_PIECE_BYTES])
            del flow._backlog[:_PIECE_BYTES]
            self._dirty.append(flow)
            return
        flow._backlog = None
        if flow._state == _OPEN:
            self._loop.call_soon(self._drained, flow)
        else:
            self._release_if_idle(flow)

    def _drained(self, flow: RingFlow) -> None:
        if flow._state == _OPEN:
            self._call(flow, flow.endpoint.backlog_drained)

    # -- completions --------------------------------------------------------------------------------------------------

    def dispatch(self, user_data: int, result: int, flags: int) -> None:
        """Act on one completion that is neither a poll's of the selector nor a send's."""
        kind = user_data >> KIND_SHIFT
        if kind == KIND_CANCEL:
            return
        tag = user_data & _TAG_MASK
        owner = self._owners[tag & _INDEX_MASK]
        assert owner is not None and owner._tag == tag, "cannot match a completion to its owner"
        if kind == KIND_RECEIVE:
            assert isinstance(owner, RingFlow)
            self._received(owner, result, flags)
        elif kind == KIND_WRITABLE:
            assert isinstance(owner, RingFlow)
            owner._waiting_writable = False
            self._work_off(owner)
            self._release_if_idle(owner)
        else:
            assert isinstance(owner, RingListener)
            self._accepted(owner, result, flags)

    def end_turn(self) -> None:
        """Deliver what could not be delivered while completions were being read."""
        while self._lost:
            flow, error = self._lost.pop()
            self._end(flow, error)
        while self._ended:
            self._release(self._ended.pop())

    def _received(self, flow: RingFlow, result: int, flags: int) -> None:
        data = b""
        if flags & abi.CQE_F_BUFFER:
            data = self._receive_buffers.take(flags >> abi.CQE_BUFFER_SHIFT, max(result, 0))
        if not flags & abi.CQE_F_MORE:
            flow._receiving = False
        if result > 0:
            if flow._state in (_OPEN, _DETACHING):
                self._call(flow, flow.endpoint.data_received, data)
        elif result == 0:
            flow._eof = True
            if flow._state == _OPEN:
                self._call(flow, flow.endpoint.eof_received)
        elif result == -errno.ENOBUFS:
            self._exhausted += 1
        elif result != -errno.ECANCELED and flow._state != _ENDING:
            self._end(flow, OSError(-result, os.strerror(-result)))
        if flow._receiving:
            return
        if flow._state == _LINGERING and flow._eof:
            self._end(flow, None)
        elif flow._state in (_OPEN, _CLOSING, _LINGERING) and not flow._paused and not flow._eof:
            self._arm_receive(flow)
        else:
            self._release_if_idle(flow)

    def _accepted(self, listener: RingListener, result: int, flags: int) -> None:
        if result >= 0:
            if listener._closed:
                os.close(result)
            else:
                try:
                    listener._accepted(result)
                except Exception as exc:  # a bug of ours must not end the loop
                    self._loop.call_exception_handler({"message": "cannot take a connection", "exception": exc})
        if flags & abi.CQE_F_MORE:
            return
        if listener._closed:
            self._forget(listener._tag)
        elif result in (-errno.EMFILE, -errno.ENFILE, -errno.ENOMEM, -errno.ENOBUFS):
            self._loop.call_later(0.1, self._accept_again, listener)  # until a descriptor is free
        elif result >= 0 or result == -errno.ECONNABORTED:
            listener._arm()
        else:
            listener._closed = True
            self._forget(listener._tag)
            error = OSError(-result, os.strerror(-result))
            self._loop.call_exception_handler({"message": "cannot accept connections any more", "exception": error})

    def _accept_again(self, listener: RingListener) -> None:
        if listener._closed:
            self._forget(listener._tag)
        else:
            listener._arm()

    def _call(self, flow: RingFlow, callback: Callable[..., None], *arguments: bytes) -> None:
        try:
            callback(*arguments)
        except Exception as exc:  # a bug of ours must not end the loop, nor anybody else's flow
            self._loop.call_exception_handler({"message": "cannot go on with a connection", "exception": exc})
            flow.abort()

    # -- ending -------------------------------------------------------------------------------------------------------

    def _close(self, flow: RingFlow) -> None:
        if flow._paused:
            flow._paused = False
            self._arm_receive(flow)
        if self._batch or not self._shut_down_if_sent(flow):
            self._closing.append(flow)

    def _shut_down_if_sent(self, flow: RingFlow) -> bool:
        """Once all is sent, tell the peer so and read on until it has seen that: closing with unread input resets."""
        if flow._state != _CLOSING:
            return True
        if flow._out is not None or flow._backlog is not None:
            return False
        flow._state = _LINGERING
        if flow._eof:
            self._end(flow, None)
            return True
        try:
            with _borrowed(flow._fd) as handle:
                handle.shutdown(socket.SHUT_WR)
        except OSError as exc:
            self._lost.append((flow, exc))
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
            self._end(flow, None)

    def _detach(self, flow: RingFlow) -> None:
        self._cancel_receive(flow)
        self.flush()
        self._release_if_idle(flow)

    def _end(self, flow: RingFlow, error: OSError | None) -> None:
        if flow._state in (_ENDING, _CLOSED):
            return
        flow._state = _ENDING
        flow._error = error
        flow._out = flow._backlog = None
        self._lingering.pop(flow, None)
        self._cancel_receive(flow)
        self._cancel_writable(flow)
        self._release_if_idle(flow)

    def _release_if_idle(self, flow: RingFlow) -> None:
        if flow._state not in (_ENDING, _DETACHING) or flow._receiving or flow._waiting_writable:
            return
        if flow._out is None and flow._backlog is None:
            if self._batch:  # an SQE of ours may still name the descriptor
                self._ended.append(flow)
            else:
                self._release(flow)

    def _release(self, flow: RingFlow) -> None:
        if flow._state == _CLOSED:
            return
        state, flow._state = flow._state, _CLOSED
        flow._out = flow._backlog = None
        self._forget(flow._tag)
        self._flows -= 1
        if state == _DETACHING:
            self._call(flow, lambda: flow._detached(flow._fd))  # type: ignore[misc]
        else:
            os.close(flow._fd)
            self._call(flow, lambda: flow.endpoint.connection_lost(flow._error))

    # -- operations ---------------------------------------------------------------------------------------------------

    def _arm_receive(self, flow: RingFlow) -> None:
        if flow._receiving or flow._eof:
            return  # still being cancelled: it is armed again when that is through
        flow._receiving = True
        self.ring.push(
            abi.OP_RECV,
            flow._fd,
            KIND_RECEIVE << KIND_SHIFT | flow._tag,
            flags=abi.IOSQE_BUFFER_SELECT,
            ioprio=abi.RECV_MULTISHOT,
        )

    def _cancel_receive(self, flow: RingFlow) -> None:
        if flow._receiving:
            self._cancel(KIND_RECEIVE, flow._tag)

    def _cancel_writable(self, flow: RingFlow) -> None:
        if flow._waiting_writable:
            self._cancel(KIND_WRITABLE, flow._tag)

    def _cancel(self, kind: int, tag: int) -> None:
        self.ring.push(
            abi.OP_ASYNC_CANCEL,
            -1,
            KIND_CANCEL << KIND_SHIFT,
            address=kind << KIND_SHIFT | tag,
            flags=abi.IOSQE_CQE_SKIP_SUCCESS,
        )

    def _new_tag(self) -> int:
        if self._free:
            index = self._free.pop()
        else:
            index = len(self._owners)
            self._owners.append(None)
        self._generation = (self._generation + 1) & _GENERATION_MASK
        return self._generation << _GENERATION_SHIFT | index

    def _forget(self, tag: int) -> None:
        index = tag & _INDEX_MASK
        self._owners[index] = None
        self._free.append(index)


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket object over a descriptor that stays somebody else's; the family does not matter to what we call."""
    handle = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        yield handle
    finally:
        handle.detach()


def _check_skipped_sends(ring: Uring) -> None:
    """Assert on a socket pair what `stage` stands on: a full send posts nothing, a short one its count."""
    ours, peer = socket.socketpair()
    with ours, peer:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        pool = BufferPool(1, 1 << 20)
        buffer = pool.lend()
        assert buffer is not None
        pool.give_to_kernel(buffer, 2)
        head = abi.SQE_HEAD.pack(abi.OP_SEND, abi.IOSQE_CQE_SKIP_SUCCESS, 0, ours.fileno(), 0)
        results = []
        for size in (1, buffer.size):
            tail = abi.SQE_TAIL.pack(_SEND_FLAGS, KIND_SEND << KIND_SHIFT, 0, 0, 0, 0, 0)
            ring.push_packed(head + abi.SQE_ADDRESS.pack(buffer.address, size) + tail)
            ring.submit()
            pool.complete(buffer)
            results.append([result for _, result, _ in ring.completions()])
        pool.close()
    if results[0] or len(results[1]) != 1 or not 0 < results[1][0] < (1 << 20):
        raise KernelError(f"rely on skipped completions of sends (got {results})", errno.EOPNOTSUPP)
