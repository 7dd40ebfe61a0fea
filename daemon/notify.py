"""Tell the service manager how the service is: systemd's notification protocol (sd_notify(3))."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(**fields: str | int) -> bool:
    """Send fields such as READY=1 or STATUS=…; returns whether a manager listens. Never raises or blocks."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # the abstract namespace, as systemd writes it
        address = "\0" + address[1:]
    text = "".join(f"{name}={value}\n" for name, value in fields.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        sock.sendto(text.encode(), address)
    return True


def watchdog_interval_s() -> float | None:
    """Return how often the manager wants WATCHDOG=1: half its time-out, or None when it watches not, or not us."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6
