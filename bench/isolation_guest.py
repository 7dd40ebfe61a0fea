"""What `bench.isolation` does in the guest: measure the limits of the installed service, and print raw samples as JSON.

python -m bench.isolation_guest limits SECONDS
python -m bench.isolation_guest neighbours SECONDS PAIRS
"""

from __future__ import annotations

import functools
import sys

import msgspec
from support import isolation
from support.wire import joined

from bench.report import say

DIRECTIONS = ("egress", "ingress")


class LimitSamples(msgspec.Struct, frozen=True, kw_only=True):
    """`wire` has bytes a second by direction and number of connections, `dropped_packets` likewise."""

    cpu_cores: float
    cpu_throttled: int
    wire: dict[str, dict[int, float]]
    dropped_packets: dict[str, dict[int, int]]


def limits(seconds: float) -> LimitSamples:
    """Measure each limit for so many seconds."""
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
    return LimitSamples(
        cpu_cores=cores,
        cpu_throttled=throttled,
        wire={name: {n: one.bytes_per_s for n, one in by.items()} for name, by in found.items()},
        dropped_packets={name: {n: one.dropped_packets for n, one in by.items()} for name, by in found.items()},
    )


def neighbours(seconds: float, pairs: int) -> dict[str, isolation.Neighbour]:
    """Return the times between a neighbour's tokens by the limit at which others are, in so many pairs of runs."""
    found = {}
    with joined() as clients, isolation.serving() as service:
        for names in (*((one,) for one in isolation.LOADS), tuple(isolation.LOADS)):
            say(f"a neighbour without and with others at their limits: {', '.join(names)}")
            loads = functools.partial(isolation.at_limits, clients, service, *names)
            found[" ".join(names)] = isolation.neighbour(clients, service.keys["crux"], loads, pairs, seconds)
    return found


if __name__ == "__main__":
    what, seconds, *pairs = sys.argv[1:]
    samples = limits(float(seconds)) if what == "limits" else neighbours(float(seconds), int(pairs[0]))
    print(msgspec.json.encode(samples).decode())
