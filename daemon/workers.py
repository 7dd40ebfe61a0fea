"""The supervisor's side of the workers: one for each tenant with connections, forked by the zygote when first wanted.

A worker has three sockets, all made here: the handover link from the gateway, the engine channel from the host, and
the control link. The supervisor keeps a copy of the gateway's end of the handover link, so that a gateway that died is
followed by another one on the same links and workers do not notice. When a worker has been idle, that copy and the
gateway's are closed: the worker reads the end, finishes what raced with it, and exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from seedance.daemon.children import Backoff, Reaper, Survey, exit_text, has_child, wait_set
from seedance.daemon.links import (
    LAST_WORDS_S,
    WORKER_ORDERS,
    WORKER_REPORTS,
    Drain,
    EngineChannel,
    Exited,
    GatewayOrder,
    LimiterState,
    Query,
    QuotaChanged,
    Spawn,
    Spawned,
    SpawnFailed,
    WorkerAttached,
    WorkerDetached,
    WorkerFailed,
    WorkerIdle,
    WorkerOrder,
    WorkerReady,
    WorkerSettings,
    WorkerStatistics,
    ZygoteOrder,
)
from seedance.daemon.log_store import LogStore
from seedance.daemon.ring.driver import DriverStatistics
from seedance.engine.host_link import Attach, Detach, ToHost
from seedance.engine.packets import PacketSocket, pair
from seedance.engine.request import TenantContext
from seedance.errors import KernelError
from seedance.qos.limiter import LimiterSnapshot, LimiterStatistics
from seedance.qos.quota import Quota

_log = logging.getLogger(__name__)

REMOVED_TENANT_DRAIN_S: Final = 10.0
_KILL_AFTER_S: Final = 2.0
# A worker that ends earlier than this, so many times in a row, may do so because of what is in its journal.
_EARLY_S: Final = 1.0
_EARLY_ENDS: Final = 4
# A connection waits so long for its tenant's worker to be started again; behind a longer pause it is refused.
_LONGEST_WAIT_S: Final = 1.0


class Neighbours(Protocol):
    """How the workers' keeper speaks to the other processes; each does nothing while that process is down."""

    def to_gateway(self, order: GatewayOrder, *fds: int) -> None:
        """Send to the gateway; descriptors stay the caller's."""

    def to_zygote(self, order: ZygoteOrder, *fds: int) -> None:
        """Send to the zygote; descriptors stay the caller's."""

    def to_host(self, order: ToHost, *fds: int) -> None:
        """Send to the engine host; descriptors stay the caller's."""

    def worker_wanted(self, tenant: str) -> None:
        """Call `Workers.wanted` with the tenant's quota, when there is a zygote and still such a tenant."""

    def place_worker(self, pid: int, tenant: str) -> None:
        """Put a process under its tenant's limits in the kernel. Raises KernelError."""

    def tenant_left(self, tenant: str) -> None:
        """Take note that a removed tenant's last worker has ended."""

    def exit_cause(self, tenant: str, status: int) -> str:
        """Return what is known of why a worker has ended that way: "", or text that begins with a comma."""

    def tenant_context(self, quota: Quota) -> TenantContext:
        """Return what the engine is told about a tenant."""

    def worker_settings(self, quota: Quota, limiter: LimiterSnapshot | None) -> WorkerSettings:
        """Return what a new worker is told."""


class Worker:
    """One worker process, from the order to fork it until its control link closes."""

    def __init__(self, number: int, tenant: str, handover: socket.socket) -> None:
        self.number = number
        self.tenant = tenant
        self.handover: socket.socket | None = handover
        self.control: PacketSocket | None = None
        self.channel = 0
        self.pid = 0
        self.pidfd = -1
        self.started_s = 0.0
        self.driver = ""
        self.leaving = False
        self.connections = 0
        self.io: DriverStatistics | None = None

    def send(self, order: WorkerOrder, *fds: int) -> None:
        """Send to the worker; nothing happens once it is gone."""
        if self.control is not None:
            self.control.send(WORKER_ORDERS.encode(order), fds)

    def close_handover(self) -> None:
        """Close our copy of the handover link; with the gateway's closed too, the worker ends when it has finished."""
        if self.handover is not None:
            self.handover.close()
            self.handover = None

    def kill(self) -> None:
        """End the process at once."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close all that belongs to it here."""
        self.close_handover()
        if self.control is not None:
            self.control.close()
            self.control = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Workers:
    """All workers; `current` is the one of each tenant that gets its new connections."""

    def __init__(self, neighbours: Neighbours, reaper: Reaper, logs: LogStore) -> None:
        """`logs` holds the journals, from which a worker goes on with the sessions of the last one."""
        self.current: dict[str, Worker] = {}
        self.used: dict[str, LimiterStatistics] = {}
        self._loop = asyncio.get_running_loop()
        self._neighbours = neighbours
        self._reaper = reaper
        self._logs = logs
        self._early_ends: dict[str, int] = {}
        self._workers: dict[int, Worker] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._not_before_s: dict[str, float] = {}
        self._limiters: dict[str, LimiterSnapshot] = {}
        self._removed: set[str] = set()  # tenants that are none any more, and still have a worker
        self._survey: Survey | None = None
        self._number = 0
        self._channel = 0
        self._all_gone = asyncio.Event()

    def wanted(self, quota: Quota) -> None:
        """Start a worker for this tenant; the gateway gets the link to it once there is a process at its other end.

        A worker that has just ended too soon is started again after a pause; one that keeps ending is refused.
        """
        tenant = quota.tenant
        worker = self.current.get(tenant)
        if worker is not None:
            self._attach_gateway(worker)
            return
        now = self._loop.time()
        self._removed.discard(tenant)
        backoff = self._backoffs.setdefault(tenant, Backoff())
        pause_s = self._not_before_s.get(tenant, now) - now
        if pause_s > _LONGEST_WAIT_S:
            self._neighbours.to_gateway(WorkerFailed(tenant, "the tenant's worker keeps ending"))
            return
        if pause_s > 0:
            self._loop.call_later(pause_s, self._neighbours.worker_wanted, tenant)
            return
        backoff.started(now)
        try:
            self._start(quota)
        except OSError as exc:
            _log.error("cannot start a worker of tenant '%s': %s", tenant, exc.strerror)
            self._neighbours.to_gateway(WorkerFailed(tenant, exc.strerror or "no worker could be started"))

    def _start(self, quota: Quota) -> None:
        with contextlib.ExitStack() as stack:
            handover, their_handover = pair()
            worker = Worker(self._number + 1, quota.tenant, handover)
            stack.push(lambda *failed: worker.close() if failed[0] else None)
            stack.enter_context(their_handover)
            control, their_control = pair()
            stack.enter_context(their_control)
            worker.control = PacketSocket(
                control, self._loop, lambda data, fds: self._reported(worker, data, fds), lambda: self._gone(worker)
            )
            their_engine = stack.enter_context(self._attach_engine(worker, quota))
            settings = self._neighbours.worker_settings(quota, self._limiters.get(quota.tenant))
            journal = self._logs.of(quota.tenant)
            fds = their_handover.fileno(), their_engine.fileno(), their_control.fileno(), journal
            worker.started_s = self._loop.time()
            self._neighbours.to_zygote(Spawn(worker.number, settings), *fds)
        self._number = worker.number
        self._workers[worker.number] = self.current[quota.tenant] = worker
        self._all_gone.clear()

    def _attach_gateway(self, worker: Worker) -> None:
        """Give the gateway its end of the handover link, once there is a process at the other end."""
        if worker.pid and worker.handover is not None:
            self._neighbours.to_gateway(WorkerAttached(worker.tenant, worker.number), worker.handover.fileno())

    def _attach_engine(self, worker: Worker, quota: Quota) -> socket.socket:
        """Give the host one end of a new engine channel for this worker; returns the other."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with ours:
            self._channel += 1
            worker.channel = self._channel
            self._neighbours.to_host(Attach(worker.channel, self._neighbours.tenant_context(quota)), ours.fileno())
        return theirs

    # what the supervisor tells

    def _let_go(self, worker: Worker) -> None:
        """Have a worker end once it has finished; the tenant's next connection gets another one."""
        worker.leaving = True
        worker.close_handover()
        if self.current.get(worker.tenant) is worker:
            del self.current[worker.tenant]
            self._neighbours.to_gateway(WorkerDetached(worker.tenant))

    def quota_changed(self, quota: Quota) -> None:
        """Tell every worker of the tenant, those on their way out too."""
        self._not_before_s.pop(quota.tenant, None)
        for worker in self._of(quota.tenant):
            worker.send(QuotaChanged(quota))

    def tenant_removed(self, tenant: str) -> None:
        """End the tenant's workers soon, whatever they do."""
        self._limiters.pop(tenant, None)
        self._logs.drop(tenant)
        self.used.pop(tenant, None)
        if self._of(tenant):
            self._removed.add(tenant)
        else:
            self._neighbours.tenant_left(tenant)
        for worker in self._of(tenant):
            self._let_go(worker)
            worker.send(Drain(REMOVED_TENANT_DRAIN_S))
            self._loop.call_later(REMOVED_TENANT_DRAIN_S + _KILL_AFTER_S, worker.kill)

    def gateway_started(self) -> None:
        """Give a new gateway the links that the last one had."""
        for worker in self.current.values():
            self._attach_gateway(worker)

    def host_started(self, quotas: Mapping[str, Quota]) -> None:
        """Give every worker a channel to the new engine host."""
        for worker in list(self._workers.values()):
            quota = quotas.get(worker.tenant)
            if worker.control is not None and quota is not None:
                with self._attach_engine(worker, quota) as channel:
                    worker.send(EngineChannel(), channel.fileno())

    def query(self, survey: Survey) -> None:
        """Ask every worker for its statistics; `connections` and `used` are brought up to date by the answers."""
        self._survey = survey
        for worker in self._workers.values():
            if worker.control is not None:
                survey.ask(f"worker {worker.number}")
                worker.send(Query())

    def connections(self) -> Counter[str]:
        """Return how many connections each tenant's workers had when they were last asked."""
        connections: Counter[str] = Counter()
        for worker in self._workers.values():
            connections[worker.tenant] += worker.connections
        return connections

    async def stop(self, deadline_s: float) -> None:
        """End all workers: their streams within `deadline_s`, themselves soon after, or else by force.

        Returns when they are gone.
        """
        for worker in list(self._workers.values()):
            worker.leaving = True
            worker.send(Drain(deadline_s))
            worker.close_handover()
        if self._workers and not await wait_set(self._all_gone, deadline_s + 2 * LAST_WORDS_S):
            for worker in self._workers.values():
                worker.kill()
            await wait_set(self._all_gone, _KILL_AFTER_S)

    def _of(self, tenant: str) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.tenant == tenant]

    # what workers and the zygote tell

    def _reported(self, worker: Worker, data: bytes, fds: list[int]) -> None:
        report = WORKER_REPORTS.decode(data)
        for fd in fds:
            os.close(fd)
        match report:
            case WorkerReady():
                worker.driver = report.driver
                _log.debug("worker of tenant '%s' is ready, on %s", worker.tenant, report.driver)
            case WorkerIdle():
                self._let_go(worker)
            case WorkerStatistics():
                worker.connections = report.connections
                worker.io = report.io
                self.used[worker.tenant] = report.used
                if self._survey is not None:
                    self._survey.answered(f"worker {worker.number}")
            case LimiterState():
                self._limiters[worker.tenant] = report.snapshot
                self._keep_used(worker.tenant, report.snapshot.statistics)

    def _keep_used(self, tenant: str, used: LimiterStatistics) -> None:
        """Take counters from a snapshot, which leaves out the streams that run."""
        known = self.used.get(tenant)
        self.used[tenant] = used if known is None else msgspec.structs.replace(used, streams=known.streams)

    def spawned(self, report: Spawned, pidfd: int) -> None:
        """Take the process that the zygote has forked; owns `pidfd`."""
        worker = self._workers.get(report.worker)
        if worker is None:
            os.close(pidfd)
            return
        worker.pid, worker.pidfd = report.pid, pidfd
        # Should the zygote end before the worker, the worker becomes our child.
        self._reaper.watch(report.pid, lambda status: self.exited(Exited(report.worker, status)))
        try:
            # Before it gets a connection, so before it does anything for the tenant.
            self._neighbours.place_worker(worker.pid, worker.tenant)
        except KernelError as exc:
            _log.error("cannot let the worker of tenant '%s' run: %s", worker.tenant, exc)
            self._neighbours.to_gateway(WorkerFailed(worker.tenant, "its limits cannot be put in force"))
            worker.kill()
            return
        if self.current.get(worker.tenant) is worker:
            self._attach_gateway(worker)

    def exited(self, report: Exited) -> None:
        """Take the exit status of a worker."""
        worker = self._workers.pop(report.worker, None)
        if worker is None:
            return
        how = exit_text(report.status) + self._neighbours.exit_cause(worker.tenant, report.status)
        self._ended(worker, how, expected=worker.leaving and report.status == 0)

    def zygote_ended(self) -> None:
        """Take the news that the zygote is gone: what it has not told until now nobody will tell.

        The workers that live are this process's children from now on. One whose process was not reported is given up
        (it ends with its links), and the next zygote forks another.
        """
        for worker in list(self._workers.values()):
            if not worker.pid:
                self._gone(worker)
            elif not has_child(worker.pid):
                del self._workers[worker.number]
                self._ended(worker, "ended together with the zygote", expected=worker.leaving)

    def _ended(self, worker: Worker, how: str, *, expected: bool) -> None:
        self._reaper.forget(worker.pid)
        self._gone(worker)
        level = logging.DEBUG if expected else logging.ERROR
        _log.log(
            level, "worker of tenant '%s', pid %d, %s", worker.tenant, worker.pid, how, extra={"tenant": worker.tenant}
        )
        if worker.tenant in self._removed and not self._of(worker.tenant):
            self._removed.discard(worker.tenant)
            self._neighbours.tenant_left(worker.tenant)
        self._check_all_gone()

    def spawn_failed(self, report: SpawnFailed) -> None:
        """Take the news that there is no such worker."""
        worker = self._workers.pop(report.worker, None)
        if worker is not None:
            _log.error("cannot fork a worker of tenant '%s': %s", worker.tenant, report.reason)
            self._gone(worker)

    def _gone(self, worker: Worker) -> None:
        """Forget a worker's links; the gateway sees the end of its own, and asks again if a connection waits."""
        if worker.control is None:
            return
        worker.close()
        worker.connections = 0
        if worker.tenant in self.used:
            self.used[worker.tenant] = msgspec.structs.replace(self.used[worker.tenant], streams=0)
        if self.current.get(worker.tenant) is worker:
            del self.current[worker.tenant]
        self._neighbours.to_host(Detach(worker.channel))
        if not worker.leaving:
            now = self._loop.time()
            pause_s = self._backoffs[worker.tenant].ended(now)
            self._not_before_s[worker.tenant] = now + pause_s
            self._follow(worker, now, pause_s)
        elif not self._logs.sessions(worker.tenant) and worker.tenant not in self.current:
            self._logs.drop(worker.tenant)
        if not worker.pid:  # it was never forked: nobody will tell how it ended
            self._workers.pop(worker.number, None)
            self._check_all_gone()
            if not worker.leaving:
                self._neighbours.worker_wanted(worker.tenant)

    def _follow(self, worker: Worker, now: float, pause_s: float) -> None:
        """Start another worker when this one has left sessions; they do not wait for a connection."""
        tenant = worker.tenant
        early = self._early_ends.get(tenant, 0) + 1 if now - worker.started_s < _EARLY_S else 0
        self._early_ends[tenant] = early
        sessions = self._logs.sessions(tenant)
        if sessions and early >= _EARLY_ENDS:
            _log.error("the worker of tenant '%s' keeps ending: its %d sessions are given up", tenant, sessions)
            self._logs.drop(tenant)
        elif sessions and worker.pid:
            self._loop.call_later(pause_s, self._neighbours.worker_wanted, tenant)

    def _check_all_gone(self) -> None:
        if not self._workers:
            self._all_gone.set()
