"""Files that are replaced: whole or not at all, whatever becomes of the disk or of this process."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def replace_file(path: Path, text: str | bytes) -> None:
    """Put a file in the place of another; owner and permissions stay. Raises OSError, which names `path`.

    A new one can be read by its owner alone. Nothing is left behind when it fails.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write(new, path, text.encode() if isinstance(text, str) else text)
        new.replace(path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            new.unlink()
        raise OSError(exc.errno, exc.strerror, str(path)) from exc


def _write(new: Path, path: Path, data: bytes) -> None:
    # What a process of the same number has left there when it was killed is none of anybody's.
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        if path.exists():
            old = path.stat()
            os.fchmod(fd, stat.S_IMODE(old.st_mode))
            if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(fd, old.st_uid, old.st_gid)
        file.flush()
        os.fsync(fd)
