"""The limits of tenants that are under load, on a real systemd: what the quota files say is what holds."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import time
from collections.abc import Iterator

import pytest
from support import isolation
from support.system_service import PINS, Service, command, wait_until
from support.tenant_load import MODEL
from support.wire import Clients, joined

WITHIN_S = 1.0
"""From a saved file to the kernel."""


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with joined() as found:
        yield found


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with isolation.serving() as found:
        yield found


def test_processor_time_is_what_the_file_says(service: Service, clients: Clients) -> None:
    cores, throttled = isolation.busy_cpu(clients, "acme", service.keys["acme"])
    print(f"cpu: {cores:.4f} of {isolation.CPU_CORES}, throttled {throttled} times")
    assert cores == pytest.approx(isolation.CPU_CORES, rel=0.02)
    assert throttled > 0


@pytest.mark.parametrize("connections", [1, isolation.MANY])
@pytest.mark.parametrize(
    ("direction", "limit"),
    [("egress", isolation.EGRESS_BYTES_PER_S), ("ingress", isolation.INGRESS_BYTES_PER_S)],
)
def test_the_wire_carries_what_the_file_says(
    service: Service, clients: Clients, direction: str, limit: int, connections: int
) -> None:
    found = isolation.wire_rate(clients, "bolt", service.keys["bolt"], direction, connections)
    print(f"{direction}, {connections}: {found}, {found.bytes_per_s / limit:.4f} of the limit")
    assert found.bytes_per_s == pytest.approx(limit, rel=0.03)
    assert found.dropped_packets == 0


def test_memory_ends_the_culprit_alone(service: Service, clients: Clients) -> None:
    kills = isolation.tenant_usage("dune").oom_kills
    with isolation.load(clients, "tokens", service.keys["crux"], 2, "first") as neighbour:
        wait_until(lambda: isolation.tenant_status("crux").worker_pid, "the neighbour has a worker")
        others = {name: isolation.tenant_status(name).worker_pid for name in ("acme", "bolt", "crux")}
        with isolation.load(clients, "hoard", service.keys["dune"], 30) as hoard:
            wait_until(lambda: isolation.tenant_usage("dune").oom_kills > kills, "dune is over its memory")
            wait_until(lambda: isolation.tenant_status("dune").worker_pid, "dune has a worker again")
            assert service.complete("dune", model=MODEL)["usage"]["completion_tokens"] == 16
    assert hoard.outcome.ended, "a client was left waiting for a worker that is gone"
    assert neighbour.outcome.ended == {}
    assert {name: isolation.tenant_status(name).worker_pid for name in others} == others


def test_a_neighbour_goes_on_at_its_pace(service: Service, clients: Clients) -> None:
    """What becomes of the 99th percentile takes a guest whose clock counts, and more time: `make bench-isolation`."""
    found = isolation.neighbour(
        clients, service.keys["crux"], lambda: isolation.at_limits(clients, service, "cpu"), pairs=1, seconds=15
    )
    print(f"p99 between tokens {found.quiet_p99_s:.4f} s, under load {found.loaded_p99_s:.4f} s: {found.p99_loss:+.4f}")
    assert statistics.median(found.loaded_s) == pytest.approx(statistics.median(found.quiet_s), rel=0.05)
    assert len(found.loaded_s) == pytest.approx(len(found.quiet_s), rel=0.05)


@pytest.fixture
def acme(service: Service) -> Iterator[Service]:
    """The service, and afterwards acme's own file again."""
    yield service
    service.add_tenant("acme", isolation.QUOTAS["acme"])
    wait_until(lambda: isolation.in_status("acme") == isolation.ACME, "acme's own limits are in force")


def test_a_changed_file_is_in_force_within_a_second(acme: Service, clients: Clients) -> None:
    changes = {isolation.Enforced(30_000, 750_000): ("30%", "6Mbit"), isolation.ACME: ("50%", "8Mbit")}
    with (
        isolation.load(clients, "prompts", acme.keys["acme"], 3),
        isolation.load(clients, "answers", acme.keys["bolt"], 10),
    ):
        for place, (wanted, (cpu, egress)) in itertools.product(("cpu.max", "map", "status"), changes.items()):
            seconds = isolation.change(acme, "acme", cpu, egress, wanted, place)
            print(f"{cpu}, {egress}: in {place} after {seconds:.3f} s")
            assert seconds <= WITHIN_S


def test_a_broken_file_changes_nothing(acme: Service) -> None:
    before = isolation.enforced("acme")
    acme.add_tenant("acme", '[cpu]\nmax = "10%"\n[network]\negres = "1Mbit"\n')
    wait_until(lambda: isolation.status().bad_files, "the file is reported")
    [bad] = isolation.status().bad_files
    assert (bad.key, bad.kept) == ("network.egres", True)
    assert isolation.enforced("acme") == before
    shown = command("seedancectl", "tenant", "show", "acme")
    assert "cpu.max = 50%" in shown
    assert "network.egress = 8Mbit" in shown
    with pytest.raises(AssertionError, match="egress"):
        command("seedancectl", "check")


def test_the_limits_outlive_the_supervisor(service: Service, clients: Clients) -> None:
    pinned = programs()
    with isolation.load(clients, "answers", service.keys["bolt"], 10):
        wait_until(lambda: isolation.tenant_usage("bolt").egress_bytes > 4_000_000, "bolt's clients are served")
        old, restarts = service.pid, int(service.show("NRestarts"))
        began, first = time.monotonic(), clients.received_bytes()
        os.kill(old, signal.SIGKILL)
        assert programs() == pinned, "the kernel keeps what is pinned"
        wait_until(lambda: int(service.show("NRestarts")) > restarts, "systemd starts it again")
        wait_until(lambda: service.show("ActiveState") == "active", "it is ready")
        wait_until(lambda: isolation.tenant_usage("bolt").egress_bytes > 4_000_000, "bolt's clients are served")
        sent = clients.received_bytes() - first
        most = isolation.EGRESS_BYTES_PER_S * (time.monotonic() - began + isolation.HORIZON_S)
        assert sent <= 1.03 * most
        assert isolation.rate(clients.received_bytes, 10) == pytest.approx(isolation.EGRESS_BYTES_PER_S, rel=0.03)
    assert programs() == pinned, "it has adopted what was pinned"
    assert old not in service.processes()
    assert {"supervisor", "gateway", "engine"} <= set(service.processes().values())
    for name in service.keys:
        assert service.complete(name, model=MODEL)["usage"]["completion_tokens"] == 16


def programs() -> dict[str, int]:
    """Return the ids of the programs that are attached by way of pins, as bpftool tells them."""
    found = json.loads(command("bpftool", "--json", "--bpffs", "prog", "show"))
    return {
        path: program["id"] for program in found for path in program.get("pinned", ()) if path.startswith(f"{PINS}/")
    }
