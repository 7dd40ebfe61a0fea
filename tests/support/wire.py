"""A network of the test's own between this machine and clients: a veth pair into a namespace."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import socket
import struct
from collections.abc import Iterator
from typing import Final

from support.namespaces import Namespace
from support.system_service import command

_SERVER: Final = "10.77.0.1"
_CLIENT: Final = "10.77.0.2"
_RECEIVED, _SENT = 0, 8  # columns of /proc/net/dev
_SIOCETHTOOL: Final = 0x8946
_ETHTOOL_STSO: Final = 0x1F


@dataclasses.dataclass(frozen=True, slots=True)
class Clients:
    """A network namespace joined to the machine's own: `client` on its device there, `server` on the other here."""

    namespace: Namespace
    server_device: str = "sd0"
    client_device: str = "sd1"
    server: str = _SERVER
    client: str = _CLIENT

    def received_bytes(self) -> int:
        """Return the bytes that the clients' device has received, link layer included."""
        return self._count(_RECEIVED)

    def sent_bytes(self) -> int:
        """Return the bytes that the clients' device has sent, link layer included."""
        return self._count(_SENT)

    def _count(self, column: int) -> int:
        # Not from /sys, which shows the devices of the namespace that it was mounted in.
        with self.namespace, open("/proc/thread-self/net/dev") as file:
            line = next(line for line in file if line.strip().startswith(f"{self.client_device}:"))
        return int(line.partition(":")[2].split()[column])


@contextlib.contextmanager
def joined() -> Iterator[Clients]:
    """Have clients behind a veth pair.

    As on a card that leaves segmenting to the kernel, each segment crosses it by itself, its headers counted.
    """
    found = Clients(Namespace())
    try:
        command(
            *("ip", "link", "add", found.server_device, "type", "veth", "peer", "name", found.client_device),
            *("netns", found.namespace.path),
        )
        _leave_segmenting(found.server_device)
        with found.namespace:
            _leave_segmenting(found.client_device)
        command("ip", "address", "add", f"{found.server}/24", "dev", found.server_device)
        command("ip", "link", "set", found.server_device, "up")
        found.namespace.run("ip", "address", "add", f"{found.client}/24", "dev", found.client_device)
        found.namespace.run("ip", "link", "set", found.client_device, "up")
        yield found
    finally:
        command("ip", "link", "delete", found.server_device, check=False)
        found.namespace.close()


def _leave_segmenting(device: str) -> None:
    """Switch a device's TCP segmentation off (ethtool -K DEVICE tso off)."""
    value = ctypes.create_string_buffer(struct.pack("II", _ETHTOOL_STSO, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP16x", device.encode(), ctypes.addressof(value)))
