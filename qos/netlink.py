"""Network devices, queueing disciplines and filters of this network namespace, over rtnetlink(7).

pyroute2 encodes and decodes the messages. Its own sockets are not used: they run an event loop of their own per
request, which cannot be done inside of ours; a request here is one blocking exchange with the kernel, without a wait.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import msgspec
from pyroute2.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST
from pyroute2.netlink.rtnl import (
    RTM_DELQDISC,
    RTM_DELTFILTER,
    RTM_GETLINK,
    RTM_GETQDISC,
    RTM_GETTFILTER,
    RTM_NEWQDISC,
    RTM_NEWTFILTER,
    RTMGRP_LINK,
    RTMGRP_TC,
)
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from seedance.errors import KernelError

ROOT: Final = 0xFFFFFFFF
CLSACT: Final = 0xFFFFFFF1
CLSACT_HANDLE: Final = 0xFFFF0000
INGRESS: Final = 0xFFFFFFF2
EGRESS: Final = 0xFFFFFFF3
"""Parents of queueing disciplines and filters (linux/pkt_sched.h)."""

_ETH_P_ALL: Final = 3
_DIRECT_ACTION: Final = 1
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_ERROR, _DONE = 2, 3
_RECEIVE_BYTES: Final = 1 << 18
_NETLINK_EXT_ACK, _NETLINK_CAP_ACK, _SOL_NETLINK = 11, 10, 270
_HEADER: Final = struct.Struct("=IHHII")
_CODE: Final = struct.Struct("=i")
_ATTRIBUTE: Final = struct.Struct("=HH")
_ATTRIBUTE_KIND: Final = 0x3FFF
_ATTRIBUTE_MESSAGE: Final = 1


class Device(msgspec.Struct, frozen=True):
    """A network device."""

    index: int
    name: str
    is_up: bool = True
    is_loopback: bool = False
    kind: str = ""
    """Of those that are made in software, such as "bridge"."""
    master: int = 0
    """Index of the bridge, bond or the like of which it is a port."""


class Qdisc(msgspec.Struct, frozen=True):
    """A queueing discipline of a device. Handle 0 means that the kernel chose it, and no administrator."""

    kind: str
    handle: int
    parent: int


class Filter(msgspec.Struct, frozen=True):
    """A filter; `name` is "" for one that is not a BPF program. The lowest priority comes first."""

    priority: int
    handle: int
    name: str
    kind: str = "bpf"


class Network(Protocol):
    """What `devices` needs; every method raises KernelError."""

    def devices(self) -> list[Device]:
        """Return the devices there are."""

    def qdiscs(self) -> dict[int, list[Qdisc]]:
        """Return the queueing disciplines of all devices, by device index."""

    def filters(self, index: int, parent: int) -> list[Filter]:
        """Return the filters on a device's way in or out; none where there is no clsact."""

    def replace_qdisc(self, index: int, kind: str, parent: int, handle: int, options: bytes = b"") -> None:
        """Put a queueing discipline in place of what is there; `options` are its own attributes, encoded."""

    def delete_qdisc(self, index: int, parent: int, handle: int) -> None:
        """Delete a queueing discipline; at the root, the kernel puts its default there."""

    def replace_filter(self, index: int, parent: int, filter: Filter, program: int) -> None:
        """Put a BPF program (a descriptor) in as a filter, or at once in place of the one of that handle."""

    def delete_filter(self, index: int, parent: int, filter: Filter) -> None:
        """Delete a filter."""


class Netlink:
    """`Network` of the namespace in which it was made."""

    def __init__(self) -> None:
        """Open the socket. Raises KernelError."""
        self._socket = _open(0)
        self._sequence = 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def devices(self) -> list[Device]:
        """Return the devices there are."""
        return [_device(message) for message in self._ask("list network devices", RTM_GETLINK, NLM_F_DUMP, ifinfmsg())]

    def qdiscs(self) -> dict[int, list[Qdisc]]:
        """Return the queueing disciplines of all devices, by device index."""
        found: dict[int, list[Qdisc]] = {}
        for message in self._ask("list queueing disciplines", RTM_GETQDISC, NLM_F_DUMP, _tcmsg(0)):
            qdisc = Qdisc(str(message.get_attr("TCA_KIND")), message["handle"], message["parent"])
            found.setdefault(message["index"], []).append(qdisc)
        return found

    def filters(self, index: int, parent: int) -> list[Filter]:
        """Return the filters on a device's way in or out; none where there is no clsact."""
        try:
            found = self._ask("list filters", RTM_GETTFILTER, NLM_F_DUMP, _tcmsg(index, parent=parent))
        except KernelError as exc:
            if exc.errno in (errno.ENOENT, errno.EINVAL):
                return []
            raise
        # Each priority comes once more by itself, without a handle.
        return [_filter(message) for message in found if message["handle"]]

    def replace_qdisc(self, index: int, kind: str, parent: int, handle: int, options: bytes = b"") -> None:
        """See `Network`."""
        attributes: list[list[Any]] = [["TCA_KIND", kind]]
        if options:
            attributes.append(["TCA_OPTIONS", options])
        message = _tcmsg(index, parent=parent, handle=handle, attributes=attributes)
        flags = NLM_F_CREATE | (NLM_F_EXCL if parent == CLSACT else NLM_F_REPLACE)
        self._ask(f"make a '{kind}' queue on device {index}", RTM_NEWQDISC, flags, message)

    def delete_qdisc(self, index: int, parent: int, handle: int) -> None:
        """See `Network`."""
        self._ask(f"delete a queue of device {index}", RTM_DELQDISC, 0, _tcmsg(index, parent=parent, handle=handle))

    def replace_filter(self, index: int, parent: int, filter: Filter, program: int) -> None:
        """See `Network`."""
        options = {"attrs": [["TCA_BPF_FD", program], ["TCA_BPF_NAME", filter.name], ["TCA_BPF_FLAGS", _DIRECT_ACTION]]}
        message = _filter_message(index, parent, filter, ["TCA_OPTIONS", options])
        self._ask(f"attach '{filter.name}' to device {index}", RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_REPLACE, message)

    def delete_filter(self, index: int, parent: int, filter: Filter) -> None:
        """See `Network`."""
        message = _filter_message(index, parent, filter)
        self._ask(f"delete the filter '{filter.name}' of device {index}", RTM_DELTFILTER, 0, message)

    def _ask(self, what: str, kind: int, flags: int, message: Any) -> list[Any]:
        """Send a request and return the messages that answer it."""
        self._sequence += 1
        message["header"]["type"] = kind
        message["header"]["flags"] = NLM_F_REQUEST | NLM_F_ACK | flags
        message["header"]["sequence_number"] = self._sequence
        message.encode()
        found: list[Any] = []
        try:
            self._socket.send(message.data)
            for reply, data in self._replies():
                if reply in (_ERROR, _DONE):
                    _check(what, data, is_error=reply == _ERROR)
                    return found
                answer = type(message)(data)
                answer.decode()
                found.append(answer)
        except OSError as exc:
            raise KernelError(what, exc.errno or errno.EIO) from exc
        raise AssertionError("unreachable: the replies never end by themselves")

    def _replies(self) -> Iterator[tuple[int, bytes]]:
        """Yield kind and bytes of the messages that answer the last request."""
        while True:
            data = self._socket.recv(_RECEIVE_BYTES)
            offset = 0
            while offset + _HEADER.size <= len(data):
                length, kind, _, sequence, _ = _HEADER.unpack_from(data, offset)
                if sequence == self._sequence:
                    yield kind, data[offset : offset + length]
                offset += (length + 3) & ~3


class Monitor:
    """Tells that something about devices, queues or filters has changed, by becoming readable."""

    def __init__(self) -> None:
        """Open the socket. Raises KernelError."""
        self._socket = _open(RTMGRP_LINK | RTMGRP_TC)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def drain(self) -> None:
        """Drop what has arrived: after a change, everything is looked at anew."""
        while True:
            try:
                self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as exc:
                # The kernel had more to tell than there was room for, and says so once.
                if exc.errno != errno.ENOBUFS:
                    raise KernelError("read from a netlink socket", exc.errno or errno.EIO) from exc

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _open(groups: int) -> socket.socket:
    opened: socket.socket | None = None
    try:
        opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        opened.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
        opened.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
        opened.bind((0, groups))
    except OSError as exc:
        if opened is not None:
            opened.close()
        raise KernelError("open a netlink socket", exc.errno or errno.EIO) from exc
    return opened


def _check(what: str, data: bytes, *, is_error: bool) -> None:
    """Raise KernelError when the last message of an answer says so, with the kernel's own words (NLMSGERR_ATTR_MSG)."""
    code = -int(_CODE.unpack_from(data, _HEADER.size)[0]) if len(data) >= _HEADER.size + _CODE.size else 0
    if not code:
        return
    # An error holds the header of the request that it is about, too.
    offset = _HEADER.size + _CODE.size + (_HEADER.size if is_error else 0)
    said = ""
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if kind & _ATTRIBUTE_KIND == _ATTRIBUTE_MESSAGE:
            text = data[offset + _ATTRIBUTE.size : offset + length].rstrip(b"\0").decode(errors="replace")
            said = f" ({text.rstrip('.')})"
        offset += max(_ATTRIBUTE.size, (length + 3) & ~3)
    raise KernelError(what + said, code)


def _tcmsg(index: int, *, parent: int = 0, handle: int = 0, info: int = 0, attributes: Sequence[Any] = ()) -> Any:
    message = tcmsg()
    message.update({"index": index, "parent": parent, "handle": handle, "info": info, "attrs": list(attributes)})
    return message


def _filter_message(index: int, parent: int, filter: Filter, *attributes: list[Any]) -> Any:
    info = filter.priority << 16 | socket.htons(_ETH_P_ALL)
    kind = ["TCA_KIND", filter.kind]
    return _tcmsg(index, parent=parent, handle=filter.handle, info=info, attributes=[kind, *attributes])


def _device(message: Any) -> Device:
    flags, made = message["flags"], message.get_attr("IFLA_LINKINFO")
    return Device(
        message["index"],
        str(message.get_attr("IFLA_IFNAME")),
        is_up=bool(flags & _IFF_UP),
        is_loopback=bool(flags & _IFF_LOOPBACK),
        kind=str(made.get_attr("IFLA_INFO_KIND") or "") if made else "",
        master=message.get_attr("IFLA_MASTER") or 0,
    )


def _filter(message: Any) -> Filter:
    kind, options = str(message.get_attr("TCA_KIND")), message.get_attr("TCA_OPTIONS")
    name = options.get_attr("TCA_BPF_NAME") if kind == "bpf" and options else None
    return Filter(message["info"] >> 16, message["handle"], str(name or ""), kind)
