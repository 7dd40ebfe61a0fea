"""How long a process may run before the kernel looks for another (sched_getattr(2), since v6.12)."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Final

_SCHED_GETATTR: Final = {"x86_64": 315, "aarch64": 275}
_ATTR: Final = struct.Struct("=IIQiIQQQ")
_RUNTIME: Final = 5


def slices_missing() -> str:
    """Return why a process has no slice of its own here, or an empty text."""
    if platform.machine() not in _SCHED_GETATTR:
        return f"the number of sched_getattr on {platform.machine()} is not known here"
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    return "" if (major, minor) >= (6, 12) else f"kernel {major}.{minor} has one slice for all"


def slice_s(pid: int = 0) -> float:
    """Return the slice of a process, of this one without `pid`."""
    buffer = ctypes.create_string_buffer(_ATTR.size)
    if ctypes.CDLL(None, use_errno=True).syscall(_SCHED_GETATTR[platform.machine()], pid, buffer, _ATTR.size, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return float(_ATTR.unpack(buffer.raw)[_RUNTIME]) / 1e9
