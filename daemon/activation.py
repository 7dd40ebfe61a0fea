"""Descriptors that the service manager has for us: systemd's socket activation and its store (sd_listen_fds(3)).

With `seedanced.socket`, the manager holds the listening sockets: clients that come before the daemon runs, or while it
is restarted, wait in the backlog. What it hands over stands in the place of `tcp` and `unix` of `[listen]`; the network
settings there count for these sockets too (`sockets.Listeners`). What this daemon has stored before (`log_store`)
comes back with them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import MutableMapping
from typing import Final, NamedTuple

from seedance.daemon.log_store import PREFIX
from seedance.errors import ConfigError

_FIRST_FD: Final = 3  # SD_LISTEN_FDS_START
_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
_UNIT: Final = "seedanced.socket"


class Inherited(NamedTuple):
    """What the manager has handed over: listening sockets, and the tenants' `session_logs` that were stored."""

    sockets: list[socket.socket]
    session_logs: dict[str, int]


def take(environ: MutableMapping[str, str] = os.environ, first_fd: int = _FIRST_FD) -> Inherited:
    """Return what was handed to this process; all is empty when there is nothing.

    It is the caller's from now on: not inherited, not blocking, and no longer named in the environment, so that no
    child takes it for its own. Raises ConfigError when a socket is not a listening stream socket; all are closed then.
    """
    taken = Inherited([], {})
    pid, count, names = (environ.pop(name, "") for name in _VARIABLES)
    if pid != str(os.getpid()) or not count.isdecimal():
        return taken
    left = dict.fromkeys(range(first_fd, first_fd + int(count)), _UNIT)
    # The manager names a descriptor after its unit, unless FileDescriptorName= says otherwise.
    left.update((fd, name) for fd, name in zip(left, names.split(":"), strict=False) if name)
    try:
        for fd, name in list(left.items()):
            if name.startswith(PREFIX):
                os.set_inheritable(fd, False)
                taken.session_logs[name.removeprefix(PREFIX)] = fd
            else:
                taken.sockets.append(_listening_socket(fd, name))
            del left[fd]
    except ConfigError:
        for sock in taken.sockets:
            sock.close()
        for fd in (*left, *taken.session_logs.values()):
            with contextlib.suppress(OSError):
                os.close(fd)
        raise
    return taken


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
