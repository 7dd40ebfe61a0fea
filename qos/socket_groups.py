"""In which cgroups sockets were made: by sock_diag(7), which has told it for each since Linux 5.9.

A socket is found among all that listen by its cookie, which the kernel gives to no other one.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Collection, Iterator
from typing import Final

from seedance.errors import KernelError

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_LISTEN_STATE: Final = 1 << 10
_CGROUP_ID: Final = 21
_SO_COOKIE: Final = 57
_INTERNET: Final = (socket.AF_INET, socket.AF_INET6)
_RECEIVE_BYTES: Final = 1 << 16
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST_BODY: Final = struct.Struct("=BBBxI48x")  # struct inet_diag_req_v2, for any address
_ANSWER_BYTES: Final = 72  # struct inet_diag_msg, which has the cookie at the end of its address part
_COOKIE: Final = slice(44, 52)
_ATTRIBUTE: Final = struct.Struct("=HH")
_GROUP: Final = struct.Struct("=Q")


def socket_groups(descriptors: Collection[int]) -> dict[str, int]:
    """Return the number (inode) of the cgroup in which each listening TCP socket was made, by the socket's address.

    Sockets of other kinds are left out; so are all of them where the kernel does not tell. Raises KernelError.
    """
    names: dict[bytes, str] = {}
    families: set[int] = set()
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.family in _INTERNET and sock.type == socket.SOCK_STREAM:
                host, port = sock.getsockname()[:2]
                name = f"[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{host}:{port}"
                names[sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)] = name
                families.add(sock.family)
    found = (pair for family in sorted(families) for pair in _listening(family))
    return {names[cookie]: group for cookie, group in found if cookie in names}


def _listening(family: int) -> Iterator[tuple[bytes, int]]:
    """Yield cookie and cgroup of every listening TCP socket of this network namespace."""
    body = _REQUEST_BODY.pack(family, socket.IPPROTO_TCP, 0, _LISTEN_STATE)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as asked:
            asked.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, 1, 0) + body)
            while True:
                for kind, answer in _messages(asked.recv(_RECEIVE_BYTES)):
                    if kind == _DONE:
                        return
                    if kind == _ERROR:
                        raise OSError(-struct.unpack_from("=i", answer)[0], "")
                    attributes = dict(_attributes(answer[_ANSWER_BYTES:]))
                    if _CGROUP_ID in attributes:
                        yield answer[_COOKIE], _GROUP.unpack(attributes[_CGROUP_ID])[0]
    except OSError as exc:
        raise KernelError("ask for the groups of the listening sockets", exc.errno or errno.EIO) from exc


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[max(_ATTRIBUTE.size, (length + 3) & ~3) :]
