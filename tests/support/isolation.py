"""Limits of a running service, measured from outside: processor time by its cgroup, bytes on the clients' device."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
from support.live import percentile
from support.system_service import CGROUP, PORT, Service, wait_until
from support.tenant_load import MODEL, READY, Outcome
from support.wire import Clients

from seedance.daemon import control
from seedance.daemon.control import StatusReport, TenantStatus

CONTROL: Final = "/run/seedance/control.sock"
SECONDS: Final = 20.0
"""How long a limit is watched."""

TABLES: Final[dict[str, dict[str, Any]]] = {
    # Every event of an answer names the model: so each is of a size that fills a network without much work.
    "engine": {"kind": "synthetic", "name": MODEL},
    "engine.synthetic": {"tokens_per_s": 10},
    # A tenant that offers more than its rate lets through piles it up for that long.
    "worker": {"max_backlog": "4MiB"},
}
"""Of the configuration: a pace that an emulated machine can keep."""

CPU_CORES: Final = 0.5
EGRESS_BYTES_PER_S: Final = 1_000_000
INGRESS_BYTES_PER_S: Final = 500_000
MEMORY: Final = "96MiB"
STREAMS: Final = "[tokens]\nstreams = 512\n"
CPU_LIMIT: Final = f'[cpu]\nmax = "50%"\n{STREAMS}'
NETWORK_LIMIT: Final = f'[network]\negress = "8Mbit"\ningress = "4Mbit"\n{STREAMS}'
MEMORY_LIMIT: Final = f'[memory]\nmax = "{MEMORY}"\n{STREAMS}'
NONE: Final = STREAMS

TEXTS: Final = 50
"""Texts at once that need more than the egress rate: an event has 2 kB (MODEL)."""

_FILLED_S: Final = 3
_IN_BACKGROUND: Final = ("chrt", "--idle", "0")
_AT_ONCE: Final = ("chrt", "--fifo", "1")


def status() -> StatusReport:
    """Return the daemon's own account."""
    found = control.ask(CONTROL, control.GetStatus())
    assert isinstance(found, StatusReport), found
    return found


def tenant_status(name: str) -> TenantStatus:
    """Return the daemon's account of one tenant."""
    return next(tenant for tenant in status().tenants if tenant.quota.tenant == name)


def cpu_stat(tenant: str) -> dict[str, int]:
    """Return the cgroup's cpu.stat."""
    lines = (CGROUP / "tenants" / tenant / "cpu.stat").read_text().splitlines()
    return {name: int(value) for name, value in (line.split() for line in lines)}


def rate(count: Callable[[], float], seconds: float = SECONDS) -> float:
    """Return by how much a count grows in a second, over so many."""
    began, first = time.monotonic(), count()
    time.sleep(seconds)
    ended, last = time.monotonic(), count()
    return (last - first) / (ended - began)


# --- load ----------------------------------------------------------------------------------------------------------


class Running:
    """A load; `outcome` is there when it has ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.outcome = Outcome()

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == f"{READY}\n", f"the load ended at once: {line!r}"

    def end(self) -> Outcome:
        self.process.terminate()
        output, _ = self.process.communicate(timeout=60)
        self.outcome = msgspec.convert(json.loads(output), Outcome)
        return self.outcome


@contextlib.contextmanager
def load(
    clients: Clients, kind: str, key: str, connections: int, texts: int = 1, *, is_watcher: bool = False
) -> Iterator[Running]:
    """Run clients of a tenant (see `tenant_load`) until the end of the block.

    They have a machine of their own in reality: here they run when nothing else does, and a watcher before all else.
    """
    words = (kind, f"{clients.server}:{PORT}", key, str(connections), str(texts))
    with clients.namespace:
        process = subprocess.Popen(
            [*(_AT_ONCE if is_watcher else _IN_BACKGROUND), sys.executable, "-m", "support.tenant_load", *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    running = Running(process)
    try:
        running.wait_ready()
        yield running
        running.end()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


# --- limits --------------------------------------------------------------------------------------------------------


def busy_cpu(clients: Clients, tenant: str, key: str, seconds: float = SECONDS) -> tuple[float, int]:
    """Return the cores that a tenant uses which has more to do than it may, and how often it was throttled."""
    with load(clients, "prompts", key, 3), load(clients, "bodies", key, 3):
        before = cpu_stat(tenant)["nr_throttled"]
        wait_until(lambda: cpu_stat(tenant)["nr_throttled"] > before + 20, "the tenant is throttled")
        before = cpu_stat(tenant)["nr_throttled"]
        cores = rate(lambda: cpu_stat(tenant)["usage_usec"], seconds) / 1e6
        return cores, cpu_stat(tenant)["nr_throttled"] - before


def wire_rate(
    clients: Clients, key: str, direction: str, connections: int, seconds: float = SECONDS
) -> tuple[float, Outcome]:
    """Return the bytes a second on the clients' device while a tenant's clients take, or send, what they can."""
    kind, texts, count, limit = (
        ("answers", -(-TEXTS // connections), clients.received_bytes, EGRESS_BYTES_PER_S)
        if direction == "egress"
        else ("bodies", 1, clients.sent_bytes, INGRESS_BYTES_PER_S)
    )
    with load(clients, kind, key, connections, texts) as running:
        first = count()
        wait_until(lambda: count() > first + _FILLED_S * limit, f"{direction} is filled")
        found = rate(count, seconds)
    return found, running.outcome


# --- the neighbour -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    """The p99 of the time between a neighbour's tokens, seconds: without load, and with it."""

    quiet_s: float
    loaded_s: float

    @property
    def loss(self) -> float:
        """By how much it grew, relatively."""
        return self.loaded_s / self.quiet_s - 1


def gaps(arrivals: Sequence[Sequence[float]], began: float, ended: float) -> list[float]:
    """Return the times between the events of each stream, of those that came within a time."""
    return [
        later - earlier
        for stream in arrivals
        for earlier, later in itertools.pairwise(stream)
        if began <= earlier and later <= ended
    ]


def neighbour(
    clients: Clients,
    key: str,
    loads: Callable[[], contextlib.AbstractContextManager[object]],
    pairs: int,
    seconds: float,
    streams: int = 4,
) -> list[Pair]:
    """Return what a load does to a tenant that does not belong to it: runs without and with it, in turns."""
    phases: list[tuple[bool, float, float]] = []

    def phase(is_loaded: bool) -> None:
        began = time.time()
        time.sleep(seconds)
        phases.append((is_loaded, began, time.time()))

    with load(clients, "tokens", key, streams, is_watcher=True) as running:
        for _ in range(pairs):
            phase(False)
            with loads():
                phase(True)
    arrivals = running.outcome.arrivals
    assert len(arrivals) == streams, running.outcome
    found = [percentile(gaps(arrivals, began, ended), 0.99) for _, began, ended in phases]
    return [Pair(*found[at : at + 2]) for at in range(0, len(found), 2)]


def median_loss(pairs: Sequence[Pair]) -> float:
    return statistics.median(pair.loss for pair in pairs)


@contextlib.contextmanager
def everything(clients: Clients, service: Service) -> Iterator[None]:
    """Have acme at its processor limit, and bolt at both of its network limits, by 50 connections each way."""
    with (
        load(clients, "prompts", service.keys["acme"], 3),
        load(clients, "bodies", service.keys["acme"], 3),
        load(clients, "answers", service.keys["bolt"], TEXTS),
        load(clients, "bodies", service.keys["bolt"], TEXTS),
    ):
        before = cpu_stat("acme")["nr_throttled"]
        wait_until(lambda: cpu_stat("acme")["nr_throttled"] > before + 20, "acme is throttled")
        yield
