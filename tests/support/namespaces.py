"""Network namespaces for tests as root: made without a name, so that they go with the last socket in them."""

from __future__ import annotations

import ctypes
import os
import subprocess
from types import TracebackType
from typing import Final, Self

_CLONE_NEWNET: Final = 0x40000000
_OWN: Final = "/proc/thread-self/ns/net"
_libc: Final = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)


class Namespace:
    """A network namespace with its loopback up. Within `with`, this thread and what it starts are in it.

    Sockets that are opened in it stay in it, whoever uses them then.
    """

    def __init__(self) -> None:
        outside = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("unshare", _CLONE_NEWNET)
            self._inside = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            _call("setns", outside, _CLONE_NEWNET)
            os.close(outside)
        self._outside: list[int] = []
        self.run("ip", "link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """The namespace as a file, for programs that are told of one."""
        return f"/proc/{os.getpid()}/fd/{self._inside}"

    def __enter__(self) -> Self:
        self._outside.append(os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC))
        _call("setns", self._inside, _CLONE_NEWNET)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outside = self._outside.pop()
        _call("setns", outside, _CLONE_NEWNET)
        os.close(outside)

    def run(self, *command: str) -> str:
        """Run a program in the namespace and return its output. Raises CalledProcessError."""
        with self:
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def close(self) -> None:
        """Let go of it."""
        os.close(self._inside)


def join(one: Namespace, other: Namespace) -> None:
    """Connect two namespaces by a pair of devices: v0 with 10.77.0.1 in the one, v1 with 10.77.0.2 in the other."""
    one.run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", other.path)
    for namespace, device, address in ((one, "v0", "10.77.0.1/24"), (other, "v1", "10.77.0.2/24")):
        namespace.run("ip", "addr", "add", address, "dev", device)
        namespace.run("ip", "link", "set", device, "up")
