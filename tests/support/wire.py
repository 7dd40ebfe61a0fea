"""A network of the test's own between this machine and clients: a veth pair into a namespace.

In reality clients have machines of their own. Here they share processors with what they ask, so there is a control
group for them that runs when nothing else does: weights inside a group say nothing about others.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from support.namespaces import Namespace
from support.system_service import command

_SERVER: Final = "10.77.0.1"
_CLIENT: Final = "10.77.0.2"
_GROUP: Final = Path("/sys/fs/cgroup/seedance-test-clients")
_RECEIVED, _SENT = 0, 8  # columns of /proc/net/dev
SO_TIMESTAMPNS: Final = 35
_SIOCETHTOOL: Final = 0x8946
_ETHTOOL_STSO: Final = 0x1F


@dataclasses.dataclass(frozen=True, slots=True)
class Clients:
    """A network namespace joined to the machine's own: `client` on its device there, `server` on the other here."""

    namespace: Namespace
    group: Path
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

    def leave_segmenting(self, *, is_device: bool) -> None:
        """Have whole packets of up to 64 KiB cross, as to a card that segments them itself, or segment by segment.

        The devices count what crosses: only segment by segment are these the bytes of a wire, each header counted. It
        is much more work, which a real machine has a card for, too.
        """
        _set_segmenting(self.server_device, is_device)
        with self.namespace:
            _set_segmenting(self.client_device, is_device)

    def _count(self, column: int) -> int:
        # Not from /sys, which shows the devices of the namespace that it was mounted in.
        with self.namespace, open("/proc/thread-self/net/dev") as file:
            line = next(line for line in file if line.strip().startswith(f"{self.client_device}:"))
        return int(line.partition(":")[2].split()[column])


@contextlib.contextmanager
def joined() -> Iterator[Clients]:
    """Have clients behind a veth pair, which segments cross one by one."""
    found = Clients(Namespace(), _GROUP)
    # The kernel patches its code when the first socket wants timestamps, and an emulated processor that runs through
    # that code meanwhile may take the trap of it for a fault: so this happens before there is traffic.
    stamping = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    stamping.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    try:
        (_GROUP.parent / "cgroup.subtree_control").write_text("+cpu")
        _GROUP.mkdir()
        (_GROUP / "cpu.idle").write_text("1")  # v5.15
        command(
            *("ip", "link", "add", found.server_device, "type", "veth", "peer", "name", found.client_device),
            *("netns", found.namespace.path),
        )
        found.leave_segmenting(is_device=False)
        command("ip", "address", "add", f"{found.server}/24", "dev", found.server_device)
        command("ip", "link", "set", found.server_device, "up")
        found.namespace.run("ip", "address", "add", f"{found.client}/24", "dev", found.client_device)
        found.namespace.run("ip", "link", "set", found.client_device, "up")
        yield found
    finally:
        command("ip", "link", "delete", found.server_device, check=False)
        found.namespace.close()
        stamping.close()
        if _GROUP.exists():
            _GROUP.rmdir()


def _set_segmenting(device: str, is_device: bool) -> None:
    """Leave the segmenting of TCP to a device, or to the kernel (ethtool -K DEVICE tso on|off)."""
    value = ctypes.create_string_buffer(struct.pack("II", _ETHTOOL_STSO, is_device))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP16x", device.encode(), ctypes.addressof(value)))
