"""A stand-in for MPS's control daemon: what listens where CUDA looks for it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def control_daemon(directory: Path, kind: int = socket.SOCK_SEQPACKET) -> Iterator[socket.socket]:
    """Listen in `directory`, which is made; afterwards the socket's file stays, as after a crash."""
    directory.mkdir(exist_ok=True)
    path = directory / "control"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(str(path))
        listener.listen(1)
        yield listener
