"""Notice that files of a folder have changed: inotify(7), for an asyncio loop.

Facts that shape this file:

* A file is news when it is complete: closed after writing, renamed into place, linked, or gone. IN_CREATE alone says
  that somebody is about to write; IN_MODIFY comes for each write.
* A watch belongs to an inode, not to a path. A folder that is replaced, or a link that leads elsewhere, is noticed by
  a watch on each folder that a lookup of the path passes through, for the one name that the lookup uses there.
* Adding a watch to an inode that has one gives the same number again, so all watches have the same mask.
* Of a queue that has run over (`fs.inotify.max_queued_events`) only IN_Q_OVERFLOW is left: anything may have changed.

A link on the way to the folder is followed. Of a file that is a link only the link is watched: when the file elsewhere
has changed, a reload must be asked for.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from seedance.errors import KernelError

_log = logging.getLogger(__name__)

_IN_ATTRIB: Final = 0x4
_IN_CLOSE_WRITE: Final = 0x8
_IN_MOVED_FROM: Final = 0x40
_IN_MOVED_TO: Final = 0x80
_IN_CREATE: Final = 0x100
_IN_DELETE: Final = 0x200
_IN_DELETE_SELF: Final = 0x400
_IN_MOVE_SELF: Final = 0x800
_IN_Q_OVERFLOW: Final = 0x4000
_IN_IGNORED: Final = 0x8000
_IN_ONLYDIR: Final = 0x0100_0000
_MASK: Final = (
    _IN_ATTRIB
    | _IN_CLOSE_WRITE
    | _IN_MOVED_FROM
    | _IN_MOVED_TO
    | _IN_CREATE
    | _IN_DELETE
    | _IN_DELETE_SELF
    | _IN_MOVE_SELF
    | _IN_ONLYDIR
)
_FOLDER_GONE: Final = _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_IGNORED
_EVENT: Final = struct.Struct("iIII")  # wd, mask, cookie, length of the name with its padding
_READ_BYTES: Final = 64 << 10
_MAX_LINKS: Final = 40
_MAX_LOOKUPS: Final = 5
_NOT_TO_BE_WATCHED: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP)

_libc = ctypes.CDLL(None, use_errno=True)


class Event(msgspec.Struct, frozen=True):
    """What the kernel says: of which watch, what (IN_…), and of which name in that folder."""

    watch: int
    mask: int
    name: str


class _Watched(msgspec.Struct):
    """A folder with a watch: the names in it that the lookup uses, and whether it is the one whose files count."""

    folder: str
    names: set[str] = msgspec.field(default_factory=set)
    holds_files: bool = False


def read_events(data: bytes) -> Iterator[Event]:
    """Yield the events in what a read of the descriptor returned; the kernel cuts none in two."""
    offset = 0
    while offset < len(data):
        watch, mask, _, length = _EVENT.unpack_from(data, offset)
        offset += _EVENT.size
        yield Event(watch, mask, os.fsdecode(data[offset : offset + length].rstrip(b"\0")))
        offset += length


class Debounce:
    """When to act on what comes in bursts: after `quiet_s` without news, at the latest `longest_s` after the first."""

    def __init__(self, quiet_s: float, longest_s: float) -> None:
        self._quiet_s = quiet_s
        self._longest_s = longest_s
        self._latest_s: float | None = None

    def touched(self, now: float) -> float:
        """Take note of news; returns when to act."""
        if self._latest_s is None:
            self._latest_s = now + self._longest_s
        return min(now + self._quiet_s, self._latest_s)

    def acted(self) -> None:
        """Begin anew: the next news is the first of another burst."""
        self._latest_s = None


def look_up(path: str) -> tuple[list[tuple[str, str]], str]:
    """Return each (folder, name) that a lookup of an absolute path passes through, links followed, and where it ends.

    It ends early at a name that is not there.
    """
    passed: list[tuple[str, str]] = []
    place, links = "/", 0
    names = deque(path.split("/"))
    while names:
        name = names.popleft()
        if name in ("", "."):
            continue
        if name == "..":
            place = os.path.dirname(place)  # what is in `place` is no link
            continue
        folder, place = place, os.path.join(place, name)
        passed.append((folder, name))
        try:
            if not stat.S_ISLNK(os.lstat(place).st_mode):
                continue
            target = os.readlink(place)
        except OSError:
            break
        links += 1
        if links > _MAX_LINKS:  # they lead round in a circle
            break
        place = "/" if target.startswith("/") else folder
        names.extendleft(reversed(target.split("/")))
    return passed, place


class FolderWatch:
    """Calls `changed` when files whose names end in `suffix`, or the folder itself, have changed.

    The folder may be a link, and may come, go and be replaced. `changed` is called in the loop, once for a burst.
    """

    def __init__(
        self,
        path: str,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[], None],
        *,
        suffix: str = "",
        quiet_s: float = 0.05,
        longest_s: float = 0.3,
    ) -> None:
        """Begin to watch. Raises KernelError, e.g. when the user has no watch left (`fs.inotify.max_user_watches`)."""
        self._path = os.path.abspath(path)
        self._loop = loop
        self._changed = changed
        self._suffix = suffix
        self._debounce = Debounce(quiet_s, longest_s)
        self._timer: asyncio.TimerHandle | None = None
        self._watches: dict[int, _Watched] = {}
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise KernelError("watch for changed files", ctypes.get_errno())
        try:
            self._look_up()
        except KernelError:
            self.close()
            raise
        loop.add_reader(self._fd, self._readable)

    def close(self) -> None:
        """Watch no more."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_up(self) -> None:
        """Watch what a lookup of the path passes through now, and nothing else."""
        old = set(self._watches)
        for _ in range(_MAX_LOOKUPS):
            found = look_up(self._path)
            self._watches = self._add_watches(*found)
            old |= self._watches.keys()
            if found == look_up(self._path):
                break  # nothing has moved between the lookup and the watches
        for watch in old - self._watches.keys():
            _libc.inotify_rm_watch(self._fd, watch)  # fails for one that is gone with its folder

    def _add_watches(self, passed: list[tuple[str, str]], place: str) -> dict[int, _Watched]:
        watches: dict[int, _Watched] = {}
        for folder, name in passed:
            watch = self._add(folder)
            if watch is not None:
                watches.setdefault(watch, _Watched(folder)).names.add(name)
        watch = self._add(place)
        if watch is not None:
            watches.setdefault(watch, _Watched(place)).holds_files = True
        return watches

    def _add(self, folder: str) -> int | None:
        """Watch a folder; returns None when it has gone, may not be read or is none."""
        watch: int = _libc.inotify_add_watch(self._fd, os.fsencode(folder), _MASK)
        if watch >= 0:
            return watch
        number = ctypes.get_errno()
        if number not in _NOT_TO_BE_WATCHED:
            raise KernelError(f"watch '{folder}'", number)
        return None

    def _readable(self) -> None:
        moved = news = False
        for event in self._read():
            watched = self._watches.get(event.watch)
            if event.mask & _IN_Q_OVERFLOW:
                moved = True
            elif watched is not None:
                moved |= bool(event.mask & _FOLDER_GONE) or event.name in watched.names
                news |= watched.holds_files and self._is_news(watched.folder, event)
        if moved:
            self._look_up_again()
        if moved or news:
            self._touch()

    def _read(self) -> list[Event]:
        try:
            return list(read_events(os.read(self._fd, _READ_BYTES)))
        except BlockingIOError:
            return []

    def _is_news(self, folder: str, event: Event) -> bool:
        """Say whether an event in the folder means that a file is complete, or gone."""
        is_file = event.name.endswith(self._suffix)
        if is_file and not event.mask & _IN_CREATE:
            return True
        if event.mask & (_IN_MOVED_FROM | _IN_DELETE):
            return is_file
        try:
            status = os.lstat(os.path.join(folder, event.name))
        except OSError:
            return False  # its end is an event of its own
        # A link is complete at once, and one of another name may be part of the way to files. A file that is not empty
        # when it appears was linked there; or its writer was quick, and closes it soon.
        return stat.S_ISLNK(status.st_mode) or (is_file and status.st_size > 0)

    def _look_up_again(self) -> None:
        try:
            self._look_up()
        except KernelError as exc:
            _log.error("%s: changes are not noticed before the next reload, ignoring", exc)

    def _touch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now = self._loop.time()
        self._timer = self._loop.call_at(self._debounce.touched(now), self._act)

    def _act(self) -> None:
        self._timer = None
        self._debounce.acted()
        self._changed()
