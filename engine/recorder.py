"""Record the requests that reach an engine as a trace (see `trace`), with no more bytes than were granted.

A line is written when its request has ended, as its length is known then, and after the lines of all that came before
it, as a trace is in order of time. One long stream holds the others up: they are kept, up to MOST_HELD, and then it is
written with what came out so far.

A trace has two files: `trace.jsonl`, and `trace.1.jsonl` with what came before. When the first has half of the bytes,
it takes the place of the second and a new one is begun, as it is at each start. Each is a trace by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Sized
from pathlib import Path
from typing import Final

import msgspec

from seedance.engine.request import Urgency
from seedance.engine.trace import Arrival, encode, head

MOST_HELD: Final = 10_000
NAME: Final = "trace.jsonl"
OLDER_NAME: Final = "trace.1.jsonl"
_WRITE_EVERY_S: Final = 1.0
# Lines are written where everybody's tokens pass through: so many are a millisecond or so.
_LINES_AT_ONCE: Final = 200
_GO_ON_S: Final = 0.02

log = logging.getLogger("seedance.engine.recorder")


class _Entry:
    """A request: what is known of it, and what comes out, None once it has ended."""

    __slots__ = ("arrival", "output")

    def __init__(self, arrival: Arrival, output: Sized) -> None:
        self.arrival = arrival
        self.output: Sized | None = output

    def end(self) -> None:
        if self.output is not None:
            self.arrival = msgspec.structs.replace(self.arrival, output_tokens=max(1, len(self.output)))
            self.output = None


class Recording:
    """Requests on their way to a trace; `now_s` is CLOCK_MONOTONIC and never goes back."""

    def __init__(self, now_s: float, most_held: int = MOST_HELD) -> None:
        self._began_s = now_s
        self._most_held = most_held
        self._entries: dict[int, _Entry] = {}  # in order of arrival, by number
        self._running: dict[int, _Entry] = {}  # by key
        self._number = 0

    def begun(
        self,
        key: int,
        tenant: str,
        prompt_tokens: int,
        max_tokens: int,
        urgency: Urgency,
        output: Sized,
        now_s: float,
    ) -> None:
        """Take a request; `output` is what comes out of it, and is looked at when it has ended."""
        deadline_s = urgency.deadline_s
        arrival = Arrival(
            at_s=round(now_s - self._began_s, 6),
            tenant=tenant,
            prompt_tokens=prompt_tokens,
            output_tokens=1,
            max_tokens=max_tokens,
            rtt_s=round(urgency.rtt_s, 6),
            rtt_variance_s=round(urgency.rtt_variance_s, 6),
            deadline_s=None if deadline_s is None else max(0.0, round(deadline_s - now_s, 6)),
        )
        self._number += 1
        self._entries[self._number] = self._running[key] = _Entry(arrival, output)

    def ended(self, key: int) -> None:
        """Note that a request has ended, however; an unknown one is ignored."""
        entry = self._running.pop(key, None)
        if entry is not None:
            entry.end()

    @property
    def is_pending(self) -> bool:
        """Whether there is a request that has not been taken."""
        return bool(self._entries)

    def take(self, most: int | None = None, *, everything: bool = False) -> list[bytes]:
        """Return the lines that can be written, `most` of them, in order; `everything` is also what still runs."""
        lines: list[bytes] = []
        while self._entries and (most is None or len(lines) < most):
            number = next(iter(self._entries))
            entry = self._entries[number]
            if not (entry.output is None or everything or len(self._entries) > self._most_held):
                break
            del self._entries[number]
            entry.end()
            lines.append(encode(entry.arrival))
        return lines


class TraceFile:
    """The two files of a trace in a folder, `most_bytes` together. Every method raises OSError."""

    def __init__(self, folder: str, most_bytes: int) -> None:
        self._path = Path(folder) / NAME
        self._older = Path(folder) / OLDER_NAME
        self._most_bytes = most_bytes // 2
        self._fd = -1
        self._size = 0
        self._begin()

    def _begin(self) -> None:
        self.close()
        if self._path.exists():
            self._path.replace(self._older)
        self._fd = os.open(self._path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o640)
        self._size = 0
        self._append(head())

    def write(self, lines: list[bytes]) -> None:
        """Append lines; each is whole or not there at all."""
        for line in lines:
            if self._size + len(line) > self._most_bytes:
                self._begin()
            self._append(line)

    def _append(self, data: bytes) -> None:
        written = 0
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += written

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Recorder:
    """A recording that is written once a second. A disk that takes nothing ends it, with a line in the log."""

    def __init__(self, folder: str, most_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        """Begin a new trace; one that cannot be begun is none."""
        self._loop = loop
        self._recording = Recording(loop.time())
        self._file: TraceFile | None = None
        self._timer: asyncio.TimerHandle | None = None
        try:
            self._file = TraceFile(folder, most_bytes)
        except OSError as exc:
            self._give_up(exc)

    def begun(
        self, key: int, tenant: str, prompt_tokens: int, max_tokens: int, urgency: Urgency, output: Sized
    ) -> None:
        """Take a request; see `Recording.begun`."""
        if self._file is None:
            return
        self._recording.begun(key, tenant, prompt_tokens, max_tokens, urgency, output, self._loop.time())
        if self._timer is None:
            self._timer = self._loop.call_later(_WRITE_EVERY_S, self._write)

    def ended(self, key: int) -> None:
        """Note that a request has ended."""
        self._recording.ended(key)

    def close(self) -> None:
        """Write what there is, and close."""
        if self._timer is not None:
            self._timer.cancel()
        self._write(everything=True)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, *, everything: bool = False) -> None:
        self._timer = None
        if self._file is None:
            return
        lines = self._recording.take(None if everything else _LINES_AT_ONCE, everything=everything)
        try:
            self._file.write(lines)
        except OSError as exc:
            self._give_up(exc)
        if self._recording.is_pending and not everything:
            wait_s = _WRITE_EVERY_S if len(lines) < _LINES_AT_ONCE else _GO_ON_S
            self._timer = self._loop.call_later(wait_s, self._write)

    def _give_up(self, exc: OSError) -> None:
        log.error("cannot record the trace any longer: %s; the next start begins a new one", exc.strerror or exc)
        if self._file is not None:
            self._file.close()
            self._file = None
        self._recording = Recording(self._loop.time())
