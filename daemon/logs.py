"""Logging of every process of the daemon: one line an event on standard error, for the journal or a terminal."""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

LEVELS: Final = ("debug", "info", "warning", "error")

_PRIORITY: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class _Formatter(logging.Formatter):
    """`process: text`; a traceback, for what must not happen, follows on lines of its own."""

    def __init__(self, process: str, *, journal: bool) -> None:
        super().__init__()
        self._process = process
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage().replace("\n", " ⏎ ")
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._journal:
            # The journal takes the priority from `<N>` at the start of each line (sd-daemon(3)) and has the time.
            prefix = f"<{_PRIORITY.get(record.levelno, 6)}>{self._process}: "
        else:
            moment = self.formatTime(record, "%H:%M:%S")
            prefix = f"{moment}.{record.msecs:03.0f} {record.levelname.lower():<7} {self._process}: "
        return "\n".join(prefix + line for line in text.splitlines() or [""])


def start_logging(process: str, level: str) -> None:
    """Send this process's log to standard error under its name; calling again replaces the name and level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(process, journal="JOURNAL_STREAM" in os.environ))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(max(root.level, logging.INFO))
