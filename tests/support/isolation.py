"""Limits of a running service, measured from outside: processor time by its cgroup, bytes on the clients' device."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
from support.live import percentile
from support.system_service import CGROUP, PINS, PORT, Service, command, wait_until
from support.tenant_load import MODEL, READY, Outcome
from support.wire import Clients

from seedance.bpf.abi import MARK_BASE
from seedance.daemon import control
from seedance.daemon.control import StatusReport, TenantStatus
from seedance.qos.usage import TenantUsage

CONTROL: Final = "/run/seedance/control.sock"
SECONDS: Final = 20.0
"""How long a limit is watched."""

TABLES: Final[dict[str, dict[str, Any]]] = {
    "engine": {"kind": "synthetic", "name": MODEL},
    "engine.synthetic": {"tokens_per_s": 10},
    # So little is kept for a connection that no answers are made in heaps: meanwhile its socket would run dry.
    "worker": {"max_backlog": "128KiB"},
}
"""Of the configuration: a pace that an emulated machine can keep."""

CPU_CORES: Final = 0.5
EGRESS_BYTES_PER_S: Final = 1_000_000  # 8 Mbit/s
INGRESS_BYTES_PER_S: Final = 500_000  # 4 Mbit/s
MEMORY: Final = "96MiB"
STREAMS: Final = "[tokens]\nstreams = 512\n"
NETWORK_LIMIT: Final = f'[network]\negress = "8Mbit"\ningress = "4Mbit"\n{STREAMS}'
MEMORY_LIMIT: Final = f'[memory]\nmax = "{MEMORY}"\n{STREAMS}'


@dataclasses.dataclass(frozen=True)
class Enforced:
    """A tenant's limits: microseconds of processor time in 100 ms, bytes a second."""

    cpu_us: int
    egress_bytes_per_s: int


ACME: Final = Enforced(50_000, EGRESS_BYTES_PER_S)


def limits(cpu: str, egress: str) -> str:
    """Return a quota file's limits."""
    return f'[cpu]\nmax = "{cpu}"\n[network]\negress = "{egress}"\n{STREAMS}'


QUOTAS: Final = {"acme": limits("50%", "8Mbit"), "bolt": NETWORK_LIMIT, "crux": STREAMS, "dune": MEMORY_LIMIT}

HORIZON_S: Final = 2.0
"""What is to leave later than that is dropped (egress.bpf.c)."""

MANY: Final = 50
"""Connections of a tenant that has many."""

_FILLED_S: Final = 4
_AT_ONCE: Final = ("chrt", "--fifo", "1")
Turn = Literal["first", "fair", "last"]
"""When clients run: before all else, as everybody does, or when nothing else wants to."""


def status() -> StatusReport:
    """Return the daemon's own account."""
    found = control.ask(CONTROL, control.GetStatus())
    assert isinstance(found, StatusReport), found
    return found


def tenant_status(name: str) -> TenantStatus:
    """Return the daemon's account of one tenant."""
    return next(tenant for tenant in status().tenants if tenant.quota.tenant == name)


def tenant_usage(name: str) -> TenantUsage:
    """Return what the kernel has counted for one tenant."""
    found = tenant_status(name).usage
    assert found is not None
    return found


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


@contextlib.contextmanager
def serving() -> Iterator[Service]:
    """Have the service run with four tenants: limits for acme's processor time, bolt's network, dune's memory."""
    found = Service()
    found.configure(TABLES)
    try:
        for name, quota in QUOTAS.items():
            found.add_tenant(name, quota)
        found.start()
        yield found
    finally:
        found.remove()


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
def load(clients: Clients, kind: str, key: str, connections: int, turn: Turn = "last") -> Iterator[Running]:
    """Run clients of a tenant (see `tenant_load`) until the end of the block."""
    words = (kind, f"{clients.server}:{PORT}", key, str(connections))
    last = ("sh", "-c", f'echo 0 > {clients.group}/cgroup.procs && exec "$@"', "sh")
    place = {"first": _AT_ONCE, "fair": (), "last": last}[turn]
    with clients.namespace:
        process = subprocess.Popen(
            [*place, sys.executable, "-m", "support.tenant_load", *words],
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
    with load(clients, "prompts", key, 3), load(clients, "huge", key, 3):
        before = cpu_stat(tenant)["nr_throttled"]
        wait_until(lambda: cpu_stat(tenant)["nr_throttled"] > before + 20, "the tenant is throttled")
        before = cpu_stat(tenant)["nr_throttled"]
        cores = rate(lambda: cpu_stat(tenant)["usage_usec"], seconds) / 1e6
        return cores, cpu_stat(tenant)["nr_throttled"] - before


@dataclasses.dataclass(frozen=True)
class Carried:
    """What the clients' device carried in one direction, and what the kernel dropped of it meanwhile."""

    bytes_per_s: float
    dropped_packets: int


def wire_rate(
    clients: Clients, tenant: str, key: str, direction: str, connections: int, seconds: float = SECONDS
) -> Carried:
    """Return what is on the clients' device while a tenant's clients take, or send, what they can.

    That begins when they are at the limit. Before that the kernel drops what connections send that all begin at once:
    how fast each of them may send is known only when it has sent something.
    """
    kind, count = ("answers", clients.received_bytes) if direction == "egress" else ("bodies", clients.sent_bytes)
    limit = getattr(tenant_status(tenant).quota.network, f"{direction}_bytes_per_s")

    def counted(what: str) -> int:
        found: int = getattr(tenant_usage(tenant), f"{direction}_{what}")
        return found

    with load(clients, kind, key, connections, "fair"):
        # What a client sends before it is known whose it is, a window of each connection, counts for nobody.
        first = counted("bytes")
        wait_until(lambda: counted("bytes") > first + _FILLED_S * limit, f"{direction} is filled")
        dropped = counted("dropped_packets")
        bytes_per_s = rate(count, seconds)
        return Carried(bytes_per_s, counted("dropped_packets") - dropped)


# --- a change ------------------------------------------------------------------------------------------------------


def index_of(tenant: str) -> int:
    """Return a tenant's key in the maps."""
    return tenant_status(tenant).mark - MARK_BASE


def in_cgroup(tenant: str) -> int:
    """Return the processor time of a period that the cgroup has."""
    return int((CGROUP / "tenants" / tenant / "cpu.max").read_text().split()[0])


def in_map(index: int) -> int:
    """Return the egress rate in the map that the programs read, as bpftool tells it."""
    entries = json.loads(command("bpftool", "--json", "map", "dump", "pinned", str(PINS / "tenant_limits")))
    [value] = [entry["formatted"]["value"] for entry in entries if entry["formatted"]["key"] == index]
    return int(value["egress_bytes_per_s"])


def in_status(tenant: str) -> Enforced:
    """Return what the daemon says, which is what `seedancectl tenant show` prints."""
    quota = tenant_status(tenant).quota
    return Enforced(round((quota.cpu.max_cores or 0) * 100_000), quota.network.egress_bytes_per_s or 0)


def enforced(tenant: str) -> tuple[int, int, Enforced]:
    """Return a tenant's limits as each place has them."""
    return in_cgroup(tenant), in_map(index_of(tenant)), in_status(tenant)


def change(service: Service, tenant: str, cpu: str, egress: str, wanted: Enforced, place: str) -> float:
    """Write a tenant's file, and return how long it took until the new limits were seen in a place, seconds.

    One place at a time, because looking takes its time too, on an emulated machine a good part of a second.
    """
    index = index_of(tenant)
    holds: dict[str, Callable[[], bool]] = {
        "cpu.max": lambda: in_cgroup(tenant) == wanted.cpu_us,
        "map": lambda: in_map(index) == wanted.egress_bytes_per_s,
        "status": lambda: in_status(tenant) == wanted,
    }
    service.add_tenant(tenant, limits(cpu, egress))
    return wait_until(holds[place], f"{tenant} has {wanted}")


# --- the neighbour -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """The times between a neighbour's tokens, seconds, of all runs without load, and of all with it."""

    quiet_s: list[float]
    loaded_s: list[float]

    @property
    def quiet_p99_s(self) -> float:
        return percentile(self.quiet_s, 0.99)

    @property
    def loaded_p99_s(self) -> float:
        return percentile(self.loaded_s, 0.99)

    @property
    def p99_loss(self) -> float:
        """By how much the 99th percentile grows, relatively."""
        return self.loaded_p99_s / self.quiet_p99_s - 1


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
    streams: int = 8,
) -> Neighbour:
    """Return what a load does to a tenant that does not belong to it: runs without and with it, in turns."""
    phases: list[tuple[bool, float, float]] = []

    def phase(is_loaded: bool) -> None:
        time.sleep(_FILLED_S)
        began = time.time()
        time.sleep(seconds)
        phases.append((is_loaded, began, time.time()))

    clients.leave_segmenting(is_device=True)
    with load(clients, "tokens", key, streams, "first") as running:
        for _ in range(pairs):
            phase(False)
            with loads():
                phase(True)
    clients.leave_segmenting(is_device=False)
    arrivals = running.outcome.arrivals
    assert len(arrivals) == streams
    assert not running.outcome.ended, running.outcome.ended
    found = Neighbour([], [])
    for is_loaded, began, ended in phases:
        (found.loaded_s if is_loaded else found.quiet_s).extend(gaps(arrivals, began, ended))
    return found


LOADS: Final[dict[str, tuple[tuple[str, str, int], ...]]] = {
    "cpu": (("prompts", "acme", 3), ("huge", "acme", 3)),
    "egress": (("answers", "bolt", MANY),),
    "ingress": (("bodies", "bolt", MANY),),
}
"""By limit, what has a tenant at it: kind of load, tenant, connections."""


@contextlib.contextmanager
def at_limits(clients: Clients, service: Service, *limits: str) -> Iterator[None]:
    """Have tenants at these limits."""
    with contextlib.ExitStack() as stack:
        for kind, tenant, connections in itertools.chain.from_iterable(LOADS[limit] for limit in limits):
            stack.enter_context(load(clients, kind, service.keys[tenant], connections))
        yield
