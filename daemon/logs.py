"""Logging of every process of the daemon: fields for the journal, or one line an event on standard error.

Where standard error leads into the journal (systemd sets JOURNAL_STREAM to its device and inode), entries go there by
the journal's own protocol, with fields that can be searched for:

    journalctl TENANT=acme                    all of one tenant's worker, and what others say of that tenant
    journalctl SEEDANCE_PROCESS=gateway -p warning

A field of one entry comes from `extra={"tenant": …, "stream": …}`, one of all entries of a process from
`start_logging`. No descriptor is kept, as a forked worker closes all that it has inherited.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import sys
from collections.abc import Mapping
from typing import Final

LEVELS: Final = ("debug", "info", "warning", "error")
JOURNAL: Final = "/run/systemd/journal/socket"

_IDENTIFIER: Final = "seedanced"
_PRIORITY: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_EXTRA: Final = {"tenant": "TENANT", "stream": "STREAM"}
_TOO_LONG: Final = (errno.EMSGSIZE, errno.ENOBUFS)
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class _Formatter(logging.Formatter):
    """`process: text`; a traceback, for what must not happen, follows on lines of its own."""

    def __init__(self, process: str, *, journal: bool) -> None:
        super().__init__()
        self._process = process
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        if self._journal:
            # The journal takes the priority from `<N>` at the start of each line (sd-daemon(3)) and has the time.
            prefix = f"<{_priority(record)}>{self._process}: "
        else:
            moment = self.formatTime(record, "%H:%M:%S")
            prefix = f"{moment}.{record.msecs:03.0f} {record.levelname.lower():<7} {self._process}: "
        return "\n".join(prefix + line for line in _text(self, record).splitlines() or [""])


def _priority(record: logging.LogRecord) -> int:
    return _PRIORITY.get(record.levelno, 6)


def _text(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = record.getMessage().replace("\n", " ⏎ ")
    if record.exc_info:
        text += "\n" + formatter.formatException(record.exc_info)
    return text


class JournalHandler(logging.Handler):
    """Sends entries to the journal at `path`; what it does not take goes to `fallback`.

    `fields` are of every entry; an empty one is left out.
    """

    def __init__(self, path: str, fields: Mapping[str, str], fallback: logging.Handler) -> None:
        super().__init__()
        self._path = path
        self._fields = dict(fields)
        self._fallback = fallback
        self._plain = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        """Send one entry; never raises."""
        try:
            send(self._path, self._entry(record))
        except OSError:
            self._fallback.handle(record)
        except Exception:
            self.handleError(record)

    def _entry(self, record: logging.LogRecord) -> bytes:
        fields = {
            "MESSAGE": _text(self._plain, record),
            "PRIORITY": str(_priority(record)),
            "LOGGER": record.name,
            "CODE_FILE": record.pathname,
            "CODE_LINE": str(record.lineno),
            "CODE_FUNC": record.funcName or "",
            **self._fields,
        }
        for attribute, name in _EXTRA.items():
            fields[name] = str(getattr(record, attribute, "")) or fields.get(name, "")
        return encode(fields)


def encode(fields: Mapping[str, str]) -> bytes:
    """Return an entry as the journal reads it: `NAME=value` lines; a value of several lines comes with its length."""
    entry = b""
    for name, value in fields.items():
        data = value.encode("utf-8", "backslashreplace")
        if b"\n" in data:
            entry += b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data)
        elif data:
            entry += b"%s=%s\n" % (name.encode(), data)
    return entry


def send(path: str, entry: bytes) -> None:
    """Send one entry as a datagram, or in a sealed file where it is too long for one.

    Raises OSError, also when the journal's queue is full: nobody waits for a log.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.sendto(entry, path)
        except OSError as exc:
            if exc.errno not in _TOO_LONG:
                raise
            _send_file(sock, path, entry)


def _send_file(sock: socket.socket, path: str, entry: bytes) -> None:
    fd = os.memfd_create("journal-entry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb") as file:
        file.write(entry)
        file.flush()
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        sock.connect(path)
        socket.send_fds(sock, [b""], [fd])


def is_journal(stream: str) -> bool:
    """Say whether standard error is the stream that JOURNAL_STREAM names, as "device:inode"."""
    with contextlib.suppress(OSError):
        status = os.fstat(2)
        return stream == f"{status.st_dev}:{status.st_ino}"
    return False


def start_logging(process: str, level: str, *, tenant: str = "", journal: str = JOURNAL) -> None:
    """Send this process's log to the journal or to standard error; calling again replaces the name, tenant and level.

    `tenant` is whose worker this process is, if it is one; `journal` is the journal's socket.
    """
    in_journal = is_journal(os.environ.get("JOURNAL_STREAM", ""))
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(process, journal=in_journal))
    if in_journal:
        fields = {"SYSLOG_IDENTIFIER": _IDENTIFIER, "SEEDANCE_PROCESS": process, "TENANT": tenant}
        handler = JournalHandler(journal, fields, handler)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(max(root.level, logging.INFO))
