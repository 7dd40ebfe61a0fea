"""A cgroup v2 tree in memory, with the rules of the kernel that the code under test must live with."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from pathlib import Path

from seedance.errors import KernelError
from seedance.qos.cgroup import GroupFolders
from seedance.qos.cgroup_site import Site
from seedance.qos.plan import FILES

MOUNT = Path("/fake/cgroup")
_TEXTS = {"cgroup.procs": "", "cgroup.controllers": "", "cgroup.subtree_control": ""}


class FakeFolders(GroupFolders):
    """Groups with their files' texts and processes. `refuse` is called before each write and may raise KernelError.

    Groups in `stuck` cannot be removed.
    """

    def __init__(self, controllers: Collection[str] = ("cpu", "cpuset", "memory", "pids", "io")) -> None:
        self.texts: dict[Path, dict[str, str]] = {MOUNT: dict(_TEXTS)}
        self.processes: dict[int, Path] = {os.getpid(): MOUNT}
        self.writes: list[tuple[str, str]] = []
        self.stuck: set[Path] = set()
        self.refuse: Callable[[Path, str], None] = lambda path, text: None
        self.texts[MOUNT]["cgroup.controllers"] = " ".join(controllers)

    def add(self, group: Path, *pids: int) -> None:
        """Make a group, put processes into it."""
        self.make(group)
        for pid in pids:
            self.processes[pid] = group

    def end(self, pid: int) -> None:
        """End a process."""
        del self.processes[pid]

    def make(self, path: Path) -> None:
        """See `GroupFolders`."""
        if path in self.texts:
            return
        assert path.is_relative_to(MOUNT)
        self.make(path.parent)
        self.texts[path] = dict(_TEXTS)
        self._controllers_changed(path)

    def _controllers_changed(self, path: Path) -> None:
        """Give a group what its parent hands on, and the files that come with it."""
        handed_on = self.texts[path.parent]["cgroup.subtree_control"].split()
        self.texts[path]["cgroup.controllers"] = " ".join(handed_on)
        for file, text in FILES.items():
            if file.partition(".")[0] in handed_on:
                self.texts[path].setdefault(file, text)
            else:
                self.texts[path].pop(file, None)

    def remove(self, path: Path) -> None:
        """See `GroupFolders`."""
        if path not in self.texts:
            return
        if path in self.stuck or self.below(path) or self._pids(path):
            raise KernelError(f"remove the group '{path}'", errno.EBUSY)
        del self.texts[path]

    def write(self, path: Path, text: str) -> None:
        """See `GroupFolders`."""
        self.refuse(path, text)
        group, file = path.parent, path.name
        if file not in self.texts.get(group, ()):
            raise KernelError(f"write '{text}' to '{path}'", errno.ENOENT)
        if file == "cgroup.procs":
            self._move(group, int(text))
        elif file == "cgroup.subtree_control":
            self._hand_on(group, text)
        else:
            self.writes.append((f"{group.name}/{file}", text))
            self.texts[group][file] = text

    def _move(self, group: Path, pid: int) -> None:
        if pid not in self.processes:
            raise KernelError(f"move {pid}", errno.ESRCH)
        if group != MOUNT and self.texts[group]["cgroup.subtree_control"]:
            raise KernelError(f"move {pid} to '{group}'", errno.EBUSY)
        self.processes[pid] = group

    def _hand_on(self, group: Path, text: str) -> None:
        sign, controller = text[0], text[1:]
        words = self.texts[group]["cgroup.subtree_control"].split()
        if sign == "+":
            if controller not in self.texts[group]["cgroup.controllers"].split():
                raise KernelError(f"hand on {controller}", errno.ENOENT)
            if group != MOUNT and self._pids(group):
                raise KernelError(f"hand on {controller}", errno.EBUSY)
            words.append(controller)
        else:
            if any(controller in self.texts[child]["cgroup.subtree_control"].split() for child in self.below(group)):
                raise KernelError(f"take back {controller}", errno.EBUSY)
            words.remove(controller)
        self.texts[group]["cgroup.subtree_control"] = " ".join(words)
        for child in self.below(group):
            self._controllers_changed(child)

    def _pids(self, group: Path) -> list[int]:
        return sorted(pid for pid, place in self.processes.items() if place == group)

    def read(self, path: Path) -> str:
        """See `GroupFolders`."""
        group, file = path.parent, path.name
        if group not in self.texts:
            return ""
        if file == "cgroup.procs":
            return "\n".join(map(str, self._pids(group)))
        if file == "cgroup.events":
            inside = any(place.is_relative_to(group) for place in self.processes.values())
            return f"populated {int(inside)}\nfrozen 0"
        return self.texts[group].get(file, "")

    def exists(self, path: Path) -> bool:
        """See `GroupFolders`."""
        return path in self.texts or path.name in self.texts.get(path.parent, ())

    def below(self, path: Path) -> list[Path]:
        """See `GroupFolders`."""
        return sorted(group for group in self.texts if group.parent == path and group != path)

    def number(self, path: Path) -> int:
        """See `GroupFolders`."""
        return 1 + sorted(self.texts).index(path) if path in self.texts else 0

    def lock(self, path: Path) -> int:
        """See `GroupFolders`."""
        return os.open("/dev/null", os.O_RDONLY)


def site(name: str = "seedance", *, made: bool = True) -> Site:
    """Return a site in the tree, from whose root this process comes."""
    top = MOUNT / name
    return Site(mount=MOUNT, top=top, made=made, sockets=top, origin=MOUNT if made else top)
