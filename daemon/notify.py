"""Tell the service manager how the service is: systemd's notification protocol (sd_notify(3)), and when to say nothing.

The manager ends and restarts a service that has not sent WATCHDOG=1 for WatchdogSec. It is sent only while the daemon
really makes progress, so that what hangs for good does not look alive (`Watchdog`).
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Final

_LONGEST_STATUS: Final = 500


def notify(**fields: str | int) -> bool:
    """Send fields such as READY=1 or STATUS=…; returns whether a manager listens. Never raises or blocks."""
    return _send(fields)


def store(name: str, fd: int) -> bool:
    """Have the manager keep a descriptor, for the process after this one; returns whether a manager listens.

    It is not watched for an end, as what is stored here has none. `name` holds no colon.
    """
    return _send({"FDSTORE": 1, "FDNAME": name, "FDPOLL": 0}, (fd,))


def discard(name: str) -> bool:
    """Have the manager keep no descriptor of that name any more; returns whether a manager listens."""
    return _send({"FDSTOREREMOVE": 1, "FDNAME": name})


def _send(fields: Mapping[str, str | int], fds: Sequence[int] = ()) -> bool:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # the abstract namespace, as systemd writes it
        address = "\0" + address[1:]
    text = "".join(f"{name}={value}\n" for name, value in fields.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sock.sendmsg([text.encode()], rights, 0, address)
    return True


def watchdog_interval_s() -> float | None:
    """Return how often the manager wants WATCHDOG=1: half its time-out, or None when it watches not, or not us."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6


class Watchdog:
    """Whether the daemon makes progress. Pure: who runs the loop says what happened, and when.

    The loop itself shows that it turns by calling `feed` from a timer, at least every `interval_s`. Each process that
    answers questions is `asked` at each turn; one that owes an answer for longer than `patience_s` is late. It is to be
    killed, which `gone` tells of and which pays its debt: what starts again is not held against anybody. So a hanging
    child costs that child, and only what cannot even be killed costs the service.

    With `interval_s` half the manager's time-out and patience as long as that, a child that hangs is killed at the
    second or third turn, before the manager loses its own patience.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._asked_s: dict[str, float] = {}

    def asked(self, name: str, now: float) -> None:
        """Take note of a question to a process; one that already owes an answer owes it since then."""
        self._asked_s.setdefault(name, now)

    def answered(self, name: str) -> None:
        """Take note of an answer."""
        self._asked_s.pop(name, None)

    def gone(self, name: str) -> None:
        """Take note that a process has ended, and is being started again."""
        self._asked_s.pop(name, None)

    def late(self, now: float) -> list[str]:
        """Return who has owed an answer for too long, sorted."""
        return sorted(name for name, asked_s in self._asked_s.items() if now - asked_s > self._patience_s)

    def feed(self, now: float) -> bool:
        """Tell whether WATCHDOG=1 may be sent: nobody is late."""
        return not self.late(now)


def status_text(
    state: str,
    *,
    tenants: int,
    connections: int,
    bad_files: int = 0,
    off: Collection[str] = (),
    late: Collection[str] = (),
) -> str:
    """Return the line that `systemctl status` shows; `state` says what the engine does and serves.

    `off` names the limits that are not kept, `late` the processes that do not answer.
    """
    parts = [state, _counted(tenants, "tenant"), _counted(connections, "connection")]
    if bad_files:
        parts.append(_counted(bad_files, "bad file"))
    if off:
        parts.append(f"limits off: {', '.join(off)}")
    if late:
        parts.append(f"no answer from {', '.join(late)}")
    text = " ".join("; ".join(parts).split())
    return text if len(text) <= _LONGEST_STATUS else text[:_LONGEST_STATUS] + "…"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
