"""egress_window of egress.bpf.c with real sockets: the bound that the kernel has for a connection's window."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from support import observed
from support.limits import NS_PER_S, LoadedLimits, mark_of, now_ns

from seedance.bpf.abi import TenantPace

observed.require_bpf()

TENANT: Final = 7
RATE: Final = 1_000_000_000
UNBOUND: Final = 0x7FFFFFFF
MILLISECOND: Final = NS_PER_S // 1000

_CONNECTION: Final = """
import json, socket, struct, sys

def bound(server, client):
    for _ in range(5):
        server.sendall(b"token")
        client.recv(5)
        client.sendall(b"!")
        server.recv(1)
    # struct tcp_info (linux/tcp.h): tcpi_snd_mss, tcpi_snd_ssthresh, which is what the bound is, too
    raw = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return {"segment_bytes": struct.unpack_from("I", raw, 16)[0], "segments": struct.unpack_from("I", raw, 76)[0]}

with socket.create_server(("127.0.0.1", 0)) as listener:
    with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, int(sys.argv[1]))
        first = bound(server, client)
        print("bound", flush=True)
        sys.stdin.readline()
        print(json.dumps([first, bound(server, client)]))
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with observed.new_cgroup() as path:
        yield path


@pytest.fixture
def limits(cgroup: Path) -> Iterator[LoadedLimits]:
    with LoadedLimits("egress") as loaded:
        descriptor = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
        try:
            link = loaded.program("egress_window").attach_cgroup(descriptor)
        finally:
            os.close(descriptor)
        yield loaded
        link.close()


def bounds(cgroup: Path, between: Callable[[], object] = lambda: None, mark: int = mark_of(TENANT)) -> list[Any]:
    """Return what bounds a connection's window, before and after something is done."""
    with observed.Child(cgroup, _CONNECTION, str(mark)) as child:
        child.go()
        child.wait_asleep()
        between()
        child.go()
        answer: list[Any] = child.answer()
        return answer


def set_queue(limits: LoadedLimits, queue_ns: int, *, is_paced: bool = True) -> None:
    limits.set_limit(TENANT, egress=RATE)
    limits.pace.set(TENANT, TenantPace(now_ns() + queue_ns, 0, is_paced))


def window_bytes(queue_ns: int) -> float:
    """Return what leaves at RATE in (50 ms)^1.5 / sqrt(queue)."""
    return float(0.05**1.5 / (max(queue_ns, 0) / NS_PER_S + 0.0001) ** 0.5 * RATE)


@pytest.mark.parametrize("queue_ms", [0, 2000, 100_000])
def test_the_longer_the_queue_the_smaller_the_window(cgroup: Path, limits: LoadedLimits, queue_ms: int) -> None:
    began = now_ns()
    set_queue(limits, queue_ms * MILLISECOND)
    first, _ = bounds(cgroup)
    passed_ns = now_ns() - began
    least = window_bytes(queue_ms * MILLISECOND) / first["segment_bytes"] - 1
    most = window_bytes(queue_ms * MILLISECOND - passed_ns) / first["segment_bytes"]
    assert max(least, 2) <= first["segments"] <= max(most, 2)


def test_it_follows_the_queue(cgroup: Path, limits: LoadedLimits) -> None:
    set_queue(limits, 100 * NS_PER_S)
    first, second = bounds(cgroup, lambda: set_queue(limits, 0))
    assert first["segments"] < 10 * second["segments"] < UNBOUND


def test_no_limit_no_bound(cgroup: Path, limits: LoadedLimits) -> None:
    set_queue(limits, NS_PER_S)
    limits.set_limit(TENANT)
    assert [found["segments"] for found in bounds(cgroup)] == [UNBOUND, UNBOUND]


def test_a_bound_goes_with_its_limit(cgroup: Path, limits: LoadedLimits) -> None:
    set_queue(limits, NS_PER_S)
    first, second = bounds(cgroup, lambda: limits.set_limit(TENANT))
    assert first["segments"] < second["segments"] == UNBOUND


def test_what_is_policed_has_no_queue(cgroup: Path, limits: LoadedLimits) -> None:
    set_queue(limits, NS_PER_S, is_paced=False)
    assert [found["segments"] for found in bounds(cgroup)] == [UNBOUND, UNBOUND]


@pytest.mark.parametrize("mark", [0, 0x12340007, mark_of(TENANT + 1)])
def test_connections_of_others_are_left_alone(cgroup: Path, limits: LoadedLimits, mark: int) -> None:
    set_queue(limits, NS_PER_S)
    assert [found["segments"] for found in bounds(cgroup, mark=mark)] == [UNBOUND, UNBOUND]
