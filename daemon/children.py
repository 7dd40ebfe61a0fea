"""The supervisor's child processes: started with a link, watched, started again with growing pauses.

A child is the same Python with another module. It finds its link to the supervisor as descriptor `process.LINK_FD`,
has a process group of its own (so that Ctrl-C at a terminal reaches only the supervisor) and exits when the link
closes. It is started by posix_spawn, which inherits nothing but standard error and that link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from seedance.daemon.process import LINK_FD
from seedance.engine.packets import PacketSocket, pair

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0
_STEADY_S: Final = 10.0
_SURVEY_S: Final = 0.5
_ENDING_S: Final = 1.0
# What the service manager tells its main process (sd_notify(3)); a child that used it would be taken for that.
_OURS_ALONE: Final = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")


class Backoff:
    """How long to wait before something that keeps ending is started again.

    Nothing after a life of at least ten seconds; else 0.1 s, doubled at each early end in a row, at most 10 s.
    """

    __slots__ = ("_pause_s", "_started_s")

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._started_s = 0.0

    def started(self, now: float) -> None:
        """Take note of a start."""
        self._started_s = now

    def ended(self, now: float) -> float:
        """Take note of an end; returns the seconds to wait."""
        if now - self._started_s >= _STEADY_S:
            self._pause_s = 0.0
            return 0.0
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        return self._pause_s


def exit_text(status: int) -> str:
    """Say how a process ended; `status` is negative for a signal."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
        return f"killed by signal {-status}"
    return f"exited with status {status}"


def spawn(module: str, arguments: Sequence[str], link: socket.socket) -> int:
    """Start `python -m module` with its link; returns its process id. Raises OSError.

    The child's standard input is empty, its standard output is our standard error, and every signal is as by default.
    """
    # Without -P the working directory would come first among the places that modules are imported from.
    argv = [sys.executable, "-P", "-m", module, *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in _OURS_ALONE}
    # Importing numpy would start threads for linear algebra. They would keep the privileges that their process gives
    # up, which belong to a thread, and be missing in what it forks.
    environment["OPENBLAS_NUM_THREADS"] = "1"
    actions: list[Any] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, 2, 1),
        (os.POSIX_SPAWN_DUP2, link.fileno(), LINK_FD),
    ]
    usual = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ]
    return os.posix_spawn(
        sys.executable, argv, environment, file_actions=actions, setpgroup=0, setsigmask=[], setsigdef=usual
    )


async def wait_set(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event for so long at most; returns whether it is set."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()


class Survey:
    """Questions put to several processes at once, until each has answered or time is up."""

    def __init__(self) -> None:
        self._missing: set[str] = set()
        self._complete = asyncio.Event()

    def ask(self, name: str) -> None:
        """Expect an answer of that name."""
        self._missing.add(name)
        self._complete.clear()

    def answered(self, name: str) -> None:
        """Take note of an answer, expected or not."""
        self._missing.discard(name)
        if not self._missing:
            self._complete.set()

    async def wait(self) -> None:
        """Wait for the missing answers; who does not give one is asked for no longer."""
        if self._missing:
            await wait_set(self._complete, _SURVEY_S)
        self._missing.clear()


class Reaper:
    """Collects every ended child of this process, and tells whoever asked for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: dict[int, Callable[[int], None]] = {}
        loop.add_signal_handler(signal.SIGCHLD, self.reap)

    def watch(self, pid: int, ended: Callable[[int], None]) -> None:
        """Call `ended(status)` once when child `pid` has ended; the status is negative for a signal."""
        self._watched[pid] = ended

    def forget(self, pid: int) -> None:
        """Watch a child no more."""
        self._watched.pop(pid, None)

    def reap(self) -> None:
        """Collect what has ended; children that nobody watches are orphans that came to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = self._watched.pop(pid, None)
            if ended is not None:
                ended(os.waitstatus_to_exitcode(status))

    def close(self) -> None:
        """Stop watching."""
        self._loop.remove_signal_handler(signal.SIGCHLD)


def has_child(pid: int) -> bool:
    """Return whether that is a child of this process, one that has ended and is not reaped yet included."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class Child:
    """One supervised process: kept running until `stop`.

    `received` gets the packets of its link; `started` is called after each start, when `send` reaches the new
    process; `ended(text)` after each end that nobody asked for, before the next start.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        reaper: Reaper,
        received: Callable[[bytes, list[int]], None],
        started: Callable[[], None],
        ended: Callable[[str], None],
    ) -> None:
        self.name = name
        self.pid = 0
        self.restarts = 0
        self._command = command
        self._reaper = reaper
        self._received = received
        self._started = started
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._link: PacketSocket | None = None
        self._backoff = Backoff()
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self._gone = asyncio.Event()
        self._gone.set()

    def start(self) -> None:
        """Start the process now. Raises OSError when that is impossible."""
        self._timer = None
        ours, theirs = pair()
        with theirs:
            try:
                self.pid = spawn(self._command[0], self._command[1:], theirs)
            except OSError:
                ours.close()
                raise
        self._gone.clear()
        self._backoff.started(self._loop.time())
        self._reaper.watch(self.pid, self._exited)
        self._link = PacketSocket(ours, self._loop, self._received, self._link_closed)
        _log.debug("%s started, pid %d", self.name, self.pid)
        self._started()

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self.pid != 0

    @property
    def is_linked(self) -> bool:
        """Whether what is sent reaches a process."""
        return self._link is not None

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one packet to the process; nothing happens while there is none."""
        if self._link is not None:
            self._link.send(data, fds)

    async def stop(self, grace_s: float) -> None:
        """Close the link, which ends the process; kill it after `grace_s`. Returns when it is gone."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        self._close_link()
        if not await self.wait_gone(grace_s):
            _log.warning("%s has not ended within %.1f s, killing it", self.name, grace_s)
            self._signal(signal.SIGKILL)
            await self._gone.wait()

    def kill(self) -> None:
        """End the process at once; it is started again as after any other end."""
        self._signal(signal.SIGKILL)

    def let_end(self) -> None:
        """Start it no more: it has been told to end."""
        self._stopping = True

    async def wait_gone(self, timeout_s: float) -> bool:
        """Wait until the process has ended; returns whether it has."""
        return await wait_set(self._gone, timeout_s)

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _link_closed(self) -> None:
        # Most often it is ending and closes everything on its way. One that is not is of no use without its link.
        self._link = None
        self._loop.call_later(_ENDING_S, self._kill_if_still, self.pid)

    def _kill_if_still(self, pid: int) -> None:
        if self.pid == pid:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid:  # not reaped yet, so the number is still this process's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _exited(self, status: int) -> None:
        self.pid = 0
        self._close_link()
        self._gone.set()
        if self._stopping:
            return
        pause_s = self._backoff.ended(self._loop.time())
        text = exit_text(status)
        _log.error("%s %s, starting it again%s", self.name, text, f" in {pause_s:.1f} s" if pause_s else "")
        self.restarts += 1
        self._ended(text)
        self._timer = self._loop.call_later(pause_s, self._restart)

    def _restart(self) -> None:
        try:
            self.start()
        except OSError as exc:
            pause_s = self._backoff.ended(self._loop.time())
            _log.error("cannot start %s: %s, trying again in %.1f s", self.name, exc.strerror, pause_s)
            self._timer = self._loop.call_later(pause_s, self._restart)
