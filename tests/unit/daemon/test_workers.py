"""The supervisor's side of the workers, with the test as gateway, zygote, engine host and worker."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from seedance.daemon import links
from seedance.daemon.children import Reaper
from seedance.daemon.config import HttpConfig, WorkerConfig
from seedance.daemon.log_store import LogStore
from seedance.daemon.shared_log import SharedLog
from seedance.daemon.workers import Workers
from seedance.engine.host_link import Attach, Detach
from seedance.engine.request import TenantContext
from seedance.errors import KernelError
from seedance.qos.limiter import LimiterSnapshot, LimiterStatistics
from seedance.qos.quota import Quota

ACME = Quota(tenant="acme")


class Sides:
    """What each process was told, with descriptors of our own."""

    def __init__(self) -> None:
        self.told: dict[str, list[Any]] = {who: [] for who in ("gateway", "zygote", "host", "wanted", "placed", "left")}
        self.refuses_place = False
        self.fds: list[int] = []
        self.stored: list[str] = []
        self.discarded: list[str] = []
        self.logs = LogStore({}, self._store, self._discard)
        self.workers = Workers(self, Reaper(asyncio.get_running_loop()), self.logs)

    def _store(self, name: str, fd: int) -> bool:
        self.stored.append(name)
        return True

    def _discard(self, name: str) -> bool:
        self.discarded.append(name)
        return True

    def _take(self, who: str, order: Any, fds: tuple[int, ...]) -> None:
        copies = [os.dup(fd) for fd in fds]
        self.fds += copies
        self.told[who].append((order, copies))

    def to_gateway(self, order: Any, *fds: int) -> None:
        self._take("gateway", order, fds)

    def to_zygote(self, order: Any, *fds: int) -> None:
        self._take("zygote", order, fds)

    def to_host(self, order: Any, *fds: int) -> None:
        self._take("host", order, fds)

    def worker_wanted(self, tenant: str) -> None:
        self.told["wanted"].append((tenant, []))
        self.workers.wanted(Quota(tenant=tenant))

    def place_worker(self, pid: int, tenant: str) -> None:
        if self.refuses_place:
            raise KernelError("write 'cgroup.procs'", errno.EBUSY)
        self.told["placed"].append(((pid, tenant), []))

    def tenant_left(self, tenant: str) -> None:
        self.told["left"].append((tenant, []))

    def exit_cause(self, tenant: str, status: int) -> str:
        return ""

    def tenant_context(self, quota: Quota) -> TenantContext:
        return TenantContext(name=quota.tenant, scheduling_class="gold", cache_salt="salt")

    def worker_settings(self, quota: Quota, limiter: LimiterSnapshot | None) -> links.WorkerSettings:
        return links.WorkerSettings(
            quota=quota,
            worker=WorkerConfig(),
            http=HttpConfig(),
            log_level="info",
            session_key=b"key",
            limiter=limiter,
        )

    def last(self, who: str) -> tuple[Any, list[int]]:
        order: tuple[Any, list[int]] = self.told[who][-1]
        return order

    def spawn(self, pid: int | None = None) -> FakeWorker:
        """Be the zygote, and the worker that was ordered last; `pid` is a process that may be killed."""
        order, (handover, engine, control, journal) = self.last("zygote")
        assert isinstance(order, links.Spawn)
        for fd in (handover, engine, control, journal):
            self.fds.remove(fd)
        pidfd = os.pidfd_open(pid or os.getpid())
        self.workers.spawned(links.Spawned(order.worker, pid or 1_000_000 + order.worker), pidfd)
        return FakeWorker(order, handover, engine, control, journal)

    def close(self) -> None:
        self.logs.close()
        for fd in self.fds:
            os.close(fd)


class FakeWorker:
    """A worker's own ends."""

    def __init__(self, order: links.Spawn, handover: int, engine: int, control: int, journal: int) -> None:
        self.journal = SharedLog(journal)
        self.number = order.worker
        self.settings = order.settings
        self.handover, self.engine, self.control = (socket.socket(fileno=fd) for fd in (handover, engine, control))

    def report(self, report: links.WorkerReport) -> None:
        self.control.send(links.WORKER_REPORTS.encode(report))

    def orders(self) -> list[links.WorkerOrder]:
        found: list[links.WorkerOrder] = []
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.control, 65536, 1)
            except BlockingIOError:
                return found
            for fd in fds:
                os.close(fd)
            if not data:
                return found
            found.append(links.WORKER_ORDERS.decode(data))

    def die(self) -> None:
        self.journal.close()
        for sock in (self.handover, self.engine, self.control):
            sock.close()


async def _turns() -> None:
    """Let the loop read what was sent."""
    for _ in range(3):
        await asyncio.sleep(0)


def _play(scenario: Callable[[Sides], Awaitable[None]]) -> None:
    async def run() -> None:
        sides = Sides()
        try:
            await scenario(sides)
        finally:
            for worker in list(sides.workers._workers.values()):
                worker.close()
            sides.close()

    asyncio.run(run())


def test_the_gateway_gets_its_link_once_there_is_a_process_at_the_other_end() -> None:
    async def scenario(sides: Sides) -> None:
        sides.workers.wanted(ACME)
        attach, [_] = sides.last("host")
        assert isinstance(attach, Attach)
        assert attach.tenant.name == "acme"
        assert sides.told["gateway"] == []
        sides.workers.wanted(ACME)  # asked again, as a new gateway would
        assert len(sides.told["zygote"]) == 1
        worker = sides.spawn()
        attached, [fd] = sides.last("gateway")
        assert attached == links.WorkerAttached("acme", 1)
        os.write(fd, b"through")
        assert worker.handover.recv(100) == b"through"
        os.write(sides.last("host")[1][0], b"tokens")
        assert worker.engine.recv(100) == b"tokens"
        worker.report(links.WorkerReady("epoll"))
        await _turns()
        assert sides.workers.current["acme"].driver == "epoll"
        worker.die()

    _play(scenario)


def test_a_worker_is_under_its_limits_before_it_gets_a_connection() -> None:
    async def scenario(sides: Sides) -> None:
        sides.workers.wanted(ACME)
        attached_before = len(sides.told["gateway"])
        worker = sides.spawn()
        assert sides.told["placed"] == [((1_000_000 + worker.number, "acme"), [])]
        assert len(sides.told["gateway"]) == attached_before + 1
        worker.die()

    _play(scenario)


def test_a_worker_that_cannot_be_put_under_its_limits_never_serves() -> None:
    async def scenario(sides: Sides) -> None:
        sides.refuses_place = True
        sides.workers.wanted(ACME)
        with subprocess.Popen(["sleep", "60"]) as process:
            worker = sides.spawn(process.pid)
            assert process.wait(5) == -signal.SIGKILL
        assert sides.last("gateway")[0] == links.WorkerFailed("acme", "its limits cannot be put in force")
        worker.die()

    _play(scenario)


@pytest.mark.parametrize("comes_back", [False, True])
def test_the_limits_of_a_removed_tenant_go_with_its_last_worker(comes_back: bool) -> None:
    async def scenario(sides: Sides) -> None:
        sides.workers.wanted(ACME)
        worker = sides.spawn()
        sides.workers.tenant_removed("acme")
        assert sides.told["left"] == []
        if comes_back:
            sides.workers.wanted(ACME)
        worker.die()
        await _turns()
        sides.workers.exited(links.Exited(worker.number, 0))
        assert sides.told["left"] == ([] if comes_back else [("acme", [])])
        sides.workers.tenant_removed("globex")
        assert sides.told["left"][-1:] == [("globex", [])]

    _play(scenario)


def test_an_idle_worker_is_let_go_and_the_next_one_starts_where_it_ended() -> None:
    async def scenario(sides: Sides) -> None:
        sides.workers.wanted(ACME)
        first = sides.spawn()
        snapshot = LimiterSnapshot(wall=1.0, statistics=LimiterStatistics(requests=3))
        first.report(links.LimiterState(snapshot))
        first.report(links.WorkerIdle())
        await _turns()
        assert sides.last("gateway")[0] == links.WorkerDetached("acme")
        assert "acme" not in sides.workers.current
        sides.workers.wanted(ACME)
        second = sides.spawn()
        assert second.settings.limiter == snapshot
        assert sides.workers.used["acme"].requests == 3
        # The first one ends in its own time, which is no failure: nobody has to wait for the next.
        first.die()
        await _turns()
        assert isinstance(sides.last("host")[0], Detach)
        sides.workers.exited(links.Exited(first.number, 0))
        assert sides.workers.current["acme"].number == second.number
        second.die()

    _play(scenario)


def test_a_worker_that_ends_at_once_is_started_again_after_a_pause_and_then_refused() -> None:
    async def scenario(sides: Sides) -> None:
        refused = 0
        for _ in range(6):
            started = len(sides.told["zygote"])
            sides.workers.wanted(ACME)
            if isinstance(sides.told["gateway"] and sides.last("gateway")[0], links.WorkerFailed):
                refused += 1
                break
            async with asyncio.timeout(3):
                while len(sides.told["zygote"]) == started:
                    await asyncio.sleep(0.01)
            worker = sides.spawn()
            worker.die()
            await _turns()
            sides.workers.exited(links.Exited(worker.number, 1))
        assert refused == 1
        assert len(sides.told["zygote"]) == 5  # at once, then after 0.1, 0.2, 0.4 and 0.8 s
        # A changed quota may have been the cure.
        sides.workers.quota_changed(ACME)
        sides.workers.wanted(ACME)
        assert len(sides.told["zygote"]) == 6

    _play(scenario)


@pytest.mark.parametrize("how", ["refused", "lost"])
def test_a_worker_that_was_never_forked_is_ordered_again(how: str) -> None:
    async def scenario(sides: Sides) -> None:
        sides.workers.wanted(ACME)
        order, fds = sides.last("zygote")
        for fd in fds:  # the zygote closes them, or dies with them
            sides.fds.remove(fd)
            os.close(fd)
        if how == "refused":
            sides.workers.spawn_failed(links.SpawnFailed(order.worker, "no memory"))
        await _turns()
        assert sides.told["wanted"] == [("acme", [])]
        async with asyncio.timeout(3):
            while len(sides.told["zygote"]) == 1:
                await asyncio.sleep(0.01)
        worker = sides.spawn()
        assert sides.last("gateway")[0] == links.WorkerAttached("acme", 2)
        worker.die()

    _play(scenario)


def test_what_a_dead_zygote_has_not_told_is_not_waited_for() -> None:
    async def scenario(sides: Sides) -> None:
        with subprocess.Popen(["sleep", "60"]) as lives:
            sides.workers.wanted(ACME)
            worker = sides.spawn(lives.pid)
            sides.workers.wanted(Quota(tenant="bolt"))
            reaped = sides.spawn()  # no child of ours: the zygote has reaped it, and died before it could say so
            sides.workers.wanted(Quota(tenant="cole"))
            _, fds = sides.last("zygote")  # forked, and not told: its links stay open
            sides.workers.zygote_ended()
            assert list(sides.workers.current) == ["acme"]
            assert sides.told["wanted"] == [("cole", [])]
            assert worker.orders() == []
            for fd in (fds[0], fds[2]):
                with socket.socket(fileno=os.dup(fd)) as link:
                    assert link.recv(1) == b"", "it would live on"
            lives.kill()
            sides.workers.exited(links.Exited(worker.number, -9))
            async with asyncio.timeout(3):
                while len(sides.told["zygote"]) == 3:
                    await asyncio.sleep(0.01)
            assert sides.last("zygote")[0].settings.quota.tenant == "cole"
            reaped.die()
            worker.die()

    _play(scenario)


def test_everyone_of_a_tenant_learns_its_quota_and_its_end() -> None:
    async def scenario(sides: Sides) -> None:
        sides.workers.wanted(ACME)
        old = sides.spawn()
        old.report(links.WorkerIdle())
        await _turns()
        sides.workers.wanted(ACME)
        new = sides.spawn()
        changed = Quota(tenant="acme", scheduling_class="gold")
        sides.workers.quota_changed(changed)
        assert old.orders() == new.orders() == [links.QuotaChanged(changed)]
        sides.workers.tenant_removed("acme")
        assert old.orders() == new.orders() == [links.Drain(10.0)]
        assert sides.workers.current == {}
        old.die()
        new.die()

    _play(scenario)


def test_a_new_gateway_gets_the_links_and_a_new_host_new_channels() -> None:
    async def scenario(sides: Sides) -> None:
        sides.workers.wanted(ACME)
        worker = sides.spawn()
        sides.told["gateway"].clear()
        sides.workers.gateway_started()
        assert [order for order, _ in sides.told["gateway"]] == [links.WorkerAttached("acme", 1)]
        first, _ = sides.told["host"][0]
        sides.workers.host_started({"acme": ACME})
        second, _ = sides.last("host")
        assert second.channel != first.channel
        assert worker.orders() == [links.EngineChannel()]
        worker.die()

    _play(scenario)


def test_stopping_drains_and_waits_for_the_last_exit() -> None:
    async def scenario(sides: Sides) -> None:
        sides.workers.wanted(ACME)
        worker = sides.spawn()
        stopping = asyncio.create_task(sides.workers.stop(5))
        await _turns()
        assert worker.orders() == [links.Drain(5)]
        worker.die()
        await _turns()
        assert not stopping.done()
        sides.workers.exited(links.Exited(worker.number, 0))
        await asyncio.wait_for(stopping, 1)

    _play(scenario)


def test_a_worker_that_dies_with_sessions_is_followed_by_one_that_has_its_journal() -> None:
    async def scenario(sides: Sides) -> None:
        sides.workers.wanted(ACME)
        first = sides.spawn()
        assert sides.stored == ["sessions-acme"]
        first.journal.replace([b"what there was"])
        first.journal.set_count(2)
        first.die()
        await _turns()
        async with asyncio.timeout(3):
            while len(sides.told["zygote"]) == 1:
                await asyncio.sleep(0.01)
        second = sides.spawn()
        assert second.journal.read() == [b"what there was"]
        assert sides.last("gateway")[0] == links.WorkerAttached("acme", 2)
        assert (sides.stored, sides.discarded) == (["sessions-acme"], [])
        second.die()

    _play(scenario)


def test_without_sessions_nobody_follows_and_the_journal_goes_with_who_left_in_peace() -> None:
    async def scenario(sides: Sides) -> None:
        sides.workers.wanted(ACME)
        worker = sides.spawn()
        worker.die()
        await _turns()
        await asyncio.sleep(0.2)
        assert (len(sides.told["zygote"]), sides.discarded) == (1, [])
        sides.workers.wanted(ACME)
        worker = sides.spawn()
        worker.report(links.WorkerIdle())
        await _turns()
        worker.die()
        await _turns()
        assert sides.discarded == ["sessions-acme"]
        assert sides.logs.tenants == []

    _play(scenario)


def test_sessions_that_end_every_worker_are_given_up() -> None:
    async def scenario(sides: Sides) -> None:
        sides.workers.wanted(ACME)
        ends = 0
        while not sides.discarded:
            started = len(sides.told["zygote"])
            worker = sides.spawn()
            worker.journal.set_count(1)
            worker.die()
            ends += 1
            await _turns()
            async with asyncio.timeout(3):
                while not sides.discarded and len(sides.told["zygote"]) == started:
                    await asyncio.sleep(0.01)
        assert ends == 4

    _play(scenario)


def test_the_sessions_of_a_removed_tenant_go_at_once() -> None:
    async def scenario(sides: Sides) -> None:
        sides.workers.wanted(ACME)
        worker = sides.spawn()
        worker.journal.set_count(1)
        sides.workers.tenant_removed("acme")
        assert sides.discarded == ["sessions-acme"]
        worker.die()

    _play(scenario)
