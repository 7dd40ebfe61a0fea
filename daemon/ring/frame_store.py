"""Frames that are made once and sent to many: they lie still in memory, and the kernel takes them from there."""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Container, Iterable, Iterator
from itertools import compress
from typing import Final, NamedTuple

CHUNK_BYTES: Final = 256 << 10


class FrameStore:
    """Memory that only grows, and stays where it is for as long as anybody holds the store."""

    __slots__ = ("_address", "_chunks", "_room")

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        self._address = 0
        self._room = 0

    def add(self, frame: bytes) -> int:
        """Keep a frame; return its address."""
        if not self._chunks or len(frame) > self._room:
            self._chunks.append(mmap.mmap(-1, max(CHUNK_BYTES, len(frame))))
            self._room = len(self._chunks[-1])
            anchor = ctypes.c_char.from_buffer(self._chunks[-1])
            self._address = ctypes.addressof(anchor)
        chunk, address = self._chunks[-1], self._address
        at = len(chunk) - self._room
        chunk[at : at + len(frame)] = frame
        self._address += len(frame)
        self._room -= len(frame)
        return address


class StoredFrames(NamedTuple):
    """Frames that lie still in memory, for a list of flows; whoever has these holds the memory by `store`.

    `addresses` is a memoryview of unsigned longs, `lengths` one of unsigned ints: what numpy calls uint64 and uint32.
    """

    addresses: memoryview
    lengths: memoryview
    store: object

    def to(self, fds: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Iterate over descriptors, each with its frame."""
        return zip(fds, map(ctypes.string_at, self.addresses, self.lengths), strict=True)

    def without(self, fds: memoryview, some: Container[int]) -> tuple[memoryview, StoredFrames]:
        """Return what is left without some of the descriptors."""
        stays = [fd not in some for fd in fds]
        left = (
            memoryview(array.array(kind, compress(column, stays)))
            for kind, column in (("I", fds), ("L", self.addresses), ("I", self.lengths))
        )
        fds, addresses, lengths = left
        return fds, StoredFrames(addresses, lengths, self.store)
