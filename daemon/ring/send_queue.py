"""Batched sends that need no completion: what is sent to flows between two turns of the loop leaves in the next batch.

A batch is up to 256 frames, joined into one pool buffer, and one SQE each. MSG_DONTWAIT makes the kernel finish the
send inside the enter, MSG_WAITALL makes a short send post its count instead of passing for a full one, CQE_SKIP_SUCCESS
makes a full send post nothing (never without WAITALL: a short send would be lost silently; `check` tries it at start).
So the common case costs no completion, and its buffer is free when the enter returns. The last batch of a turn is left
for the enter that waits: one system call a turn.

A flow whose socket did not take everything falls behind: the rest is its backlog, everything later is appended to that,
and it is sent piece by piece as the socket polls writable, until it is empty. One send at most is in flight on a
socket, because the kernel keeps no order between two.
"""

from __future__ import annotations

import array
import errno
import itertools
import os
import select
import socket
from collections.abc import Callable
from typing import Final

from seedance.daemon.ring import abi
from seedance.daemon.ring.flow import CLOSED, ENDING, RingFlow, send_sqe
from seedance.daemon.ring.operations import KIND_SEND, KIND_SHIFT, KIND_WRITABLE, TAG_MASK
from seedance.daemon.ring.pool import Buffer, BufferPool
from seedance.daemon.ring.uring import Uring
from seedance.errors import KernelError

BATCH_SENDS: Final = 256
BATCH_BYTES: Final = 256 << 10
PIECE_BYTES: Final = 64 << 10
"""Of a backlog at a time: more than a small SO_SNDBUF takes, little to copy in vain."""


class SendQueue:
    """The flows with something to send, and the batch in flight.

    `caught_up` is told of a flow whose backlog is out. Failed flows wait in `failed` until their owner ends them.
    """

    __slots__ = (
        "_batch",
        "_behind",
        "_buffer",
        "_caught_up",
        "_dirty",
        "_ring",
        "_sizes",
        "failed",
        "partial_sends",
        "pool",
        "sends",
    )

    def __init__(self, ring: Uring, caught_up: Callable[[RingFlow], None]) -> None:
        self._ring = ring
        self._caught_up = caught_up
        self._dirty: list[RingFlow] = []
        self._batch: list[RingFlow] = []
        self._sizes: list[int] = []
        self._behind: list[RingFlow] = []  # flows that are working off a backlog and not waiting for their socket
        self._buffer: Buffer | None = None
        self.pool = BufferPool(2, BATCH_BYTES)
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
        return self._buffer is not None

    def stage(self) -> bool:
        """Turn everything that waits to be sent into SQEs; the last batch is left for the coming enter.

        Returns whether there is more to do right after that enter, completions or not: a piece of a backlog that goes
        out whole posts nothing, and the next piece must follow.
        """
        dirty = self._dirty
        while dirty:
            if self._buffer is not None:
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
        buffer = self.pool.lend()
        assert buffer is not None  # one batch at a time is in flight
        buffer.fill(data)
        self.pool.give_to_kernel(buffer, len(batch))
        # Each flow has its SQE at hand, but for address and length; those are written for all at once.
        sizes = list(map(len, frames))
        addresses = list(itertools.accumulate(sizes[:-1], initial=buffer.address))
        sqes = bytearray().join([flow.sqe for flow in batch])
        with memoryview(sqes) as view, view.cast("Q") as quads, view.cast("I") as words:
            quads[abi.SQE_ADDRESS_AT // 8 :: abi.SQE_BYTES // 8] = memoryview(array.array("Q", addresses))
            words[abi.SQE_LENGTH_AT // 4 :: abi.SQE_BYTES // 4] = memoryview(array.array("I", sizes))
        self._ring.push_packed(sqes)
        self._batch, self._sizes, self._buffer = batch, sizes, buffer
        self.sends += len(batch)

    def settle(self, completions: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Account for the batch that the last enter submitted; return the completions that are not sends'.

        Must come before anything else is sent, so that what a socket did not take stays ahead of what follows.
        """
        batch, buffer = self._batch, self._buffer
        if buffer is None:
            return completions
        self._batch, self._buffer = [], None
        others = [entry for entry in completions if entry[0] >> KIND_SHIFT != KIND_SEND]
        if len(others) != len(completions):
            positions = {flow.tag: at for at, flow in enumerate(batch)}
            starts = [0]
            for size in self._sizes:
                starts.append(starts[-1] + size)
            for user_data, result, _ in completions:
                if user_data >> KIND_SHIFT == KIND_SEND:
                    at = positions[user_data & TAG_MASK]
                    self._fell_short(batch[at], result, buffer.read(starts[at] + max(result, 0), starts[at + 1]))
        self.pool.complete(buffer, len(batch))
        if self._behind:
            behind, self._behind = self._behind, []
            for flow in behind:
                if flow.out is None:
                    self.work_off(flow)
                else:  # it is for a later batch
                    self._behind.append(flow)
        return others

    def _fell_short(self, flow: RingFlow, result: int, rest: bytes) -> None:
        if flow.state in (ENDING, CLOSED):
            return
        if result < 0 and result != -errno.EAGAIN:
            self.failed.append((flow, OSError(-result, os.strerror(-result))))
            return
        self.partial_sends += 1
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
                    self._behind.append(flow)
                flow.backlog[:0] = frame[part:]
        return [frame[:part] for frame in frames]

    def fall_behind(self, flow: RingFlow) -> None:
        """Go on with a backlog once what is before it is out."""
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
            self._caught_up(flow)


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
            ring.push_packed(send_sqe(ours.fileno(), KIND_SEND << KIND_SHIFT, buffer.address, size))
            ring.submit()
            pool.complete(buffer)
            results.append([result for _, result, _ in ring.completions()])
        pool.close()
    if results[0] or len(results[1]) != 1 or not 0 < results[1][0] < (1 << 20):
        raise KernelError(f"rely on skipped completions of sends (got {results})", errno.EOPNOTSUPP)
