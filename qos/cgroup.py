"""Our part of the cgroup v2 tree: the groups, limits and counters in it.

    TOP                 made by a service manager that lets us divide it, or by ourselves
    ├─ supervisor/      the main process
    ├─ gateway/
    ├─ engine/
    └─ tenants/
        └─ acme/        the worker of a tenant, under its limits

Facts of the kernel (Documentation/admin-guide/cgroup-v2.rst) that give it this shape:

* Only a group without processes can hand controllers to the groups below it ("no internal processes"; the root is
  exempt). So the main process leaves TOP first.
* A controller is in a group only if every group above it hands it on, by `cgroup.subtree_control`, and only if it is
  not in use by a cgroup v1 hierarchy.
* A group with processes cannot be removed (EBUSY), and one that hands controllers on takes no process (EBUSY).
* A socket belongs to the group in which its process was when it was made, for good.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from seedance.errors import KernelError
from seedance.qos.cgroup_site import PROCESSES, Site
from seedance.qos.plan import FILES
from seedance.qos.usage import TenantUsage

LIMITS: Final = ("cpu", "cpuset", "memory", "pids")
# Nothing is limited by `io` yet; a service manager's own tools show what it counts.
CONTROLLERS: Final = (*LIMITS, "io")
_PARTS: Final = ("supervisor", "gateway", "engine", "tenants")
_AVAILABLE: Final = "cgroup.controllers"
_HANDED_ON: Final = "cgroup.subtree_control"
_KERNEL_FILES: Final = tuple(f"{word}." for word in ("cgroup", "hugetlb", "misc", "rdma", *CONTROLLERS))
_READ_BYTES: Final = 1 << 14
_HINTS: Final = {
    "cpu.max": "it takes at least 1 ms in 100 ms, 1%",
    "cpuset.cpus": "it takes CPUs that this machine has",
}


class GroupFolders:
    """The folders and files of the tree; every method raises KernelError where it does not say otherwise."""

    def make(self, path: Path) -> None:
        """Make a group, and those above it; well if it is there already."""
        try:
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as exc:
            raise KernelError(f"make the group '{path}'", exc.errno or errno.EIO) from exc

    def remove(self, path: Path) -> None:
        """Remove a group; well if it is gone already."""
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError as exc:
            pids = self.read(path / PROCESSES).split()
            having = f", in which processes {', '.join(pids)} run: end them first" if pids else ""
            raise KernelError(f"remove the group '{path}'{having}", exc.errno or errno.EIO) from exc

    def write(self, path: Path, text: str) -> None:
        """Write a file of a group."""
        try:
            # Else a memory limit below what is in use is a write that waits for the kernel to reclaim it (v6.16).
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                # A line, because an empty text would be no write at all.
                os.write(descriptor, f"{text}\n".encode())
            finally:
                os.close(descriptor)
        except OSError as exc:
            hint = f", {_HINTS[path.name]}" if path.name in _HINTS else ""
            raise KernelError(f"write '{text}' to '{path}'{hint}", exc.errno or errno.EIO) from exc

    def read(self, path: Path) -> str:
        """Return a file's text without its last line's end; "" where there is no such file (any more)."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            pieces = []
            while piece := os.read(descriptor, _READ_BYTES):
                pieces.append(piece)
        except OSError:
            return ""
        finally:
            os.close(descriptor)
        return b"".join(pieces).decode().strip()

    def exists(self, path: Path) -> bool:
        """Say whether there is such a group or file."""
        return path.exists()

    def below(self, path: Path) -> list[Path]:
        """Return the groups right below one, by name; none where there is no such group."""
        try:
            return sorted(entry for entry in path.iterdir() if entry.is_dir())
        except FileNotFoundError:
            return []

    def number(self, path: Path) -> int:
        """Return the number by which BPF programs know a group; 0 where there is no such group."""
        try:
            return path.stat().st_ino
        except FileNotFoundError:
            return 0

    def lock(self, path: Path) -> int:
        """Return a descriptor that holds the group for this process, see `lock_folder`."""
        return lock_folder(path)


def lock_folder(path: Path) -> int:
    """Return a descriptor that holds a folder for this process; the kernel lets go of it when the process ends.

    Folders can be locked as files can, also those of cgroup and BPF file systems. Raises KernelError, EBUSY when
    another process holds it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise KernelError(f"open '{path}'", exc.errno or errno.EIO) from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(descriptor)
        what = f"use '{path}', which another seedanced holds: stop that one, or give this one another [kernel] name"
        raise KernelError(what, errno.EBUSY) from exc
    return descriptor


def group_name(tenant: str) -> str:
    """Return the name of a tenant's group; as systemd does, an underscore goes before what looks like a kernel file."""
    return f"_{tenant}" if tenant.startswith(_KERNEL_FILES) else tenant


class CgroupTree:
    """Our part of the tree, with this process in it, and locked: no second daemon can use it at the same time.

    `off` has a reason for each of LIMITS that the tree cannot keep, `files` the files of limits that there are.
    """

    def __init__(self, site: Site, folders: GroupFolders | None = None) -> None:
        """Make what is missing and move this process in. Raises KernelError."""
        self.site = site
        self.off: dict[str, str] = {}
        self._folders = folders or GroupFolders()
        self._tenants = site.top / "tenants"
        self._handed_on: list[tuple[Path, str]] = []
        if site.made:
            self._folders.make(site.top)
        self._lock = self._folders.lock(site.top)
        try:
            for part in _PARTS:
                self._folders.make(site.top / part)
            self._move_in()
            for controller in CONTROLLERS:
                reason = self._enable(controller)
                if reason and controller in LIMITS:
                    self.off[controller] = reason
        except BaseException:
            os.close(self._lock)
            raise
        self.files = frozenset(file for file in FILES if self._folders.exists(self._tenants / file))

    def _move_in(self) -> None:
        """Leave the top group to its parts; what else is in a unit's group was started for us, and comes along."""
        own = str(os.getpid())
        others = [pid for pid in self._words(self.site.top / PROCESSES) if pid != own]
        if self.site.made and others:
            what = f"divide the group '{self.site.top}', in which processes {', '.join(others)} run: end them first"
            raise KernelError(what, errno.EBUSY)
        for pid in (own, *others):
            try:
                self._folders.write(self.site.top / "supervisor" / PROCESSES, pid)
            except KernelError as exc:
                if exc.errno != errno.ESRCH:
                    raise

    def _enable(self, controller: str) -> str:
        """Have a controller in the tenants' groups; returns why that cannot be, or ""."""
        mount, top = self.site.mount, self.site.top
        if controller not in self._words(mount / _AVAILABLE):
            where = "it is in cgroup v1" if controller in self.site.v1 else "this kernel has none"
            return f"this machine's cgroup v2 has no {controller} controller ({where})"
        above = [path for path in reversed(top.parents) if path.is_relative_to(mount)] if self.site.made else []
        for group in (*above, top, self._tenants):
            if controller in self._words(group / _HANDED_ON):
                continue
            if controller not in self._words(group / _AVAILABLE):
                return f"the group '{group}' has no {controller} controller: its unit needs Delegate={controller}"
            try:
                self._folders.write(group / _HANDED_ON, f"+{controller}")
            except KernelError as exc:
                return str(exc)
            if group in above:
                self._handed_on.append((group, controller))
        return ""

    def make_group(self, tenant: str) -> None:
        """Make the tenant's group. Raises KernelError."""
        self._folders.make(self._group(tenant))

    def remove_group(self, tenant: str) -> None:
        """Remove the tenant's group and those in it. Raises KernelError, such as EBUSY while it has a process."""
        remove_groups(self._group(tenant), self._folders)

    def write_file(self, tenant: str, file: str, text: str) -> None:
        """Write a file of the tenant's group. Raises KernelError."""
        self._folders.write(self._group(tenant) / file, text)

    def tenants(self) -> list[str]:
        """Return the tenants that have a group."""
        return [path.name.removeprefix("_") for path in self._folders.below(self._tenants)]

    def read_group(self, tenant: str) -> dict[str, str]:
        """Return the texts of `files` in the tenant's group; nothing when there is no such group."""
        group = self._group(tenant)
        if not self._folders.exists(group):
            return {}
        return {file: self._folders.read(group / file) for file in FILES if file in self.files}

    def group_id(self, tenant: str) -> int:
        """Return the number by which BPF programs know the tenant's group."""
        return self._folders.number(self._group(tenant))

    def socket_group_ids(self) -> frozenset[int]:
        """Return the numbers of the group in which our sockets are made, and of all below it."""
        return frozenset(map(self._folders.number, _walk(self.site.sockets, self._folders)))

    def is_populated(self, tenant: str) -> bool:
        """Say whether the tenant's group has a process."""
        return self._counters(self._group(tenant) / "cgroup.events").get("populated", 0) == 1

    def usage(self, tenant: str) -> TenantUsage:
        """Return what the tenant's group counts; zeros for what it does not."""
        group = self._group(tenant)
        cpu = self._counters(group / "cpu.stat")
        has_memory, has_pids = "memory.max" in self.files, "pids.max" in self.files
        return TenantUsage(
            cpu_s=cpu.get("usage_usec", 0) / 1e6,
            cpu_throttled=cpu.get("nr_throttled", 0),
            cpu_throttled_s=cpu.get("throttled_usec", 0) / 1e6,
            memory_bytes=self._number(group / "memory.current") if has_memory else 0,
            memory_peak_bytes=self._number(group / "memory.peak") if has_memory else 0,
            oom_kills=self.oom_kills(tenant),
            tasks=self._number(group / "pids.current") if has_pids else len(self._words(group / "cgroup.threads")),
        )

    def oom_kills(self, tenant: str) -> int:
        """Return how many processes in the tenant's group have been killed for want of memory."""
        if "memory.max" not in self.files:
            return 0
        return self._counters(self._group(tenant) / "memory.events").get("oom_kill", 0)

    def place(self, pid: int, group: str) -> None:
        """Put a process into "supervisor", "gateway", "engine" or "tenants/NAME". Raises KernelError."""
        part, _, tenant = group.partition("/")
        path = self._group(tenant) if tenant else self.site.top / part
        self._folders.write(path / PROCESSES, str(pid))

    def remove(self) -> list[str]:
        """Leave the tree and remove what is ours in it; returns the groups removed.

        A service manager's own group stays for it to remove. Raises KernelError when a group still has a process; the
        tree can then be removed later.
        """
        site, folders = self.site, self._folders
        removed = [path for part in reversed(_PARTS[1:]) for path in remove_groups(site.top / part, folders)]
        if site.origin != site.top / "supervisor":
            self._move_out()
            removed += remove_groups(site.top if site.made else site.top / "supervisor", folders)
        for group, controller in reversed(self._handed_on):
            # Somebody else may need it by now, and then the kernel refuses.
            with contextlib.suppress(KernelError):
                folders.write(group / _HANDED_ON, f"-{controller}")
        os.close(self._lock)
        return [str(path) for path in removed]

    def _move_out(self) -> None:
        """Go back to where this process came from, which may be the top group itself, or be gone by now."""
        for controller in self._words(self.site.top / _HANDED_ON):
            self._folders.write(self.site.top / _HANDED_ON, f"-{controller}")
        try:
            self._folders.write(self.site.origin / PROCESSES, str(os.getpid()))
        except KernelError:
            self._folders.write((self.site.mount if self.site.made else self.site.top) / PROCESSES, str(os.getpid()))

    def _group(self, tenant: str) -> Path:
        return self._tenants / group_name(tenant)

    def _words(self, path: Path) -> list[str]:
        return self._folders.read(path).split()

    def _number(self, path: Path) -> int:
        text = self._folders.read(path)
        return int(text) if text.isdecimal() else 0

    def _counters(self, path: Path) -> dict[str, int]:
        """Read lines of a word and a number each."""
        lines = (line.split() for line in self._folders.read(path).splitlines())
        return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}


def _walk(top: Path, folders: GroupFolders) -> Iterator[Path]:
    yield top
    for group in folders.below(top):
        yield from _walk(group, folders)


def remove_groups(top: Path, folders: GroupFolders) -> list[Path]:
    """Remove a group and all below it; returns what was removed. Raises KernelError when one of them has a process."""
    if not folders.exists(top):
        return []
    removed = [path for group in folders.below(top) for path in remove_groups(group, folders)]
    folders.remove(top)
    return [*removed, top]


def remove_tree(top: Path) -> list[str]:
    """Remove what a former run left of a tree that was ours to make; returns the groups removed. Raises KernelError."""
    folders = GroupFolders()
    if not folders.exists(top):
        return []
    lock = folders.lock(top)
    try:
        return [str(path) for path in remove_groups(top, folders)]
    finally:
        os.close(lock)
