"""The buffer pool: fixed buffers in one mapping, lent out, given to the kernel, and free again.

Theory of operation. A buffer is FREE, then LENT to code that fills it, then IN_KERNEL while submitted operations read
it, then FREE again. IN_KERNEL is counted: one buffer carries the frames of up to a few hundred sends, and each of them
is one reference that its completion drops. The pool has its memory from the start and takes no more: an empty pool
answers None, and whoever wanted a buffer waits. A step in the wrong order is a bug on our side and asserts.
"""

from __future__ import annotations

import ctypes
import enum
import mmap


class BufferState(enum.Enum):
    """Who has a buffer."""

    FREE = "free"
    LENT = "lent"
    IN_KERNEL = "in kernel"


class Buffer:
    """One buffer of a pool; `address` is where the kernel finds its first byte."""

    __slots__ = ("_memory", "_references", "address", "offset", "size", "state")

    def __init__(self, memory: mmap.mmap, offset: int, size: int, address: int) -> None:
        self._memory = memory
        self._references = 0
        self.offset = offset
        self.size = size
        self.address = address
        self.state = BufferState.FREE

    def fill(self, data: bytes) -> None:
        """Write `data` at the start; the buffer must be LENT and large enough."""
        assert self.state is BufferState.LENT, f"cannot fill a buffer that is {self.state.value}"
        assert len(data) <= self.size, f"cannot put {len(data)} bytes into a buffer of {self.size}"
        self._memory[self.offset : self.offset + len(data)] = data

    def read(self, start: int, end: int) -> bytes:
        """Return a copy of bytes [start, end)."""
        return self._memory[self.offset + start : self.offset + end]


class BufferPool:
    """A bounded set of equal buffers."""

    __slots__ = ("_buffers", "_free", "_memory", "buffer_bytes")

    def __init__(self, count: int, buffer_bytes: int) -> None:
        self._memory = mmap.mmap(-1, count * buffer_bytes)
        anchor = ctypes.c_char.from_buffer(self._memory)
        base = ctypes.addressof(anchor)
        del anchor  # an exported buffer would keep the mapping from being closed
        self.buffer_bytes = buffer_bytes
        self._buffers = [
            Buffer(self._memory, index * buffer_bytes, buffer_bytes, base + index * buffer_bytes)
            for index in range(count)
        ]
        self._free = self._buffers[::-1]

    @property
    def free(self) -> int:
        """How many buffers are FREE."""
        return len(self._free)

    @property
    def total(self) -> int:
        """How many buffers there are."""
        return len(self._buffers)

    def lend(self) -> Buffer | None:
        """Take a FREE buffer to fill, or None when there is none."""
        if not self._free:
            return None
        buffer = self._free.pop()
        assert buffer.state is BufferState.FREE
        buffer.state = BufferState.LENT
        return buffer

    def give_to_kernel(self, buffer: Buffer, references: int) -> None:
        """Note that `references` operations that read this LENT buffer are being submitted."""
        assert buffer.state is BufferState.LENT, f"cannot submit a buffer that is {buffer.state.value}"
        assert references > 0
        buffer._references = references
        buffer.state = BufferState.IN_KERNEL

    def load(self, data: bytes, references: int) -> Buffer | None:
        """Lend a buffer, fill it and give it to the kernel: the three in one call, for each step has them in a row."""
        assert len(data) <= self.buffer_bytes, f"cannot put {len(data)} bytes into a buffer of {self.buffer_bytes}"
        assert references > 0
        if not self._free:
            return None
        buffer = self._free.pop()
        assert buffer.state is BufferState.FREE
        self._memory[buffer.offset : buffer.offset + len(data)] = data
        buffer._references = references
        buffer.state = BufferState.IN_KERNEL
        return buffer

    def complete(self, buffer: Buffer, references: int = 1) -> None:
        """Note that so many operations on an IN_KERNEL buffer are over; the last one frees it."""
        assert buffer.state is BufferState.IN_KERNEL, f"cannot complete on a buffer that is {buffer.state.value}"
        assert 0 < references <= buffer._references, "cannot complete more operations than were submitted"
        buffer._references -= references
        if not buffer._references:
            buffer.state = BufferState.FREE
            self._free.append(buffer)

    def give_back(self, buffer: Buffer) -> None:
        """Return a LENT buffer that was not used after all."""
        assert buffer.state is BufferState.LENT, f"cannot give back a buffer that is {buffer.state.value}"
        buffer.state = BufferState.FREE
        self._free.append(buffer)

    def close(self) -> None:
        """Unmap; every buffer must be FREE."""
        assert len(self._free) == len(self._buffers), "cannot close a pool with buffers in use"
        self._memory.close()
