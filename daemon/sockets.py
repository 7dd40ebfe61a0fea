"""The sockets that the supervisor owns: where clients connect, and the lock that keeps two daemons apart.

The supervisor makes the listening sockets, or takes those that the service manager holds for it (`activation`), and
gives copies to the gateway: they outlive it, so that while a gateway is started again clients wait in the backlog and
are not refused. `network` puts the settings on them that connections inherit.
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

from seedance.daemon import network
from seedance.daemon.config import Address, ListenConfig
from seedance.daemon.network import ListenerStatus
from seedance.daemon.network_settings import NetworkSettings
from seedance.engine.packets import MAX_DESCRIPTORS
from seedance.errors import KernelError

_log = logging.getLogger(__name__)

_DEFAULTS: Final = NetworkSettings()
_NO_IPV6: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def listen_tcp(address: Address, settings: NetworkSettings = _DEFAULTS) -> socket.socket:
    """Return a listening TCP socket, with those of the settings that this kernel takes. Raises KernelError."""
    return _open_tcp(address, settings)[0]


def _open_tcp(address: Address, settings: NetworkSettings) -> tuple[socket.socket, dict[str, str]]:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as exc:
        raise _cannot_listen(str(address), exc) from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        off = network.apply(sock, settings)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address.host, address.port))
        sock.listen(settings.backlog)
    except OSError as exc:
        sock.close()
        raise _cannot_listen(str(address), exc) from exc
    return sock, off


def listen_unix(path: str, mode: int, backlog: int = _DEFAULTS.backlog) -> socket.socket:
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
        sock.listen(backlog)
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

    def __init__(self, config: ListenConfig, inherited: Sequence[socket.socket] = ()) -> None:
        """Open them, or take the inherited ones instead, which are closed with the others.

        Raises KernelError when one cannot be had, or when there are more than a packet can carry. An IPv6 address is
        left out, with a line in the log, where the machine has no IPv6 and there is another one.
        """
        self.sockets: list[socket.socket] = []
        self.names: list[str] = []
        self._config = config
        self._made = ""  # the socket file to remove
        self._off: list[dict[str, str]] = []
        if max(len(config.tcp), len(inherited)) >= MAX_DESCRIPTORS:
            raise KernelError(f"listen on more than {MAX_DESCRIPTORS - 1} addresses", errno.E2BIG)
        try:
            if inherited:
                self._take(inherited)
            else:
                self._open()
        except KernelError:
            self.close()
            raise
        self._log_settings()

    def _take(self, inherited: Sequence[socket.socket]) -> None:
        self.sockets += inherited
        self._off += [{} for _ in inherited]
        for position, sock in enumerate(inherited):
            name = name_of(sock)
            self.names.append(name)
            settings = self._config.settings_at(name)
            if sock.family != socket.AF_UNIX:
                self._off[position] = network.apply(sock, settings)
            try:
                sock.listen(settings.backlog)  # of one that listens, that changes the backlog alone
            except OSError as exc:
                raise _cannot_listen(name, exc) from exc
        _log.info("listening on what the service manager has opened: %s", ", ".join(self.names))

    def _open(self) -> None:
        tcp, unix = self._config.tcp, self._config.unix
        for position, address in enumerate(tcp):
            settings = self._config.settings_at(str(address))
            try:
                sock, off = _open_tcp(address, settings)
            except KernelError as exc:
                others = self.sockets or tcp[position + 1 :] or unix
                if exc.errno not in _NO_IPV6 or ":" not in address.host or not others:
                    raise
                _log.warning("%s, ignoring", exc)
                continue
            self.sockets.append(sock)
            self.names.append(name_of(sock))
            self._off.append(off)
        if unix is not None:
            self.sockets.append(listen_unix(unix, 0o666, self._config.backlog))
            self.names.append(name_of(self.sockets[-1]))
            self._off.append({})
            self._made = unix

    def _log_settings(self) -> None:
        """Say once what the kernel does not take, for all listeners together, and where settings are for nobody."""
        places: dict[tuple[str, str], list[str]] = {}
        for name, off in zip(self.names, self._off, strict=True):
            for key, reason in off.items():
                places.setdefault((key, reason), []).append(name)
        for (key, reason), names in places.items():
            _log.warning("cannot set '%s' on %s: %s, ignoring", key, ", ".join(names), reason)
        for address in self._config.at.keys() - {str(tcp) for tcp in self._config.tcp} - set(self.names):
            _log.warning('cannot use [listen.at."%s"]: nothing listens there, ignoring', address)

    def settings(self) -> list[ListenerStatus]:
        """Return the network settings that are in force at each listener, read back from the kernel."""
        most = network.most_backlog()
        unix = {"backlog": str(min(self._config.backlog, most))}
        return [
            ListenerStatus(name=name, settings=network.in_force(sock) or unix, off=off)
            for name, sock, off in zip(self.names, self.sockets, self._off, strict=True)
        ]

    @property
    def ports(self) -> set[int]:
        """The TCP ports among them."""
        return {sock.getsockname()[1] for sock in self.sockets if sock.family != socket.AF_UNIX}

    def close(self) -> None:
        """Close them and remove the socket file, unless it is the service manager's."""
        if self._made:
            with contextlib.suppress(OSError):
                os.unlink(self._made)
            self._made = ""
        for sock in self.sockets:
            sock.close()
        self.sockets.clear()


def name_of(sock: socket.socket) -> str:
    """Return where a socket listens: "host:port", or "unix:" and a path, with "@" for the abstract namespace."""
    address = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return "unix:" + os.fsdecode(address).replace("\0", "@", 1)
    return str(Address(*address[:2]))


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
