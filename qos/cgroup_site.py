"""Where our part of the cgroup v2 tree is: a group that a service manager lets us divide, or one of our own making."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

PROCESSES: Final = "cgroup.procs"
# Those that systemd has by itself (systemd.special(7)): what is in them is anybody's.
_SHARED_SLICES: Final = ("system.slice", "user.slice", "machine.slice", "app.slice", "session.slice")


class Mounts(msgspec.Struct, frozen=True):
    """The cgroup v2 mount, with the group that is its root, and the controllers that cgroup v1 has."""

    path: Path | None
    root: str
    v1: frozenset[str]


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Where our part of the tree is.

    mount    the root of cgroup v2.
    top      our part.
    made     it is ours to make and to remove, no service manager's.
    sockets  the group in or below which all our sockets are made.
    origin   the group in which this process is.
    v1       the controllers that cgroup v1 has.
    """

    mount: Path
    top: Path
    made: bool
    sockets: Path
    origin: Path
    v1: frozenset[str] = frozenset()


def parse_mounts(mountinfo: str) -> Mounts:
    """Read /proc/self/mountinfo (proc_pid_mountinfo(5))."""
    path: Path | None = None
    root = "/"
    v1: set[str] = set()
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split()[:3]
        if kind == "cgroup2":
            # A service manager may have mounted our own group once more, as a writable place in what is not.
            place = Path(fields[4].replace("\\040", " "))
            if path is None or path.is_relative_to(place):
                root, path = fields[3], place
        elif kind == "cgroup":
            v1.update(options.split(","))
    return Mounts(path, root, frozenset(v1))


def parse_own_group(text: str) -> str | None:
    """Return our group's path in cgroup v2 of /proc/self/cgroup (cgroups(7)); None without cgroup v2."""
    return next((line.removeprefix("0::") for line in text.splitlines() if line.startswith("0::")), None)


def choose_site(
    mounts: Mounts, own: str | None, wanted: str, name: str, is_ours: Callable[[Path], bool], *, is_root: bool
) -> Site | str:
    """Return where our part of the tree is, or why there is none.

    `wanted` is a group's path that the operator gave, or "". `is_ours` says whether a service manager lets us divide
    a group. The part made for the main process alone ("supervisor") counts as the group above it.
    """
    if mounts.path is None or own is None:
        return "this machine has no cgroup v2 mount"
    mount = mounts.path
    group = mount / (own.removeprefix(mounts.root) if mounts.root != "/" else own).lstrip("/")

    def site(top: Path, *, made: bool) -> Site:
        # A service manager makes sockets of ours in a unit beside our own, if both are in a slice of their own.
        above = top.parent.name
        sockets = top.parent if above.endswith(".slice") and above not in _SHARED_SLICES else top
        return Site(mount=mount, top=top, made=made, sockets=sockets, origin=group, v1=mounts.v1)

    if wanted:
        path = Path(wanted)
        top = path if path.is_relative_to(mount) else mount / wanted.lstrip("/")
        return site(top, made=not is_ours(top))
    for top in (group.parent, group) if group.name == "supervisor" else (group,):
        if is_ours(top):
            return site(top, made=False)
    if not is_root:
        return f"this process may not divide its cgroup '{own}': run it in a unit with Delegate=yes, or as root"
    return site(mount / name, made=True)


def find_site(wanted: str, name: str) -> Site | str:
    """Return where this process's part of the tree is, or why there is none."""
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_text("utf-8"))
    own = parse_own_group(Path("/proc/self/cgroup").read_text("utf-8"))
    return choose_site(mounts, own, wanted, name, is_delegated, is_root=os.geteuid() == 0)


def is_delegated(group: Path) -> bool:
    """Say whether a service manager has left a group to us: systemd marks it (`Delegate=`, systemd.resource-control).

    To a process without privileges, a group that it may write to and shares with nobody counts as left to it too.
    """
    for attribute in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(group, attribute) == b"1":
                return True
    if os.geteuid() == 0:
        return False
    with contextlib.suppress(OSError):
        return os.access(group / PROCESSES, os.W_OK) and (group / PROCESSES).read_text() == f"{os.getpid()}\n"
    return False
