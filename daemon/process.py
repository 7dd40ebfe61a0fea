"""What every child process does about itself: its name, its death with its parent, its inherited descriptors."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_NAME_BYTES: Final = 15
# `starttime` is field 22; the split begins at field 3.
_START_TICKS: Final = 19

_libc = ctypes.CDLL(None, use_errno=True)


def set_name(name: str) -> None:
    """Give this process the name that `ps -o comm` and `top` show; the kernel keeps 15 bytes of it."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:_NAME_BYTES], 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    A parent that has ended already is noticed by the link to it, which reads as closed.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that their end is seen here."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def close_all_but(kept: Iterable[int]) -> None:
    """Close every descriptor from 3 upwards that is not in `kept`."""
    low = 3
    for fd in sorted(kept):
        if fd >= low:
            os.closerange(low, fd)
            low = fd + 1
    os.closerange(low, 1 << 30)


def age_s() -> float:
    """Return how long this process has been running, the start of the interpreter included (proc(5), `stat`)."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        ticks = int(file.read().rpartition(")")[2].split()[_START_TICKS])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
