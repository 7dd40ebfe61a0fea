"""Idle WebSockets: how many are held, what one takes, how fast they are accepted, and what they do to who streams.

    python -m bench.idle [--connections 100000] [--rounds 3] [--hold-seconds 60] [--tenants N] [--real-time]

The whole daemon with its synthetic engine; each tenant has a worker and, on the other side, a client in C with its idle
connections and one with those that stream (1 % of all). Runs without and with the idle ones take turns. Progress goes
to standard error, raw samples into the build folder, and the last line of standard output is one JSON object;
`README.md` in this folder explains its keys.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.processes import BenchError, Spent, add_core_arguments, real_time, spent_by_others
from bench.program import command_line, run, started
from bench.report import (
    Spread,
    add_ratio,
    draw,
    machine,
    percentile,
    publish,
    rounded,
    save,
    say,
    spread,
    versions,
)
from bench.synthetic import Clients, Memory, SyntheticServer, parts, raise_descriptors, request

# Half of the loopback's ports for one address, and what is left of the descriptors beside all others.
MOST_PER_TENANT: Final = 14_000
DESCRIPTORS_USED: Final = 0.7
TOKENS_PER_S: Final = 20
STREAMING: Final = 0.01
LEAST_MESSAGES: Final = 0.1
SETTLE_S: Final = 3.0
DISTRIBUTIONS: Final = ("msgspec", "tokenizers")


class Phase(msgspec.Struct, frozen=True):
    """What who streams saw. `tokens_per_message` over 1: the engine or the worker was late, and put tokens together.

    `others_cpu_share` is the processor time that the machine's other processes took meanwhile, in processors.
    """

    messages: int
    gap_p50_us: int
    gap_p99_us: int
    gap_p999_us: int
    tokens_per_message: float
    others_cpu_share: float


class Round(msgspec.Struct, frozen=True):
    """One round: without idle connections, then their arrival, then with them for as long as they are held.

    `rest_cpu_us_per_s` is what all processes of the daemon spend a second while nobody streams.
    """

    connections: int
    without: Phase
    connect_s: float
    grown: Memory
    rest_cpu_us_per_s: float
    held: list[Phase]
    held_s: float
    dropped: int


def tenants_for(connections: int, descriptors: int) -> int:
    """Return how many tenants, each with a worker and a client, hold so many connections."""
    each = min(MOST_PER_TENANT, int(descriptors * DESCRIPTORS_USED))
    return -(-connections // each)


def phase_of(gaps_us: Sequence[int], streams: int, seconds: float, others_cpu_share: float) -> Phase:
    """Return what all streams saw in so many seconds. Raises BenchError when they brought next to nothing."""
    if len(gaps_us) < streams * seconds * TOKENS_PER_S * LEAST_MESSAGES:
        raise BenchError(f"cannot go on: {streams} streams brought {len(gaps_us)} messages in {seconds:.0f} s")
    return Phase(
        messages=len(gaps_us),
        gap_p50_us=percentile(gaps_us, 50),
        gap_p99_us=percentile(gaps_us, 99),
        gap_p999_us=percentile(gaps_us, 99.9),
        tokens_per_message=streams * seconds * TOKENS_PER_S / len(gaps_us),
        others_cpu_share=others_cpu_share,
    )


def stream(clients: Clients, streams: int, runs: int, seconds: float) -> list[Phase]:
    """Have all of them stream, for some runs one after the other, and close them."""
    clients.connect()
    clients.message(request())
    time.sleep(SETTLE_S)
    phases = []
    for _ in range(runs):
        before = spent_by_others(os.getpid())
        clients.begin("gaps")
        time.sleep(seconds)
        gaps_us = clients.take("gaps")
        others = spent_by_others(os.getpid())
        others_ns = sum((now - before.get(pid, Spent())).cpu_ns for pid, now in others.items())
        phases.append(phase_of(gaps_us, streams, seconds, others_ns / 1e9 / seconds))
    clients.close()
    time.sleep(SETTLE_S)
    return phases


def rest(server: SyntheticServer, seconds: float) -> float:
    """Return the µs of processor time that the daemon spends a second while all that it has is idle connections."""
    begun_s, before_ns = time.monotonic(), sum(server.cpu_ns().values())
    time.sleep(seconds)
    return (sum(server.cpu_ns().values()) - before_ns) / 1e3 / (time.monotonic() - begun_s)


def run_round(
    server: SyntheticServer, idle: Clients, busy: Clients, arguments: argparse.Namespace, hold_s: float
) -> Round:
    """Run one round; see `Round`."""
    seconds, streams = arguments.seconds, arguments.streams
    without = stream(busy, streams, 1, seconds)[0]
    before, lost_before = server.memory(), idle.lost()
    connect_s = idle.connect()
    time.sleep(SETTLE_S)
    grown = server.memory() - before
    rest_cpu_us_per_s = rest(server, seconds)
    begun_s = time.monotonic()
    held = stream(busy, streams, max(1, round(hold_s / seconds)), seconds)
    held_s = time.monotonic() - begun_s
    dropped = idle.lost() - lost_before
    idle.close()
    time.sleep(SETTLE_S)
    return Round(arguments.connections, without, connect_s, grown, rest_cpu_us_per_s, held, held_s, dropped)


def summary(rounds: Sequence[Round], tenants: int, streams: int) -> dict[str, Any]:
    """Return the result, as `README.md` explains it. Memory is the first round's: later ones find it allocated."""
    connections, first = rounds[0].connections, rounds[0]
    held = [phase for one in rounds for phase in one.held]
    result: dict[str, Any] = {
        "connections": connections,
        "tenants": tenants,
        "streams": streams,
        "user_bytes_per_connection": round(first.grown.workers_bytes / connections),
        "others_bytes_per_connection": round(first.grown.others_bytes / connections),
        "kernel_bytes_per_connection": round(first.grown.kernel_bytes / 2 / connections),
        "kernel_bytes_both_ends": round(first.grown.kernel_bytes / connections),
        "rest_cpu_us_per_connection_s": rounded(spread([one.rest_cpu_us_per_s / connections for one in rounds]).median),
        "accepts_per_s": rounded(spread([connections / one.connect_s for one in rounds]).median),
        "gap_p99_ms_without": rounded(spread([one.without.gap_p99_us / 1e3 for one in rounds]).median),
        "gap_p99_ms_with": rounded(spread([phase.gap_p99_us / 1e3 for phase in held]).median),
        "gap_p50_ms_without": rounded(spread([one.without.gap_p50_us / 1e3 for one in rounds]).median),
        "gap_p50_ms_with": rounded(spread([phase.gap_p50_us / 1e3 for phase in held]).median),
        "tokens_per_message_without": rounded(spread([one.without.tokens_per_message for one in rounds]).median),
        "tokens_per_message_with": rounded(spread([phase.tokens_per_message for phase in held]).median),
        "others_cpu_share_without": rounded(spread([one.without.others_cpu_share for one in rounds]).median),
        "others_cpu_share_with": rounded(spread([phase.others_cpu_share for phase in held]).median),
        "dropped": sum(one.dropped for one in rounds),
        "held_s": rounded(max(one.held_s for one in rounds)),
    }
    ratios = [
        spread([phase.gap_p99_us for phase in one.held]).median / max(one.without.gap_p99_us, 1) for one in rounds
    ]
    add_ratio(result, "gap_p99_ratio", [], ratios)
    result["machine"] = machine()
    result["versions"] = versions(DISTRIBUTIONS)
    return result


def picture(path: Path, rounds: Sequence[Round]) -> None:
    """Draw the times between tokens, and memory."""
    first = rounds[0]
    gaps: dict[str, dict[str, Spread]] = {
        f"p{name}": {
            "without": spread([getattr(one.without, field) / 1e3 for one in rounds]),
            "with": spread([getattr(phase, field) / 1e3 for one in rounds for phase in one.held]),
        }
        for name, field in (("50", "gap_p50_us"), ("99", "gap_p99_us"), ("99.9", "gap_p999_us"))
    }
    memory = {
        "memory": {
            "user": spread([first.grown.workers_bytes / first.connections]),
            "kernel": spread([first.grown.kernel_bytes / 2 / first.connections]),
        }
    }
    panels = [("Between tokens, beside idle connections", "ms", gaps), ("An idle connection", "bytes", memory)]
    draw(path, panels)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line("Hold idle WebSockets")
    parser.add_argument("--connections", type=int, default=100_000)
    parser.add_argument("--tenants", type=int, help="as many as it takes without it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of one run")
    parser.add_argument("--hold-seconds", type=float, default=60.0, help="of the last round")
    parser.add_argument("--real-time", action="store_true", help="go before the machine's other processes; needs root")
    parser.add_argument("--ping-interval", default="15s", help="the daemon's; 15s is its default")
    add_core_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Run the comparison and print its result."""
    arguments = parse_arguments()
    tenants = arguments.tenants or tenants_for(arguments.connections, raise_descriptors())
    arguments.streams = max(tenants, round(arguments.connections * STREAMING))
    if arguments.real_time:
        real_time()
    rounds = []
    with ExitStack() as stack:
        # Those of the last run may not be over yet.
        most = 2 * max(parts(arguments.streams, tenants))
        tables = {
            "http": {"ping_interval": arguments.ping_interval},
            "engine.synthetic": {"tokens_per_s": TOKENS_PER_S},
        }
        server = SyntheticServer(arguments.build, arguments.server_cores, tenants, most, tables)
        stack.enter_context(started(server))
        idle = Clients(server, parts(arguments.connections, tenants), arguments.build, arguments.client_cores, "idle")
        stack.callback(idle.stop)
        busy = Clients(server, parts(arguments.streams, tenants), arguments.build, arguments.client_cores, "busy")
        stack.callback(busy.stop)
        for number in range(arguments.rounds):
            hold_s = arguments.hold_seconds if number == arguments.rounds - 1 else arguments.seconds
            one = run_round(server, idle, busy, arguments, hold_s)
            say(
                f"round {number + 1}: {one.connections / one.connect_s:.0f} accepts/s, gap p99"
                f" {one.without.gap_p99_us / 1e3:.1f} ms without, {one.held[0].gap_p99_us / 1e3:.1f} ms with,"
                f" {one.grown.workers_bytes / one.connections:.0f} B a connection, {one.dropped} dropped"
            )
            rounds.append(one)
    save(arguments.build / "idle.json", {"machine": machine(), "rounds": rounds})
    picture(arguments.build / "idle.png", rounds)
    publish("idle", summary(rounds, tenants, arguments.streams), arguments.build)


if __name__ == "__main__":
    run(main)
