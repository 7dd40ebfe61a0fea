"""The folder of a BPF file system in which our maps and links are pinned, so that they outlive the daemon."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from seedance.errors import KernelError
from seedance.qos.cgroup import lock_folder

_MOUNT_POINT, _KIND = 4, 0


def parse_mount_kind(mountinfo: str, path: Path) -> str:
    """Return the kind of file system on which a path is, by /proc/self/mountinfo; the last mount on a place counts."""
    best, kind = Path("/"), ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        place = Path(before.split()[_MOUNT_POINT].replace("\\040", " "))
        if path.is_relative_to(place) and place.is_relative_to(best):
            best, kind = place, after.split()[_KIND]
    return kind


def _check_mounted(bpffs: Path) -> None:
    if parse_mount_kind(Path("/proc/self/mountinfo").read_text("utf-8"), bpffs) != "bpf":
        what = f"pin anything below '{bpffs}', which is no BPF file system: `mount -t bpf bpf {bpffs}` makes it one"
        raise KernelError(what, errno.ENOTSUP)


class PinFolder:
    """Our folder, locked: no second daemon can use it at the same time."""

    def __init__(self, bpffs: Path, name: str) -> None:
        """Make the folder if it is not there. Raises KernelError, EBUSY when another daemon holds it."""
        self.path: Final = bpffs / name
        _check_mounted(bpffs)
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
        except OSError as exc:
            raise KernelError(f"make the folder '{self.path}'", exc.errno or errno.EIO) from exc
        self._lock = lock_folder(self.path)

    def names(self) -> list[str]:
        """Return the names of what is pinned."""
        return sorted(entry.name for entry in self.path.iterdir())

    def unpin(self, name: str) -> None:
        """Remove one name; what it named goes when nothing else holds it. Well if there is no such name."""
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as exc:
            raise KernelError(f"remove '{self.path / name}'", exc.errno or errno.EIO) from exc

    def close(self) -> None:
        """Let another daemon have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> list[str]:
        """Remove all names and the folder; returns what was removed. Raises KernelError."""
        removed = [str(self.path / name) for name in self.names()]
        for name in self.names():
            self.unpin(name)
        try:
            self.path.rmdir()
        except OSError as exc:
            # A service manager may have mounted it by itself, as a writable place in what is not, and removes it then.
            if exc.errno not in (errno.EBUSY, errno.EROFS):
                raise KernelError(f"remove the folder '{self.path}'", exc.errno or errno.EIO) from exc
        self.close()
        return removed
