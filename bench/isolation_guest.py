"""What `bench.isolation` does in the guest: measure the limits of the installed service, and print raw samples as JSON.

python -m bench.isolation_guest SECONDS PAIRS
"""

from __future__ import annotations

import sys

import msgspec
from support import isolation
from support.wire import joined

from bench.report import say

DIRECTIONS = ("egress", "ingress")


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """`wire` has bytes a second by direction and number of connections, `dropped_packets` likewise."""

    cpu_cores: float
    cpu_throttled: int
    wire: dict[str, dict[int, float]]
    dropped_packets: dict[str, dict[int, int]]
    quiet_p99_s: list[float]
    loaded_p99_s: list[float]


def measure(seconds: float, pairs: int) -> Samples:
    """Measure each limit for so many seconds, and a neighbour in so many pairs of runs, each as long."""
    with joined() as clients, isolation.serving() as service:
        say("processor time")
        cores, throttled = isolation.busy_cpu(clients, "acme", service.keys["acme"], seconds)
        found: dict[str, dict[int, isolation.Carried]] = {direction: {} for direction in DIRECTIONS}
        for direction in DIRECTIONS:
            for connections in (1, isolation.MANY):
                say(f"{direction}, {connections} connections")
                found[direction][connections] = isolation.wire_rate(
                    clients, "bolt", service.keys["bolt"], direction, connections, seconds
                )
        say("a neighbour without and with all of it")
        times = isolation.neighbour(
            clients, service.keys["crux"], lambda: isolation.everything(clients, service), pairs, seconds
        )
    return Samples(
        cpu_cores=cores,
        cpu_throttled=throttled,
        wire={name: {n: one.bytes_per_s for n, one in by.items()} for name, by in found.items()},
        dropped_packets={name: {n: one.dropped_packets for n, one in by.items()} for name, by in found.items()},
        quiet_p99_s=[pair.quiet_s for pair in times],
        loaded_p99_s=[pair.loaded_s for pair in times],
    )


if __name__ == "__main__":
    print(msgspec.json.encode(measure(float(sys.argv[1]), int(sys.argv[2]))).decode())
