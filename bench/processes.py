"""Processes under measurement: started on chosen cores, spoken to by lines, read from /proc, ended by pid."""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

STOP_S: Final = 15.0
_CPUCLOCK_SCHED: Final = 2
_TICK_NS: Final = 10**9 // os.sysconf("SC_CLK_TCK")


class BenchError(Exception):
    """The comparison cannot go on; the text says why."""


def end_in_order() -> None:
    """Have SIGTERM unwind this process, so that it ends what it has started."""

    def terminated(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, terminated)


def default_cores() -> tuple[str, str]:
    """Return the cores of a server and of its clients, as the command line has them: all but the last, and the last."""
    usable = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, usable[:-1] or usable)), str(usable[-1])


def add_core_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--server-cores` and `--client-cores`."""
    server, client = default_cores()
    parser.add_argument("--server-cores", type=parse_cores, default=parse_cores(server), help="e.g. 0,1,2")
    parser.add_argument("--client-cores", type=parse_cores, default=parse_cores(client), help="e.g. 3")


def parse_cores(text: str) -> list[int]:
    """Read a list of processors such as "0,1"."""
    return [int(number) for number in text.split(",")]


class LineProcess:
    """A program that takes a command a line and answers a line; `cores` are the processors that it may use."""

    def __init__(self, argv: Sequence[str], cores: Iterable[int], pass_fds: Sequence[int] = ()) -> None:
        self.name = Path(argv[0]).name
        # `taskset` becomes the program: it never runs, nor starts a thread, anywhere else.
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cores)), *argv]
        self._process = subprocess.Popen(pinned, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pass_fds)
        self._pending = b""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def tell(self, command: str) -> None:
        """Send one command. Raises BenchError when the program has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise BenchError(f"cannot tell {self.name} '{command}': it has ended") from exc

    def hear(self, word: str, timeout_s: float) -> list[str]:
        """Return what follows `word` in the next line. Raises BenchError on another line, an end, or a timeout."""
        line = self._line(word, timeout_s)
        first, *rest = line.split()
        if first != word:
            raise BenchError(f"cannot use the answer '{line}' of {self.name}: it should begin with '{word}'")
        return rest

    def ask(self, command: str, word: str, timeout_s: float = 60.0) -> list[str]:
        """Send a command and return what follows `word` in the answer."""
        self.tell(command)
        return self.hear(word, timeout_s)

    def stop(self) -> None:
        """End the program: the end of its commands first, then SIGKILL. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _line(self, awaited: str, timeout_s: float) -> str:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(timeout_s):
                    raise BenchError(f"cannot go on: {self.name} has not said '{awaited}' within {timeout_s:.0f} s")
                data = os.read(fd, 65536)
                if not data:
                    raise BenchError(f"cannot go on: {self.name} has ended before it said '{awaited}'")
                self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        return line.decode()


class Spent(msgspec.Struct, frozen=True):
    """Processor time of a process, ended threads included; `user_ns` is the part that was not spent in the kernel."""

    cpu_ns: int = 0
    user_ns: int = 0

    def __sub__(self, before: Spent) -> Spent:
        return Spent(self.cpu_ns - before.cpu_ns, self.user_ns - before.user_ns)


def spent(pid: int) -> Spent:
    """Return what a process has spent since its start; nothing once it is gone."""
    try:
        # The process's CPU-time clock, numbered as clock_getcpuclockid(3) does: exact, where /proc counts in ticks.
        total_ns = time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Spent()
    return Spent(total_ns, int(fields[11]) * _TICK_NS)


def private_bytes(pid: int) -> int:
    """Return the memory that only this process has, resident or swapped out (`smaps_rollup`)."""
    wanted = {"Private_Clean:", "Private_Dirty:", "Private_Hugetlb:", "Swap:"}
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return sum(int(fields[1]) << 10 for fields in map(str.split, lines) if fields[0] in wanted)


def descendants(pid: int) -> list[int]:
    """Return a process and all that descend from it, those that have moved away included, in no special order."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue
        children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found.extend(children.get(parent, []))
    return found


def spent_by_others(ours: int) -> dict[int, Spent]:
    """Return what each process has spent that does not descend from `ours`, kernel threads included."""
    own = set(descendants(ours))
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {pid: spent(pid) for pid in pids if pid not in own}


def real_time() -> None:
    """Have this process and those that it starts go before all ordinary ones (sched(7), SCHED_RR).

    Raises BenchError when that is not allowed.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except OSError as exc:
        text = f"cannot take a real-time priority: {exc.strerror}; run it as root, or without --real-time"
        raise BenchError(text) from exc


def command_line(pid: int) -> str:
    """Return a process's arguments, as it may have changed them; "" once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def process_name(pid: int) -> str:
    """Return the name that `ps -o comm` shows; "" once it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def end(pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Signal one process; nothing happens when it is gone."""
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return
