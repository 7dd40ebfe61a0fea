"""A log in shared memory that outlives who writes it: the bytes of a `journal`, whatever they say.

    0        4096          4096 + HALF_BYTES
    | header | one half    | the other half |

The file is a memfd that the supervisor makes and keeps, so that it is there after a worker was killed, and after a
restart if the service manager keeps it. Only one process has it mapped. Entries are appended to one half until it is
full; then what is still true is written to the other one, which counts from the moment that its own header is there.

    half   generation u64 · checksum u32 | entry | entry | … | zeros
    entry  length u32 · checksum u32 · that many bytes · zeros up to the next multiple of 8

An entry is written before its length, into zeros, and counts when its checksum is right: a writer may be killed at any
instruction, and a reader then finds all entries before that one. Of two halves the one of the later generation counts.
What is not used takes no memory: a half that has no more use is given back to the kernel.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Iterable
from typing import Final

from seedance.errors import EngineError

HALF_BYTES: Final = 32 << 20
_PAGE: Final = 4096
LOG_BYTES: Final = _PAGE + 2 * HALF_BYTES

_MAGIC: Final = 0x31_6C_61_6E_72_75_6F_6A  # "journal1": another format gets another number
_MAGIC_AT: Final = 0
_COUNT_AT: Final = 8
_WORD: Final = struct.Struct("=Q")
_HALF: Final = struct.Struct("=QI")
_HALF_HEADER: Final = 64
_ENTRY: Final = struct.Struct("=II")
_LEAST_BYTES: Final = 64 << 10
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create(name: str) -> int:
    """Return the descriptor of a new log, which is the caller's. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, LOG_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        os.pwrite(fd, _WORD.pack(_MAGIC), _MAGIC_AT)
    except OSError:
        os.close(fd)
        raise
    return fd


def count(fd: int) -> int:
    """Return the number that the writer last left with `SharedLog.set_count`; 0 of what is no log."""
    try:
        if os.fstat(fd).st_size != LOG_BYTES or _WORD.unpack(os.pread(fd, 8, _MAGIC_AT)) != (_MAGIC,):
            return 0
        return int(_WORD.unpack(os.pread(fd, 8, _COUNT_AT))[0])
    except OSError:
        return 0


class SharedLog:
    """The log, mapped for its only writer; owns its descriptor."""

    def __init__(self, fd: int, half_bytes: int = HALF_BYTES) -> None:
        """Map it; a half is full at `half_bytes`. Raises EngineError when it is none; the descriptor is closed then."""
        self._fd = fd
        if os.fstat(fd).st_size != LOG_BYTES:
            os.close(fd)
            raise EngineError("internal", f"cannot use the journal: it must have {LOG_BYTES} bytes")
        self._map = mmap.mmap(fd, LOG_BYTES)
        if _WORD.unpack_from(self._map, _MAGIC_AT) != (_MAGIC,):
            self.close()
            raise EngineError("internal", "cannot use the journal: it was made by another version of seedance")
        self._room_bytes = 0
        self.set_room(half_bytes)
        self._generation, self._half = self._newest()
        self._at = self._start(self._half)

    def set_room(self, half_bytes: int) -> None:
        """Have a half be full at so many bytes from now on."""
        self._room_bytes = max(_LEAST_BYTES, min(half_bytes, HALF_BYTES))

    @property
    def used_bytes(self) -> int:
        """Return how many bytes of the half in use are written."""
        return self._at - self._start(self._half)

    def read(self) -> list[bytes]:
        """Return all entries, in order; `append` goes on behind the last that is whole."""
        found: list[bytes] = []
        at = self._start(self._half)
        end = _PAGE + (self._half + 1) * HALF_BYTES
        while self._generation and at + _ENTRY.size <= end:
            length, checksum = _ENTRY.unpack_from(self._map, at)
            data = self._map[at + _ENTRY.size : min(at + _ENTRY.size + length, end)]
            if not length or len(data) != length or zlib.crc32(data) != checksum:
                break
            found.append(data)
            at = _next(at + _ENTRY.size + length)
        self._at = at
        return found

    def append(self, data: bytes) -> bool:
        """Append an entry, which is not empty; False when it has no room: `replace` makes some."""
        begin = self._at + _ENTRY.size
        end = begin + len(data)
        if not self._generation or end > self._start(self._half) + self._room_bytes - _HALF_HEADER:
            return False
        self._map[begin:end] = data
        _ENTRY.pack_into(self._map, self._at, len(data), zlib.crc32(data))
        self._at = _next(end)
        return True

    def replace(self, entries: Iterable[bytes]) -> bool:
        """Have these entries in the place of all; False when they have no room, and all is as before."""
        before = self._generation, self._half, self._at
        self._half = 1 - self._half
        self._generation += 1
        self._clear(self._half)
        self._at = self._start(self._half)
        if not all(map(self.append, entries)):
            self._clear(self._half)
            self._generation, self._half, self._at = before
            return False
        packed = _WORD.pack(self._generation)
        _HALF.pack_into(self._map, _PAGE + self._half * HALF_BYTES, self._generation, zlib.crc32(packed))
        self._clear(1 - self._half)
        return True

    def clear(self) -> None:
        """Have nothing in it any more."""
        for half in (0, 1):
            self._clear(half)
        self._generation = 0

    def set_count(self, number: int) -> None:
        """Leave a number for who keeps the log."""
        _WORD.pack_into(self._map, _COUNT_AT, number)

    def close(self) -> None:
        """Write no more; what is in it stays. Idempotent."""
        if self._fd >= 0:
            self._map.close()
            os.close(self._fd)
            self._fd = -1

    def _newest(self) -> tuple[int, int]:
        """Return the generation and the half that count; generation 0 when neither does."""
        newest = 0, 0
        for half in (0, 1):
            generation, checksum = _HALF.unpack_from(self._map, _PAGE + half * HALF_BYTES)
            if checksum == zlib.crc32(_WORD.pack(generation)):
                newest = max(newest, (generation, half))
        return newest

    @staticmethod
    def _start(half: int) -> int:
        return _PAGE + half * HALF_BYTES + _HALF_HEADER

    def _clear(self, half: int) -> None:
        # Gives the pages back, and they read as zeros from now on (madvise(2): shared memory can).
        self._map.madvise(mmap.MADV_REMOVE, _PAGE + half * HALF_BYTES, HALF_BYTES)


def _next(at: int) -> int:
    return (at + 7) & ~7
