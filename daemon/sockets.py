"""The sockets that the supervisor owns: where clients connect, and the lock that keeps two daemons apart.

The supervisor makes the listening sockets and gives copies to the gateway: they outlive it, so that while a gateway is
started again clients wait in the backlog and are not refused. What is set on a listening socket here is inherited by
every connection accepted from it, at no cost per connection.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Sequence
from typing import Final

from seedance.daemon.config import Address, ListenConfig
from seedance.engine.packets import MAX_DESCRIPTORS
from seedance.errors import KernelError

_log = logging.getLogger(__name__)

BACKLOG: Final = 4096
SEND_BUFFER_BYTES: Final = 64 << 10
"""Small: what the kernel holds for a client that reads slowly is stale tokens, and memory that no quota sees.

Not smaller: a segment of loopback has 64 KiB, and a smaller buffer waits for a delayed acknowledgement at each.
"""

_NO_IPV6: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def listen_tcp(address: Address) -> socket.socket:
    """Return a listening TCP socket. Raises KernelError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as exc:
        raise _cannot_listen(str(address), exc) from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address.host, address.port))
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise _cannot_listen(str(address), exc) from exc
    return sock


def listen_unix(path: str, mode: int) -> socket.socket:
    """Return a listening Unix stream socket at `path`, with these permissions. Raises KernelError.

    A socket file that nobody listens on any more is replaced; any other file is left alone.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        _remove_stale(path)
        old_mask = os.umask(0o777 & ~mode)
        try:
            sock.bind(path)
        finally:
            os.umask(old_mask)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise _cannot_listen(path, exc) from exc
    return sock


def _remove_stale(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return  # bind says that the address is in use
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def _cannot_listen(where: str, exc: OSError) -> KernelError:
    return KernelError(f"listen on {where}", exc.errno or errno.EINVAL)


def listen_hint(error: KernelError) -> str:
    """Return what may help against an error of `listen_tcp` or `listen_unix`, "" where nothing is known to."""
    if error.errno == errno.EADDRINUSE:
        return "; another program listens there: stop it, or choose another address in [listen]"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "; this user may not: ports below 1024 need CAP_NET_BIND_SERVICE, and a Unix socket a folder to write in"
    if error.errno in _NO_IPV6:
        return "; this machine has no such address: choose another one in [listen]"
    return ""


class Listeners:
    """All sockets that clients connect to, with the name of each: its address as text."""

    def __init__(self, config: ListenConfig) -> None:
        """Open them. Raises KernelError when one cannot be had, or when there are more than a packet can carry.

        An IPv6 address is left out, with a line in the log, where the machine has no IPv6 and there is another one.
        """
        self.sockets: list[socket.socket] = []
        self.names: list[str] = []
        self._unix = config.unix
        if len(config.tcp) >= MAX_DESCRIPTORS:
            raise KernelError(f"listen on more than {MAX_DESCRIPTORS - 1} addresses", errno.E2BIG)
        try:
            self._open(config)
        except KernelError:
            self.close()
            raise

    def _open(self, config: ListenConfig) -> None:
        for position, address in enumerate(config.tcp):
            try:
                sock = listen_tcp(address)
            except KernelError as exc:
                others = self.sockets or config.tcp[position + 1 :] or config.unix
                if exc.errno not in _NO_IPV6 or ":" not in address.host or not others:
                    raise
                _log.warning("%s, ignoring", exc)
                continue
            self.sockets.append(sock)
            self.names.append(str(Address(*sock.getsockname()[:2])))
        if config.unix is not None:
            self.sockets.append(listen_unix(config.unix, 0o666))
            self.names.append(f"unix:{config.unix}")

    def close(self) -> None:
        """Close them and remove the socket file."""
        for sock in self.sockets:
            if sock.family == socket.AF_UNIX and self._unix is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self._unix)
            sock.close()
        self.sockets.clear()


def lock(path: str) -> int:
    """Take the lock that one running daemon holds; returns a descriptor to keep open. Raises KernelError."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise KernelError(f"open '{path}'", exc.errno or errno.EINVAL) from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(fd)
        raise KernelError(f"lock '{path}'", exc.errno or errno.EINVAL) from exc
    return fd


def first_tcp(names: Sequence[str]) -> str | None:
    """Return the first TCP address among listeners' names, as one that can be connected to from this machine."""
    for name in names:
        host, _, port = name.rpartition(":")
        if not name.startswith("unix:"):
            return f"{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"
    return None
