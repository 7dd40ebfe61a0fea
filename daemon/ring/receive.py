"""Receive buffers that the kernel picks from by itself: one provided-buffer ring, shared by all sockets of a loop.

A multishot receive holds no buffer while its socket is idle. When data arrives the kernel takes the next buffer of the
ring, fills it, and names it in the completion. We copy the bytes out at once and recycle the buffer, so that a slow
consumer never holds one. When the ring is empty a receive ends with ENOBUFS; the data stays in the socket, and the
receive is armed again (Linux 5.19).
"""

from __future__ import annotations

import ctypes
import mmap

from seedance.daemon.ring import abi
from seedance.errors import KernelError


class ReceiveBuffers:
    """`count` (a power of two, at most 32,768) buffers of `buffer_bytes`, registered with a ring as group `group`."""

    __slots__ = (
        "_address",
        "_group",
        "_mask",
        "_memory",
        "_ring_fd",
        "_ring_memory",
        "_ring_u16",
        "_tail",
        "buffer_bytes",
        "count",
    )

    def __init__(self, ring_fd: int, group: int, count: int, buffer_bytes: int) -> None:
        """Register the buffers; raises KernelError."""
        self.count, self.buffer_bytes = count, buffer_bytes
        self._mask = count - 1
        self._group, self._ring_fd = group, ring_fd
        self._memory = mmap.mmap(-1, count * buffer_bytes)
        self._ring_memory = mmap.mmap(-1, count * abi.PBUF_BYTES)
        self._ring_u16 = memoryview(self._ring_memory).cast("H")
        self._address = _address_of(self._memory)
        self._tail = 0
        registration = ctypes.create_string_buffer(
            abi.PBUF_REG.pack(_address_of(self._ring_memory), count, group, 0, 0, 0, 0)
        )
        try:
            abi.register(ring_fd, abi.REGISTER_PBUF_RING, registration, 1)
        except OSError as exc:
            raise KernelError("register receive buffers with io_uring", exc.errno or 0) from exc
        for index in range(count):
            self.recycle(index)
        self.publish()

    def take(self, index: int, length: int) -> bytes:
        """Copy out what the kernel put into buffer `index`, and recycle it."""
        at = index * self.buffer_bytes
        data = self._memory[at : at + length]
        self.recycle(index)
        return data

    def recycle(self, index: int) -> None:
        """Put a buffer back; the kernel sees it after `publish`."""
        abi.PBUF.pack_into(
            self._ring_memory,
            (self._tail & self._mask) * abi.PBUF_BYTES,
            self._address + index * self.buffer_bytes,
            self.buffer_bytes,
            index,
        )
        self._tail += 1

    def publish(self) -> None:
        """Show all recycled buffers to the kernel; it looks only inside an enter of this thread."""
        self._ring_u16[abi.PBUF_TAIL // 2] = self._tail & 0xFFFF

    def close(self) -> None:
        """Unregister and unmap; nothing may be receiving any more."""
        registration = ctypes.create_string_buffer(abi.PBUF_REG.pack(0, 0, self._group, 0, 0, 0, 0))
        abi.register(self._ring_fd, abi.UNREGISTER_PBUF_RING, registration, 1)
        self._ring_u16.release()
        self._ring_memory.close()
        self._memory.close()


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
