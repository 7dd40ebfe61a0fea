"""Become an ordinary user for good: what every process of the daemon but the supervisor does first of all.

Facts that shape this file (capabilities(7), credentials(7), and what kernels 6.x do):

* capset(2) and prctl(2) are of one thread, so a process with several could be root in one of them: `become` asserts
  that there is one. It is called before any message is read and before any thread is started.
* A change from root to another user empties the permitted set unless PR_SET_KEEPCAPS says otherwise, and the effective
  set in any case; what is kept is put into both again by capset(2). With inheritable and ambient sets empty, and no
  file to gain from under PR_SET_NO_NEW_PRIVS, nothing of it outlives an execve(2).
* A change of user or group makes the process undumpable (`fs.suid_dumpable`) and is left so on purpose: all workers
  are one user, and a dumpable one could be read with ptrace(2) or /proc/PID/mem by another tenant's. A forked child is
  undumpable too; a program that is executed is dumpable again. Of an undumpable process, /proc/PID belongs to root, so
  it cannot open its own `environ`, say; reading `fd`, `stat` and `task` of its own goes on working.
* The same change clears PR_SET_PDEATHSIG: `process.die_with_parent` comes after `become`. And the kernel sends that
  signal in the name of the dying parent, who must be allowed to: a root that has given up CAP_KILL is not.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import grp
import os
import pwd
from collections.abc import Iterable
from typing import Final

import msgspec

from seedance.errors import ConfigError, KernelError

_CAPABILITY_VERSION_3: Final = 0x20080522
_PR_SET_DUMPABLE: Final = 4
_PR_SET_KEEPCAPS: Final = 8
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_WORD_BITS: Final = 32

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)


class Capability(enum.IntEnum):
    """The capabilities that a process of ours may want to keep; numbers of linux/capability.h."""

    NET_BIND_SERVICE = 10
    NET_ADMIN = 12
    NET_RAW = 13


class Account(msgspec.Struct, frozen=True):
    """A user as the kernel knows it; `groups` are the supplementary ones, the primary one included."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def find_account(user: str | int, path: str, key: str = "daemon.user") -> Account:
    """Return the account of a user by name or number; `path` and `key` say where it was written.

    Raises ConfigError when there is none.
    """
    text = str(user)
    try:
        entry = pwd.getpwuid(int(text)) if text.isdecimal() else pwd.getpwnam(text)
    except (KeyError, OverflowError) as exc:
        reason = f"cannot find the user '{user}'; make it, e.g. by `useradd --system {user}`, or name another one"
        raise ConfigError(path, key, reason) from exc
    groups = tuple(sorted(os.getgrouplist(entry.pw_name, entry.pw_gid)))
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def find_group(group: str | int, path: str, key: str = "daemon.group") -> int:
    """Return the number of a group by name or number. Raises ConfigError when there is none."""
    text = str(group)
    try:
        return (grp.getgrgid(int(text)) if text.isdecimal() else grp.getgrnam(text)).gr_gid
    except (KeyError, OverflowError) as exc:
        reason = f"cannot find the group '{group}'; make it, e.g. by `groupadd --system {group}`, or name another one"
        raise ConfigError(path, key, reason) from exc


def become(account: Account, keep: Iterable[Capability] = (), *, with_groups: bool = False) -> frozenset[Capability]:
    """Give this process that user and group, no way back, and no capability but those of `keep` that it has.

    Supplementary groups are dropped, or those of the account taken `with_groups` (a GPU's device files may belong to
    one). Also for a process that is that user already: then it only gives up the rest. Returns what was kept. Raises
    KernelError when the kernel does not allow it; the process is of no use then.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "privileges belong to a thread, and this process has several"
    wanted = frozenset(keep)
    kept = frozenset(capability for capability in wanted if _permitted() >> capability & 1)
    _drop_bounding_set(wanted)
    _prctl(_PR_SET_KEEPCAPS, 1)
    _change_user(account, account.groups if with_groups else ())
    _set_capabilities(sum(1 << capability for capability in kept))
    _prctl(_PR_SET_KEEPCAPS, 0)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)
    return kept


def give_up_capabilities(keep: Iterable[Capability] = ()) -> None:
    """Keep none of an ordinary user's capabilities but those of `keep`; they come from a service manager's unit.

    Raises KernelError.
    """
    permitted = _permitted()
    if permitted:
        _set_capabilities(permitted & sum(1 << capability for capability in keep))
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _change_user(account: Account, groups: tuple[int, ...]) -> None:
    now = os.getresuid(), os.getresgid()
    if now == ((account.uid,) * 3, (account.gid,) * 3):
        return  # without CAP_SETGID even the groups that it has could not be set again
    try:
        os.setgroups(groups)
        os.setresgid(account.gid, account.gid, account.gid)
        os.setresuid(account.uid, account.uid, account.uid)
    except OSError as exc:
        raise KernelError(f"become user '{account.name}'", exc.errno or errno.EPERM) from exc


def _drop_bounding_set(keep: frozenset[Capability]) -> None:
    """Take from the bounding set what may be taken: that needs CAP_SETPCAP, and without it there is less to take."""
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        last = int(file.read())
    for number in range(last + 1):
        if number not in keep and _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            return


def _permitted() -> int:
    data = (_Data * 2)()
    _call("capget", data)
    low, high = data
    return int(low.permitted | high.permitted << _WORD_BITS)


def _set_capabilities(bits: int) -> None:
    """Make these the effective and the permitted capabilities, and none inheritable."""
    data = (_Data * 2)()
    for word in data:
        word.effective = word.permitted = bits & 0xFFFF_FFFF
        bits >>= _WORD_BITS
    _call("capset", data)


def _call(name: str, data: ctypes.Array[_Data]) -> None:
    if getattr(_libc, name)(ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), data) != 0:
        raise KernelError(f"call {name}", ctypes.get_errno())


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise KernelError(f"set prctl option {option}", ctypes.get_errno())
