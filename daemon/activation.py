"""Sockets that the service manager has opened for us: systemd's socket activation (sd_listen_fds(3)).

With `seedanced.socket`, the manager holds the listening sockets: clients that come before the daemon runs, or while it
is restarted, wait in the backlog. What it hands over stands in the place of `tcp` and `unix` of `[listen]`; the network
settings there count for these sockets too (`sockets.Listeners`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import MutableMapping
from typing import Final

from seedance.errors import ConfigError

_FIRST_FD: Final = 3  # SD_LISTEN_FDS_START
_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
_UNIT: Final = "seedanced.socket"


def take_sockets(environ: MutableMapping[str, str] = os.environ, first_fd: int = _FIRST_FD) -> list[socket.socket]:
    """Return the listening sockets that were handed to this process, none when there are none.

    They are the caller's from now on: not inherited, not blocking, and no longer named in the environment, so that no
    child takes them for its own. Raises ConfigError when one is not a listening stream socket; all are closed then.
    """
    pid, count, names = (environ.pop(name, "") for name in _VARIABLES)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    fds = range(first_fd, first_fd + int(count))
    units = names.split(":") if names else []
    sockets: list[socket.socket] = []
    try:
        for fd in fds:
            position = fd - first_fd
            # The manager names a descriptor after its unit, unless FileDescriptorName= says otherwise.
            unit = units[position] if position < len(units) and units[position] else _UNIT
            sockets.append(_listening_socket(fd, unit))
    except ConfigError:
        for sock in sockets:
            sock.close()
        for fd in fds[len(sockets) :]:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise
    return sockets


def _listening_socket(fd: int, unit: str) -> socket.socket:
    try:
        is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError as exc:
        raise ConfigError(unit, "", f"cannot use descriptor {fd} that was announced: {exc.strerror}") from exc
    if not is_socket:
        raise _wrong(unit, fd, "it is no socket")
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    if sock.family not in _FAMILIES or sock.type != socket.SOCK_STREAM:
        sock.detach()
        raise _wrong(unit, fd, "it is no stream socket")
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.detach()
        raise _wrong(unit, fd, "it does not listen")
    sock.setblocking(False)
    return sock


def _wrong(unit: str, fd: int, why: str) -> ConfigError:
    return ConfigError(unit, "", f"cannot serve on descriptor {fd}: {why}; use ListenStream= with Accept=no")
