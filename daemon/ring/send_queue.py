"""Batched sends that need no completion: what is sent to flows between two turns of the loop leaves in the next batch.

A batch is up to 256 frames, joined into one pool buffer, and one SQE each. MSG_DONTWAIT makes the kernel finish the
send inside the enter, MSG_WAITALL makes a short send post its count instead of passing for a full one, CQE_SKIP_SUCCESS
makes a full send post nothing (never without WAITALL: a short send would be lost silently; `check` tries it at start).
So the common case costs no completion, and its buffer is free when the enter returns. The last batch of a turn is left
for the enter that waits: one system call a turn. What goes to many flows at once (`send_each`) lies in a frame store
already: it becomes SQEs at once, and neither a flow nor a byte of a frame is touched for that, which with thousands of
flows would all be out of the processor's cache.

A flow whose socket did not take everything falls behind: the rest is its backlog, everything later is appended to that,
and it is sent piece by piece as the socket polls writable, until it is empty. One send at most is in flight on a
socket, because the kernel keeps no order between two.
"""

from __future__ import annotations

import array
import ctypes
import errno
import itertools
import os
import select
import socket
from collections.abc import Callable
from typing import Final

from seedance.daemon.ring import abi
from seedance.daemon.ring.flow import CLOSED, ENDING, OPEN, RingFlow
from seedance.daemon.ring.frame_store import StoredFrames
from seedance.daemon.ring.operations import KIND_SEND, KIND_SHIFT, KIND_WRITABLE, TAG_MASK
from seedance.daemon.ring.pool import Buffer, BufferPool
from seedance.daemon.ring.uring import Uring
from seedance.errors import KernelError

BATCH_SENDS: Final = 256
BATCH_BYTES: Final = 256 << 10
PIECE_BYTES: Final = 64 << 10
"""Of a backlog at a time: more than a small SO_SNDBUF takes, little to copy in vain."""
_SEND_FLAGS: Final = socket.MSG_NOSIGNAL | socket.MSG_WAITALL | socket.MSG_DONTWAIT
_QUADS: Final = abi.SQE_BYTES // 8
_WORDS: Final = abi.SQE_BYTES // 4


# What is in flight: the descriptor, address and length of each send, and what they are sent from. A plain tuple: making
# a named one is a call.
_Batch = tuple[memoryview, memoryview, memoryview, object]


class SendQueue:
    """The flows with something to send, and the batch in flight.

    `caught_up` is told of a flow whose backlog is out. Failed flows wait in `failed` until their owner ends them. In
    `hindered` are the descriptors of those that must not be sent to past their backlog or end.
    """

    __slots__ = (
        "_addresses",
        "_batch",
        "_behind",
        "_caught_up",
        "_descriptors",
        "_dirty",
        "_flows",
        "_lengths",
        "_ring",
        "_sqes",
        "failed",
        "hindered",
        "partial_sends",
        "pool",
        "sends",
    )

    def __init__(self, ring: Uring, caught_up: Callable[[RingFlow], None]) -> None:
        self._ring = ring
        self._caught_up = caught_up
        self._flows: list[RingFlow | None] = []  # by descriptor
        self._dirty: list[RingFlow] = []
        self._behind: list[RingFlow] = []  # flows that are working off a backlog and not waiting for their socket
        self._batch: _Batch | None = None
        # The SQEs of a batch; from one to the next only these columns of them change.
        self._sqes = memoryview(bytearray().join(send_sqe(KIND_SEND << KIND_SHIFT | at) for at in range(BATCH_SENDS)))
        words = self._sqes.cast("I")
        self._descriptors = words[abi.SQE_FD_AT // 4 :: _WORDS]
        self._lengths = words[abi.SQE_LENGTH_AT // 4 :: _WORDS]
        self._addresses = self._sqes.cast("L")[abi.SQE_ADDRESS_AT // 8 :: _QUADS]
        self.pool = BufferPool(2, BATCH_BYTES)
        self.hindered: set[int] = set()
        self.failed: list[tuple[RingFlow, OSError]] = []
        self.sends = 0
        self.partial_sends = 0

    @property
    def mark(self) -> Callable[[RingFlow], None]:
        """What a flow calls when it has something to send and had nothing before."""
        return self._dirty.append

    @property
    def in_flight(self) -> bool:
        """Whether SQEs of a batch may still name descriptors."""
        return self._batch is not None

    def add(self, flow: RingFlow) -> None:
        """Take a new flow."""
        self._flows += [None] * (flow.number + 1 - len(self._flows))
        self._flows[flow.number] = flow

    def remove(self, flow: RingFlow) -> None:
        """Forget a flow, whose descriptor is about to be another's."""
        self._flows[flow.number] = None
        self.hindered.discard(flow.number)

    def send_each(self, fds: memoryview, frames: StoredFrames) -> list[tuple[int, int]]:
        """See `driver.Driver`."""
        if self._batch is not None:
            self.finish()
        left: list[tuple[int, int]] = []
        hindered = self.hindered
        if self._dirty:
            hindered = hindered | {flow.number for flow in self._dirty}
        if hindered and not hindered.isdisjoint(fds):
            left = [(fd, self._send(fd, frame)) for fd, frame in frames.to(fds) if fd in hindered]
            fds, frames = frames.without(fds, hindered)
        for at in range(0, len(fds), BATCH_SENDS):
            if self._batch is not None:
                self.finish()
            end = at + BATCH_SENDS
            self._push(fds[at:end], frames.addresses[at:end], frames.lengths[at:end], frames.store)
        return [(fd, waiting_bytes) for fd, waiting_bytes in left if waiting_bytes]

    def _send(self, fd: int, frame: bytes) -> int:
        flow = self._flows[fd]
        return 0 if flow is None else flow.send(frame)

    def stage(self) -> bool:
        """Turn everything that waits to be sent into SQEs; the last batch is left for the coming enter.

        Returns whether there is more to do right after that enter, completions or not: a piece of a backlog that goes
        out whole posts nothing, and the next piece must follow.
        """
        dirty = self._dirty
        while dirty:
            if self._batch is not None:
                self.finish()
            flows = dirty[:BATCH_SENDS]
            del dirty[:BATCH_SENDS]
            self._stage_batch(flows)
        return bool(self._behind)

    def finish(self) -> None:
        """Submit the staged batch now and account for it."""
        self._ring.submit()
        self._ring.put_back(self.settle(self._ring.completions()))

    def _stage_batch(self, flows: list[RingFlow]) -> None:
        batch = flows
        frames: list[bytes] = [flow.out for flow in batch]  # type: ignore[misc]
        try:
            data = b"".join(frames)
        except TypeError:  # None among them: some flows were ended meanwhile
            batch = [flow for flow in flows if flow.out is not None]
            frames = [flow.out for flow in batch]  # type: ignore[misc]
            data = b"".join(frames)
            if not batch:
                return
        for flow in batch:
            flow.out = None
        if len(data) > BATCH_BYTES:
            frames = self._cut(batch, frames)
            data = b"".join(frames)
        buffer = self.pool.load(data, len(batch))
        assert buffer is not None  # one batch at a time is in flight
        lengths = list(map(len, frames))
        addresses = array.array("L", itertools.accumulate(lengths[:-1], initial=buffer.address))
        fds = array.array("I", [flow.number for flow in batch])
        self._push(memoryview(fds), memoryview(addresses), memoryview(array.array("I", lengths)), buffer)

    def _push(self, fds: memoryview, addresses: memoryview, lengths: memoryview, memory: object) -> None:
        """Write the SQEs of a batch."""
        assert self._batch is None
        count = len(fds)
        self._descriptors[:count] = fds
        self._lengths[:count] = lengths
        self._addresses[:count] = addresses
        self._ring.push_packed(self._sqes[: count * abi.SQE_BYTES])
        self._batch = fds, addresses, lengths, memory
        self.sends += count

    def settle(self, completions: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Account for the batch that the last enter submitted, if any; return the completions that are not sends'.

        Must come before anything else is sent, so that what a socket did not take stays ahead of what follows.
        """
        batch = self._batch
        if batch is not None:
            self._batch = None
            for user_data, _, _ in completions:
                if user_data >> KIND_SHIFT == KIND_SEND:  # hardly ever: a send that was not taken whole
                    completions = self._take_short(batch, completions)
                    break
            fds, memory = batch[0], batch[3]
            if isinstance(memory, Buffer):
                self.pool.complete(memory, len(fds))
        if self._behind:  # ended ones too, which drop out
            behind, self._behind = self._behind, []
            for flow in behind:
                if flow.out is None:
                    self.work_off(flow)
                else:  # it is for a later batch
                    self._behind.append(flow)
        return completions

    def _take_short(self, batch: _Batch, completions: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Keep what sockets did not take of a batch; return the completions that are not sends'."""
        fds, addresses, lengths, _ = batch
        for user_data, result, _ in completions:
            if user_data >> KIND_SHIFT == KIND_SEND:
                at = user_data & TAG_MASK
                flow = self._flows[fds[at]]
                if flow is not None:
                    sent = max(result, 0)
                    self._fell_short(flow, result, ctypes.string_at(addresses[at] + sent, lengths[at] - sent))
        return [entry for entry in completions if entry[0] >> KIND_SHIFT != KIND_SEND]

    def _fell_short(self, flow: RingFlow, result: int, rest: bytes) -> None:
        if flow.state in (ENDING, CLOSED):
            return
        if result < 0 and result != -errno.EAGAIN:
            self.failed.append((flow, OSError(-result, os.strerror(-result))))
            return
        self.partial_sends += 1
        self.hindered.add(flow.number)
        if flow.out is not None:  # sent after this batch was made, and not to overtake it
            rest += flow.out
            flow.out = None
        if flow.backlog is None:
            flow.backlog = bytearray(rest)
        else:
            flow.backlog[:0] = rest
        flow.waiting_writable = True
        user_data = KIND_WRITABLE << KIND_SHIFT | flow.tag
        self._ring.push(abi.OP_POLL_ADD, flow.number, user_data, op_flags=select.POLLOUT)

    def _cut(self, batch: list[RingFlow], frames: list[bytes]) -> list[bytes]:
        """Share one buffer among large frames: what is over a flow's part goes to the front of its backlog."""
        part = BATCH_BYTES // len(batch)
        for flow, frame in zip(batch, frames, strict=True):
            if len(frame) > part:
                if flow.backlog is None:
                    flow.backlog = bytearray()
                    self.fall_behind(flow)
                flow.backlog[:0] = frame[part:]
        return [frame[:part] for frame in frames]

    def fall_behind(self, flow: RingFlow) -> None:
        """Go on with a backlog once what is before it is out."""
        self.hindered.add(flow.number)
        self._behind.append(flow)

    def work_off(self, flow: RingFlow) -> None:
        """Stage the next piece of a backlog, unless the socket is full; or note that it is empty."""
        if flow.backlog is None or flow.waiting_writable or flow.state in (ENDING, CLOSED):
            return
        if flow.backlog:
            flow.out = bytes(flow.backlog[:PIECE_BYTES])
            del flow.backlog[:PIECE_BYTES]
            self._dirty.append(flow)
            self._behind.append(flow)
        else:
            flow.backlog = None
            if flow.state == OPEN:
                self.hindered.discard(flow.number)
            self._caught_up(flow)


def send_sqe(user_data: int, fd: int = 0, address: int = 0, length: int = 0) -> bytes:
    """Return the SQE of a send that posts nothing when it is complete."""
    flags = abi.IOSQE_CQE_SKIP_SUCCESS
    return abi.SQE.pack(abi.OP_SEND, flags, 0, fd, 0, address, length, _SEND_FLAGS, user_data, 0, 0, 0, 0, 0)


def check(ring: Uring) -> None:
    """Try on a socket pair what this module stands on. Raises KernelError where the kernel does otherwise."""
    ours, peer = socket.socketpair()
    with ours, peer:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        pool = BufferPool(1, 1 << 20)
        buffer = pool.lend()
        assert buffer is not None
        pool.give_to_kernel(buffer, 2)
        results = []
        for size in (1, buffer.size):
            ring.push_packed(send_sqe(KIND_SEND << KIND_SHIFT, ours.fileno(), buffer.address, size))
            ring.submit()
            pool.complete(buffer)
            results.append([result for _, result, _ in ring.completions()])
        pool.close()
    if results[0] or len(results[1]) != 1 or not 0 < results[1][0] < (1 << 20):
        raise KernelError(f"rely on skipped completions of sends (got {results})", errno.EOPNOTSUPP)
