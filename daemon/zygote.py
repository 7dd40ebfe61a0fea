"""The zygote: a process that has imported all that a worker needs, and forks one when the supervisor says so.

A fork takes milliseconds where a fresh Python would take a third of a second, and what is imported is shared memory.
Facts that shape this file:

* Only the forking thread lives on in the child, so this process must never have another: no event loop, no ring, and
  a tokenizer and a numpy that are told before their import to start no thread pool. It is asserted before each fork.
* A reference count is a write, and a write copies the page. `gc.freeze` keeps at least the collector from touching
  what was imported; it is called again after each preload.
* The pidfd of a child becomes readable when the child ends, so one poll waits for everything.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final

from seedance.daemon.links import (
    ZYGOTE_ORDERS,
    ZYGOTE_REPORTS,
    Exited,
    Preload,
    Preloaded,
    Query,
    Spawn,
    Spawned,
    SpawnFailed,
    WorkerSettings,
    ZygoteReady,
    ZygoteReport,
)
from seedance.daemon.logs import start_logging
from seedance.daemon.process import LINK_FD, WORKER_SLICE_S, begin, close_all_but, set_name, shorten_slice
from seedance.engine.packets import MAX_PACKET_BYTES
from seedance.errors import RemoteProtocolError

_log = logging.getLogger(__name__)

_SPAWN_DESCRIPTORS: Final = 4
_CRASHED: Final = 70  # EX_SOFTWARE of sysexits.h

Run = Callable[[socket.socket, socket.socket, socket.socket, int, WorkerSettings], int]


class Zygote:
    """The loop of the zygote; `run_worker` is what a child does, `preload` loads a tokenizer."""

    def __init__(self, link: socket.socket, run_worker: Run, preload: Callable[[str], object]) -> None:
        self._link = link
        self._run_worker = run_worker
        self._preload = preload
        self._poll = select.poll()
        self._children: dict[int, tuple[int, int]] = {}  # pidfd: (worker number, pid)

    def serve(self) -> None:
        """Fork workers until the supervisor closes the link."""
        gc.collect()
        gc.freeze()
        self._link.setblocking(True)
        self._poll.register(self._link, select.POLLIN)
        self._report(ZygoteReady())
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._link.fileno():
                    self._child_ended(fd)
                elif not self._order_arrived():
                    return

    def _order_arrived(self) -> bool:
        """Take one order; returns whether the link still stands."""
        data, fds, flags, _ = socket.recv_fds(self._link, MAX_PACKET_BYTES, _SPAWN_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        try:
            if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                return False
            order = ZYGOTE_ORDERS.decode(data)
            if isinstance(order, Preload):
                self._load(order.tokenizer_dir)
            elif isinstance(order, Query):
                self._report(ZygoteReady())
            elif len(fds) == _SPAWN_DESCRIPTORS:
                self._fork(order, fds)
            else:
                self._report(SpawnFailed(order.worker, f"{len(fds)} descriptors came with the order"))
        except RemoteProtocolError as exc:
            _log.error("%s", exc)
            return False
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _load(self, tokenizer_dir: str) -> None:
        reason = ""
        try:
            self._preload(tokenizer_dir)
        except (OSError, ValueError) as exc:
            reason = str(exc)
            _log.error("cannot load the tokenizer in '%s': %s", tokenizer_dir, exc)
        gc.collect()
        gc.freeze()
        self._report(Preloaded(tokenizer_dir, reason))

    def _fork(self, order: Spawn, fds: list[int]) -> None:
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
        try:
            pid = os.fork()
        except OSError as exc:
            self._report(SpawnFailed(order.worker, exc.strerror or str(exc)))
            return
        if pid == 0:
            _be_worker(self._run_worker, order.settings, fds)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = order.worker, pid
        self._poll.register(pidfd, select.POLLIN)
        self._report(Spawned(order.worker, pid), pidfd)

    def _child_ended(self, pidfd: int) -> None:
        worker, pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._report(Exited(worker, os.waitstatus_to_exitcode(status)))

    def _report(self, report: ZygoteReport, *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the end is read at the next turn
            self._link.sendmsg([ZYGOTE_REPORTS.encode(report)], rights)


def _be_worker(run_worker: Run, settings: WorkerSettings, fds: list[int]) -> None:
    """Become the worker; never returns: what is on the zygote's stack is none of the worker's business."""
    status = _CRASHED
    try:
        close_all_but(fds)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        name = f"seed-w:{settings.quota.tenant}"
        set_name(name)
        shorten_slice(WORKER_SLICE_S)
        start_logging(name, settings.log_level, tenant=settings.quota.tenant)
        *links, journal_fd = fds
        handover, engine, control = (socket.socket(fileno=fd) for fd in links)
        status = run_worker(handover, engine, control, journal_fd, settings)
    except BaseException:
        _log.exception("the worker crashed")
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Run the zygote on the link that the supervisor left."""
    begin("zygote", sys.argv[1:])
    # Read when the modules are imported; their thread pools would not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    worker = importlib.import_module("seedance.daemon.worker")
    cache = importlib.import_module("seedance.daemon.tokenizer_cache")
    Zygote(socket.socket(fileno=LINK_FD), worker.run, cache.tokenizer_in).serve()
    os._exit(0)  # taking apart what was imported would only hold up the daemon's end


if __name__ == "__main__":
    main()
