"""What every child process does about itself: its name, its death with its parent, its inherited descriptors."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from seedance.daemon.logs import start_logging
from seedance.daemon.privileges import Capability, become, find_account, give_up_capabilities

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_NAME_BYTES: Final = 15
# `starttime` is field 22; the split begins at field 3.
_START_TICKS: Final = 19


LINK_FD: Final = 3
"""Where a spawned child finds its link to the supervisor."""
SERVING_SLICE_S: Final = 100e-6
"""Of who serves everybody: the gateway and the engine host. It is the shortest that the kernel gives."""

WORKER_SLICE_S: Final = 300e-6

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR: Final = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_RESET_ON_FORK: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)


class Start(msgspec.Struct, frozen=True):
    """What the supervisor tells a child on its command line: the log level, and the user to become, "" for none."""

    log_level: str
    user: str = ""

    def arguments(self) -> list[str]:
        """Return it as a command line has it."""
        return [self.log_level, self.user]


def begin(name: str, arguments: Sequence[str], keep: Iterable[Capability] = (), *, with_groups: bool = False) -> Start:
    """Become a child of the daemon: its user, its name `seed-NAME`, its log; and die with the parent.

    `keep` and `with_groups` are `privileges.become`'s. Raises KernelError, ConfigError when there is no such user.
    """
    start = Start(*arguments)
    start_logging(name, start.log_level)
    if os.geteuid() != 0:
        give_up_capabilities(keep)
    elif start.user:
        account = find_account(start.user, "the command line")
        become(account, keep, with_groups=with_groups)
        os.environ |= {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}
    die_with_parent()  # a change of user undoes it
    set_name(f"seed-{name}")
    return start


def set_name(name: str) -> None:
    """Give this process the name that `ps -o comm` and `top` show; the kernel keeps 15 bytes of it."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:_NAME_BYTES], 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    A parent that has ended already is noticed by the link to it, which reads as closed. Comes after
    `privileges.become`: a change of user or group clears it, and a parent that is another user needs CAP_KILL for it.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def shorten_slice(slice_s: float) -> None:
    """Ask the kernel to let this process in sooner when it wakes: for a shorter slice, and no more time in all.

    It then need not wait until whoever runs has used up a slice of the usual length. Children begin with the usual
    one. The kernel takes it since v6.12, and older ones take no notice (sched_setattr(2), `sched_runtime`).
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None and os.sched_getscheduler(0) == os.SCHED_OTHER:  # else an administrator knows better
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        values = (_SCHED_ATTR.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, round(slice_s * 1e9), 0, 0)
        _libc.syscall(number, 0, _SCHED_ATTR.pack(*values), 0)


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
