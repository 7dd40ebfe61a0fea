"""One io_uring: submission and completion queue in shared memory, driven without a C extension.

Theory of operation. The ring is set up with SINGLE_ISSUER and DEFER_TASKRUN (Linux 6.1): only this thread submits,
and the kernel posts completions only while this thread is inside io_uring_enter. Both queues are thus never touched
by two processors at once, and plain loads and stores are enough: the barriers that liburing has for other set-ups would
have nothing to order. With CQ entries that do not fit the kernel keeps a backlog (FEAT_NODROP) and says so in sq_flags.

`push` and `push_packed` only write memory. `submit` enters without waiting, `wait` submits and waits in the same
call, `completions` takes what there is. What an SQE points to must stay alive until its completion, or, for a send
with MSG_DONTWAIT, until the enter that submitted it has returned: such a send is finished inside it, one way or other.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from seedance.daemon.ring import abi
from seedance.errors import KernelError

_FLAGS = abi.SETUP_SINGLE_ISSUER | abi.SETUP_DEFER_TASKRUN | abi.SETUP_TASKRUN_FLAG
_FLAGS |= abi.SETUP_SUBMIT_ALL | abi.SETUP_CQSIZE
_FEATURES = abi.FEAT_SINGLE_MMAP | abi.FEAT_NODROP | abi.FEAT_EXT_ARG
_U32 = 0xFFFFFFFF


class Uring:
    """A ring of the thread that makes it; must not be used after a fork."""

    __slots__ = (
        "_array_at",
        "_cq_head_at",
        "_cq_mask",
        "_cq_tail_at",
        "_cqes_at",
        "_entries",
        "_fd",
        "_kept",
        "_ring",
        "_ring_u32",
        "_sq_flags_at",
        "_sq_tail_at",
        "_sqes",
        "_submitted",
        "_tail",
        "_wait",
        "_wait_address",
        "enters",
    )

    def __init__(self, entries: int, cq_entries: int) -> None:
        """Set up a ring of `entries` (a power of two) SQEs; raises KernelError where the kernel cannot or may not."""
        params = ctypes.create_string_buffer(abi.PARAMS.size)
        abi.PARAMS.pack_into(params, 0, entries, cq_entries, _FLAGS, *[0] * 25)
        try:
            self._fd = abi.setup(entries, params)
        except OSError as exc:
            raise KernelError("set up io_uring", exc.errno or 0) from exc
        fields = abi.PARAMS.unpack(params)
        sq_entries, features = fields[0], fields[5]
        sq_head, sq_tail, _, _, sq_flags, _, sq_array = fields[10:17]
        cq_head, cq_tail, cq_mask, _, _, cqes = fields[19:25]
        try:
            if features & _FEATURES != _FEATURES or sq_entries != entries:
                raise KernelError("set up io_uring with the features of Linux 6.1", errno.EOPNOTSUPP)
            size = max(sq_array + 4 * sq_entries, cqes + abi.CQE_BYTES * fields[1])
            self._ring = mmap.mmap(self._fd, size, offset=abi.OFF_SQ_RING)
            self._sqes = mmap.mmap(self._fd, abi.SQE_BYTES * sq_entries, offset=abi.OFF_SQES)
        except OSError as exc:
            os.close(self._fd)
            raise KernelError("map io_uring", exc.errno or 0) from exc
        except KernelError:
            os.close(self._fd)
            raise
        self._ring_u32 = memoryview(self._ring).cast("I")
        self._entries = sq_entries
        self._sq_tail_at, self._sq_flags_at, self._array_at = sq_tail // 4, sq_flags // 4, sq_array // 4
        self._cq_head_at, self._cq_tail_at = cq_head // 4, cq_tail // 4
        self._cq_mask = self._ring_u32[cq_mask // 4]
        self._cqes_at = cqes
        for index in range(sq_entries):  # before 6.6 there is always an index array; ours is the identity
            self._ring_u32[self._array_at + index] = index
        self._tail = self._submitted = self._ring_u32[sq_head // 4]
        self._wait = ctypes.create_string_buffer(abi.WAIT_ARGUMENT.size)
        self._wait_address = ctypes.addressof(self._wait)
        self._kept: list[tuple[int, int, int]] = []
        self.enters = 0

    def close(self) -> None:
        """End the ring; what is in flight is cancelled by the kernel. Idempotent."""
        if self._fd >= 0:
            self._ring_u32.release()
            self._ring.close()
            self._sqes.close()
            os.close(self._fd)
            self._fd = -1

    @property
    def fd(self) -> int:
        """The ring's descriptor, or -1 after close."""
        return self._fd

    @property
    def unsubmitted(self) -> int:
        """SQEs that were pushed and not submitted yet."""
        return int(self._tail - self._submitted)

    @property
    def needs_enter(self) -> bool:
        """Whether the kernel holds completions that only an enter brings."""
        return bool(self._ring_u32[self._sq_flags_at] & (abi.SQ_TASKRUN | abi.SQ_CQ_OVERFLOW))

    @property
    def has_completions(self) -> bool:
        """Whether `completions` would return anything now."""
        return bool(self._kept) or self._ring_u32[self._cq_head_at] != self._ring_u32[self._cq_tail_at]

    def push(
        self,
        opcode: int,
        fd: int,
        user_data: int,
        *,
        address: int = 0,
        length: int = 0,
        flags: int = 0,
        ioprio: int = 0,
        op_flags: int = 0,
        buffer_group: int = 0,
    ) -> None:
        """Append one SQE; enters the kernel first when the queue is full."""
        if self._tail - self._submitted >= self._entries:
            self.submit()
        at = (self._tail & (self._entries - 1)) * abi.SQE_BYTES
        abi.SQE.pack_into(
            self._sqes, at, opcode, flags, ioprio, fd, 0, address, length, op_flags, user_data, buffer_group, 0, 0, 0, 0
        )
        self._tail += 1

    def push_packed(self, sqes: bytes | memoryview) -> None:
        """Append whole SQEs, packed back to back; at most half a queue of them at once."""
        count = len(sqes) // abi.SQE_BYTES
        if self._tail - self._submitted + count > self._entries:
            self.submit()
        at = (self._tail & (self._entries - 1)) * abi.SQE_BYTES
        room = self._entries * abi.SQE_BYTES - at
        if len(sqes) <= room:
            self._sqes[at : at + len(sqes)] = sqes
        else:
            self._sqes[at : at + room] = sqes[:room]
            self._sqes[: len(sqes) - room] = sqes[room:]
        self._tail += count

    def submit(self) -> None:
        """Hand all SQEs to the kernel and let it post what is complete, without waiting.

        On return every MSG_DONTWAIT send among them is finished. Raises KernelError.
        """
        self._enter(abi.enter_holding, 0, abi.ENTER_GETEVENTS, None, 0)
        while self._tail != self._submitted:
            # No room for more completions, or no memory for requests: take what there is and go on.
            self._kept += self._take()
            os.sched_yield()
            self._enter(abi.enter_holding, 0, abi.ENTER_GETEVENTS, None, 0)

    def wait(self, timeout_s: float | None) -> None:
        """Submit, and wait until something completes, the time is over or a signal comes; other threads run on."""
        if timeout_s is None:
            self._enter(abi.enter_waiting, 1, abi.ENTER_GETEVENTS, None, 0)
        else:
            seconds, nanoseconds = divmod(int(timeout_s * 1e9), 1_000_000_000)
            # struct io_uring_getevents_arg, its timespec right behind it
            abi.WAIT_ARGUMENT.pack_into(self._wait, 0, 0, 0, 0, self._wait_address + 24, seconds, nanoseconds)
            self._enter(abi.enter_waiting, 1, abi.ENTER_GETEVENTS | abi.ENTER_EXT_ARG, self._wait_address, 24)
        if self._tail != self._submitted:  # a signal came before, or there was no memory for all of them
            self.submit()

    def _enter(self, call: abi.EnterFunction, wait_for: int, flags: int, argument: int | None, size: int) -> None:
        self._ring_u32[self._sq_tail_at] = self._tail & _U32
        self.enters += 1
        taken = call(abi.SYS_IO_URING_ENTER, self._fd, self._tail - self._submitted, wait_for, flags, argument, size)
        if taken >= 0:
            self._submitted += taken
            return
        error = ctypes.get_errno()
        # EBUSY and EAGAIN: no room for completions or requests until some are taken. Nothing was submitted then.
        if error not in (errno.EINTR, errno.ETIME, errno.EAGAIN, errno.EBUSY):
            raise KernelError("enter io_uring", error)

    def completions(self) -> list[tuple[int, int, int]]:
        """Take all completions there are, oldest first: (user_data, result, flags)."""
        taken = self._take()
        if self._kept:
            taken = self._kept + taken
            self._kept = []
        return taken

    def put_back(self, completions: list[tuple[int, int, int]]) -> None:
        """Return completions that were taken too early; they come first when next taken."""
        self._kept += completions

    def _take(self) -> list[tuple[int, int, int]]:
        head, tail = self._ring_u32[self._cq_head_at], self._ring_u32[self._cq_tail_at]
        if head == tail:
            return []
        count = (tail - head) & _U32
        first = head & self._cq_mask
        at = self._cqes_at + first * abi.CQE_BYTES
        until_end = self._cq_mask + 1 - first
        if count <= until_end:
            taken = self._ring[at : at + count * abi.CQE_BYTES]
        else:
            taken = self._ring[at : at + until_end * abi.CQE_BYTES]
            taken += self._ring[self._cqes_at : self._cqes_at + (count - until_end) * abi.CQE_BYTES]
        self._ring_u32[self._cq_head_at] = tail
        return list(abi.CQE.iter_unpack(taken))
