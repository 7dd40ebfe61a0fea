"""Network settings put on a listening socket, and read back from it.

A connection inherits from its listener all that is set here, at no cost of its own (inet_csk_clone_lock copies the
socket). The congestion control needs no privilege then either, where setting one that is not in
`net.ipv4.tcp_allowed_congestion_control` takes CAP_NET_ADMIN.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from seedance.daemon.network_settings import AUTO, KEEPALIVE_PROBES, NetworkSettings

# Of asm-generic/socket.h; Python has no names for them.
_SO_BUSY_POLL: Final = 46
_SO_BUF_LOCK: Final = 72  # v5.14: which buffers have been set
_SNDBUF_LOCKED: Final = 1
_RCVBUF_LOCKED: Final = 2
_CONGESTION_BYTES: Final = 16
# A listening socket's tcpi_sacked is its backlog's length (tcp_get_info).
_TCP_INFO_BYTES: Final = 104
_TCPI_SACKED: Final = 28
_SOMAXCONN: Final = Path("/proc/sys/net/core/somaxconn")
_SIZES: Final = ((1 << 20, "MiB"), (1 << 10, "KiB"))

_INTERNET: Final = (socket.AF_INET, socket.AF_INET6)


class ListenerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A listener: the settings in force, as the kernel tells them, in the words of the configuration file.

    `off` maps those that were asked for and that this kernel does not keep to the reason.
    """

    name: str
    settings: dict[str, str]
    off: dict[str, str]


def apply(sock: socket.socket, settings: NetworkSettings) -> dict[str, str]:
    """Put the settings on a TCP socket, bound or not; returns those that the kernel does not take, and why.

    `backlog` is no option: it is for `listen`.
    """
    off = {}
    for key, level, option, value in _options(settings):
        try:
            sock.setsockopt(level, option, value)
        except OSError as exc:
            off[key] = _reason(key, settings, exc)
    for key, option, wanted, limit in (
        ("send_buffer", socket.SO_SNDBUF, settings.send_buffer_bytes, "wmem_max"),
        ("receive_buffer", socket.SO_RCVBUF, settings.receive_buffer_bytes, "rmem_max"),
    ):
        held = sock.getsockopt(socket.SOL_SOCKET, option) // 2
        if held < wanted and key not in off:
            off[key] = f"net.core.{limit} allows {_size(held)}"
    return off


def _options(settings: NetworkSettings) -> Iterator[tuple[str, int, int, int | bytes]]:
    tcp, whole = socket.IPPROTO_TCP, socket.SOL_SOCKET
    if settings.congestion != AUTO:
        yield "congestion", tcp, socket.TCP_CONGESTION, settings.congestion.encode("ascii")
    yield "nodelay", tcp, socket.TCP_NODELAY, int(settings.nodelay)
    if settings.busy_poll_us:
        yield "busy_poll", whole, _SO_BUSY_POLL, settings.busy_poll_us
    if settings.notsent_lowat_bytes:
        yield "notsent_lowat", tcp, socket.TCP_NOTSENT_LOWAT, settings.notsent_lowat_bytes
    # The kernel doubles what is asked for, to cover its own bookkeeping.
    if settings.send_buffer_bytes:
        yield "send_buffer", whole, socket.SO_SNDBUF, settings.send_buffer_bytes
    if settings.receive_buffer_bytes:
        yield "receive_buffer", whole, socket.SO_RCVBUF, settings.receive_buffer_bytes
    yield "keepalive", whole, socket.SO_KEEPALIVE, int(settings.keepalive_s > 0)
    if settings.keepalive_s:
        yield "keepalive", tcp, socket.TCP_KEEPIDLE, settings.keepalive_s
        yield "keepalive", tcp, socket.TCP_KEEPINTVL, settings.keepalive_s // KEEPALIVE_PROBES
        yield "keepalive", tcp, socket.TCP_KEEPCNT, KEEPALIVE_PROBES
    yield "user_timeout", tcp, socket.TCP_USER_TIMEOUT, settings.user_timeout_ms


def _reason(key: str, settings: NetworkSettings, exc: OSError) -> str:
    name = settings.congestion
    if key == "congestion" and exc.errno == errno.ENOENT:
        return f"this kernel has no '{name}'; where it is a module, `modprobe tcp_{name}` loads it"
    if key == "congestion" and exc.errno == errno.EPERM:
        return f"'{name}' needs CAP_NET_ADMIN, or a place in net.ipv4.tcp_allowed_congestion_control"
    return "that needs CAP_NET_ADMIN" if exc.errno == errno.EPERM else exc.strerror or str(exc)


def in_force(sock: socket.socket) -> dict[str, str]:
    """Return the settings of a listening socket as its kernel has them now; "auto" is what it tunes by itself."""
    if sock.family not in _INTERNET:
        return {}
    tcp, whole = socket.IPPROTO_TCP, socket.SOL_SOCKET
    locked = _locked_buffers(sock)
    congestion = sock.getsockopt(tcp, socket.TCP_CONGESTION, _CONGESTION_BYTES)
    lowat_bytes = sock.getsockopt(tcp, socket.TCP_NOTSENT_LOWAT)
    keepalive_s = sock.getsockopt(whole, socket.SO_KEEPALIVE) and sock.getsockopt(tcp, socket.TCP_KEEPIDLE)
    timeout_ms = sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT)
    information = sock.getsockopt(tcp, socket.TCP_INFO, _TCP_INFO_BYTES)
    return {
        "congestion": congestion.partition(b"\0")[0].decode("ascii"),
        "nodelay": "true" if sock.getsockopt(tcp, socket.TCP_NODELAY) else "false",
        "busy_poll": f"{_busy_poll_us(sock)}us",
        "notsent_lowat": _size(lowat_bytes) if lowat_bytes else AUTO,
        "send_buffer": _size(sock.getsockopt(whole, socket.SO_SNDBUF) // 2) if locked & _SNDBUF_LOCKED else AUTO,
        "receive_buffer": _size(sock.getsockopt(whole, socket.SO_RCVBUF) // 2) if locked & _RCVBUF_LOCKED else AUTO,
        "keepalive": f"{keepalive_s}s",
        "user_timeout": f"{timeout_ms / 1000:g}s",
        "backlog": str(struct.unpack_from("=I", information, _TCPI_SACKED)[0]),
    }


def _locked_buffers(sock: socket.socket) -> int:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK)
    except OSError:  # an emulated kernel; what it says of their sizes is still true
        return _SNDBUF_LOCKED | _RCVBUF_LOCKED


def _busy_poll_us(sock: socket.socket) -> int:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_BUSY_POLL)
    except OSError:  # a kernel without CONFIG_NET_RX_BUSY_POLL
        return 0


def most_backlog() -> int:
    """Return what the kernel allows of a backlog; listen(2) takes less than was asked for in silence."""
    try:
        return int(_SOMAXCONN.read_text())
    except OSError:
        return socket.SOMAXCONN


def _size(size_bytes: int) -> str:
    for factor, unit in _SIZES:
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return f"{size_bytes}B"
