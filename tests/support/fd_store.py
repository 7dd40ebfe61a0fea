"""What a service manager keeps for a service: its listening socket, and descriptors that it was sent (sd_notify(3))."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

_FIRST_COPY = 200


class FdStore:
    """The store of one service, with a listening socket of its own; it listens to the service at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fds: dict[str, int] = {}
        self.ready = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._notifications = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notifications.bind(str(path))
        self._thread = threading.Thread(target=self._listen, name="fd store")
        self._thread.start()

    def _listen(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._notifications, 4096, 4)
            fields = dict(line.partition("=")[::2] for line in data.decode().splitlines())
            if "READY" in fields:
                self.ready.set()
            if "FDSTORE" in fields:
                self._discard(fields["FDNAME"])
                (self.fds[fields["FDNAME"]],) = fds
            elif "FDSTOREREMOVE" in fields:
                self._discard(fields["FDNAME"])
            elif "TESTEND" in fields:
                return

    def _discard(self, name: str) -> None:
        if name in self.fds:
            os.close(self.fds.pop(name))

    @contextlib.contextmanager
    def handed(self, command: list[str]) -> Iterator[tuple[list[str], list[int]]]:
        """Yield the command that hands all over to another one, and what it has to inherit; sockets come first."""
        names = ["seedanced.socket", *self.fds]
        given = [self._listener.fileno(), *self.fds.values()]
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_COPY) for fd in given]
        moves = " ".join(f"{place}<&{copy} {copy}<&-" for place, copy in enumerate(copies, 3))
        # The shell's pid is that of what it becomes, as it is between a manager's fork and its exec.
        code = f'exec {moves}; LISTEN_PID=$$ LISTEN_FDS={len(names)} LISTEN_FDNAMES={":".join(names)} exec "$@"'
        try:
            yield ["bash", "-c", code, "-", *command], copies
        finally:
            for copy in copies:
                os.close(copy)

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"TESTEND=1\n", str(self.path))
        self._thread.join()
        self._notifications.close()
        self._listener.close()
        for name in list(self.fds):
            self._discard(name)
