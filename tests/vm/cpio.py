"""Write an initramfs: a cpio archive in the "newc" format (Linux, Documentation/driver-api/early-userspace)."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import BinaryIO, Final

_ALIGNMENT: Final = 4
_TRAILER: Final = "TRAILER!!!"


class InitramfsWriter:
    """An archive being written; parent directories are made as needed, each path goes in once."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._seen: set[PurePosixPath] = {PurePosixPath("/")}

    def __enter__(self) -> InitramfsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._header(_TRAILER, 0, 0, 0)
        self._file.close()

    def directory(self, where: str | PurePosixPath) -> None:
        """Add an empty directory."""
        path = PurePosixPath(where)
        if self._is_new(path):
            self._header(_name(path), stat.S_IFDIR | 0o755, 0, 0)

    def link(self, where: str | PurePosixPath, target: str) -> None:
        """Add a symbolic link."""
        path = PurePosixPath(where)
        if self._is_new(path):
            data = target.encode()
            self._header(_name(path), stat.S_IFLNK | 0o777, 0, len(data))
            self._file.write(data)
            self._pad(len(data))

    def device(self, where: str | PurePosixPath, major: int, minor: int) -> None:
        """Add a character device."""
        path = PurePosixPath(where)
        if self._is_new(path):
            self._header(_name(path), stat.S_IFCHR | 0o666, 0, 0, (major, minor))

    def data(self, where: str | PurePosixPath, content: bytes, mode: int = 0o644) -> None:
        """Add a file with this content."""
        path = PurePosixPath(where)
        if self._is_new(path):
            self._header(_name(path), stat.S_IFREG | mode, 0, len(content))
            self._file.write(content)
            self._pad(len(content))

    def file(self, where: str | PurePosixPath, source: Path) -> None:
        """Add a copy of a file, links followed; its time goes along, since compiled modules are matched by it."""
        path = PurePosixPath(where)
        if self._is_new(path):
            with source.open("rb") as opened:
                info = os.fstat(opened.fileno())
                mode = stat.S_IFREG | stat.S_IMODE(info.st_mode)
                self._header(_name(path), mode, int(info.st_mtime), info.st_size)
                shutil.copyfileobj(opened, self._file)
            self._pad(info.st_size)

    def tree(self, where: str | PurePosixPath, source: Path, leave_out: frozenset[str] = frozenset()) -> None:
        """Add a directory with all below it, links kept as links; entries of a name in `leave_out` stay behind."""
        root = PurePosixPath(where)
        self.directory(root)
        for entry in sorted(source.iterdir()):
            if entry.name in leave_out:
                continue
            if entry.is_symlink():
                self.link(root / entry.name, str(entry.readlink()))
            elif entry.is_dir():
                self.tree(root / entry.name, entry, leave_out)
            elif entry.is_file():
                self.file(root / entry.name, entry)

    def _is_new(self, path: PurePosixPath) -> bool:
        if path in self._seen:
            return False
        self.directory(path.parent)
        self._seen.add(path)
        return True

    def _header(self, name: str, mode: int, mtime: int, size: int, device: tuple[int, int] = (0, 0)) -> None:
        encoded = name.encode() + b"\0"
        inode, owner, group, links, checksum = len(self._seen), 0, 0, 1, 0
        fields = (inode, mode, owner, group, links, mtime, size, 0, 0, *device, len(encoded), checksum)
        head = b"070701" + b"".join(b"%08X" % field for field in fields)
        self._file.write(head + encoded)
        self._pad(len(head) + len(encoded))

    def _pad(self, written: int) -> None:
        self._file.write(bytes(-written % _ALIGNMENT))


def _name(path: PurePosixPath) -> str:
    return str(path).lstrip("/")
