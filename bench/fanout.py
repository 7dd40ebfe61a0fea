"""Fan-out of token messages to many WebSocket connections: our worker beside a C bound and Python servers.

    python -m bench.fanout [--connections 64,1000,10000] [--rounds 25] [--seconds 0.25]

For each number of connections all contenders are up at once and take turns, in another order each round; a ratio is
formed from two runs of one round, and its median over the rounds is the result. Turns are short: the speed of a machine
that others use as well changes within seconds, and two runs of a round should meet the same. Progress goes to standard
error, raw samples and a picture into the build folder, and the last line of standard output is one JSON object;
`README.md` in this folder explains its keys.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
from support.tiny_model import tiny_model

from bench import payloads
from bench.contender import Contender, Idle, Run, Server
from bench.contender_seedance import Seedance
from bench.fanout_peers import SERVERS
from bench.processes import BenchError
from bench.program import command_line, run
from bench.report import Spread, draw, machine, percentile, publish, rounded, save, say, spread, turn, versions

OURS: Final = "seedance"
BOUND: Final = "c-liburing"
PYTHON: Final = ("websockets-broadcast", "websockets-send", "uvicorn")
"""The contenders of which `ratio_best_python` takes the best."""

EPOLL: Final = "c-epoll"
"""The bound's twin: a `send` for each message, and epoll to wait by."""

INFORMATION: Final = (EPOLL, "aiohttp", "picows", "socketify", "seedance-epoll")
"""May take part, but enter no other ratio: C without io_uring, more libraries, and our own fall-back."""

PACED: Final = (OURS, BOUND)
"""Whose latency is measured."""

FIELDS: Final = (
    "messages_per_s",
    "server_cpu_us_per_message",
    "server_user_us_per_message",
    "client_busy",
    "messages_per_segment",
)
MOST_LOAD: Final = 0.5
MOST_CLIENT_BUSY: Final = 0.95
MOST_MESSAGES_PER_SEGMENT: Final = 1.05
PACE_SECONDS: Final = 3.0
PILOT_STEPS: Final = 10
FEWEST_STEPS: Final = 10
DISTRIBUTIONS: Final = (
    "liburing",
    "msgspec",
    "tokenizers",
    "websockets",
    "uvicorn",
    "uvloop",
    "aiohttp",
    "picows",
    "socketify",
)


class Size(msgspec.Struct, kw_only=True):
    """All samples for one number of connections: runs by contender in the order of rounds, and latencies in ns."""

    connections: int
    idle: dict[str, Idle] = {}
    runs: dict[str, list[Run]] = {}
    latency_ns: dict[str, dict[str, int]] = {}
    period_ns: int = 0


def contender(name: str, arguments: argparse.Namespace) -> Contender:
    """Return the contender of this name, not started."""
    build, server_core, client_core = arguments.build, arguments.server_core, arguments.client_core
    if name.startswith(OURS):
        io = name.removeprefix(OURS).lstrip("-") or "auto"
        return Seedance(build, tiny_model(), server_core, client_core, io)
    argv = [sys.executable, "-m", "bench.fanout_peers", name]
    if name in (BOUND, EPOLL):
        argv = [str(build / "fanout_uring"), *(["--epoll"] if name == EPOLL else [])]
    return Server(name, argv, build, server_core, client_core)


def period_ns(connections: int) -> int:
    """Return the pace at which latency is measured: some three times what one core needs for a step."""
    return max(10_000_000, 20_000 * connections)


def measure(connections: int, names: Sequence[str], arguments: argparse.Namespace) -> Size:
    """Run all rounds for one number of connections."""
    size = Size(connections=connections, period_ns=period_ns(connections))
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        for name in names:
            one = contender(name, arguments)
            stack.callback(one.stop)
            size.idle[name] = one.start(connections)
            contenders[name] = one
            say(f"{connections} connections to {name}")
        steps = {}
        for name, one in contenders.items():
            pilot = one.run(PILOT_STEPS)
            steps[name] = max(FEWEST_STEPS, round(pilot.messages_per_s * arguments.seconds / connections))
        for number in range(arguments.rounds):
            for name in turn(names, number):
                run = contenders[name].run(steps[name])
                size.runs.setdefault(name, []).append(run)
                say(f"  round {number + 1}: {name:22} {run.messages_per_s / 1e3:7.1f} k messages/s")
        for name in [name for name in PACED if name in contenders]:
            paced = max(10, round(PACE_SECONDS * 1e9 / size.period_ns))
            samples = contenders[name].pace(paced, size.period_ns)
            size.latency_ns[name] = {str(percent): percentile(samples, percent) for percent in (50, 90, 99)}
    return size


def ratios(runs: dict[str, list[Run]], other: str) -> list[float]:
    """Return our rate by another contender's, for each round."""
    pairs = zip(runs[OURS], runs[other], strict=True)
    return [ours.messages_per_s / theirs.messages_per_s for ours, theirs in pairs]


def rates(size: Size) -> dict[str, Spread]:
    """Return each contender's messages per second."""
    return {name: spread([run.messages_per_s for run in runs]) for name, runs in size.runs.items()}


def best_python(size: Size) -> str | None:
    """Return the Python server with the highest median rate; None when none took part."""
    figures = rates(size)
    return max((name for name in PYTHON if name in figures), key=lambda name: figures[name].median, default=None)


def idle_bytes(idle: Idle) -> tuple[int, int]:
    """Return bytes for each idle connection: all in all, and of the second half (past what is shared by all)."""
    half = idle.connections - idle.connections // 2
    total = (idle.all_bytes - idle.none_bytes) / idle.connections
    return round(total), round((idle.all_bytes - idle.half_bytes) / half)


def latency_us(sizes: Sequence[Size], percent: str) -> dict[str, dict[str, float]]:
    """Return a percentile of the time from step to socket: contender → connections → µs."""
    found: dict[str, dict[str, float]] = {}
    for size in sizes:
        for name, figures in size.latency_ns.items():
            found.setdefault(name, {})[str(size.connections)] = rounded(figures[percent] / 1e3)
    return found


def add_ratios(result: dict[str, Any], key: str, size: Size, other: str | None) -> None:
    """Put our ratio to another contender into the result, where both took part."""
    if other not in size.runs or OURS not in size.runs:
        return
    figure = spread(ratios(size.runs, other))
    at = str(size.connections)
    result.setdefault(key, {})[at] = rounded(figure.median)
    result.setdefault(f"{key}_quartiles", {})[at] = [rounded(figure.low), rounded(figure.high)]


def summary(sizes: Sequence[Size]) -> dict[str, Any]:
    """Return the result, as `README.md` explains it."""
    result: dict[str, Any] = {}
    for size in sizes:
        add_ratios(result, "ratio_c_liburing", size, BOUND)
        add_ratios(result, "ratio_best_python", size, best_python(size))
        for name in INFORMATION:
            add_ratios(result, f"ratio_{name.replace('-', '_')}", size, name)
    largest = max(sizes, key=lambda size: size.connections)
    if OURS in largest.idle:
        total, marginal = idle_bytes(largest.idle[OURS])
        result["idle_bytes_per_connection"] = total
        result["idle_bytes_per_connection_marginal"] = marginal
    result["idle_bytes_by_server"] = {name: idle_bytes(idle)[0] for name, idle in largest.idle.items()}
    by_contender = latency_us(sizes, "99")
    result["step_to_socket_p99_us"] = by_contender.get(OURS, {})
    result["step_to_socket_p99_us_c_liburing"] = by_contender.get(BOUND, {})
    result["step_to_socket_p50_us"] = latency_us(sizes, "50").get(OURS, {})
    result["best_python"] = {str(size.connections): best_python(size) for size in sizes}
    for field in FIELDS:
        result[field] = {str(size.connections): medians(size, field) for size in sizes}
    result["payload_bytes_per_message"] = medians(largest, "payload_bytes_per_message")
    result["warnings"] = warnings(sizes)
    result["machine"] = machine()
    result["versions"] = versions(DISTRIBUTIONS)
    return result


def warnings(sizes: Sequence[Size]) -> list[str]:
    """Say what makes figures doubtful."""
    found = []
    for size in sizes:
        for name, busy in medians(size, "client_busy").items():
            if busy > MOST_CLIENT_BUSY:
                found.append(f"{size.connections} connections, {name}: the client used {busy:.0%} of its core")
        for name, merged in medians(size, "messages_per_segment").items():
            if merged > MOST_MESSAGES_PER_SEGMENT:
                found.append(f"{size.connections} connections, {name}: {merged} messages in a TCP segment")
        late = {name: sum(run.late_sends or 0 for run in runs) for name, runs in size.runs.items()}
        found += [
            f"{size.connections} connections, {name}: {count} late sends" for name, count in late.items() if count
        ]
    return found


def medians(size: Size, field: str) -> dict[str, float]:
    """Return the median of one field of the runs, by contender."""
    return {name: rounded(spread([getattr(run, field) for run in runs]).median) for name, runs in size.runs.items()}


def picture(path: Path, sizes: Sequence[Size]) -> None:
    """Draw rates and latencies."""
    throughput = {f"{size.connections} connections": rates(size) for size in sizes}
    latency = {
        f"{size.connections} every {size.period_ns // 1_000_000} ms": {
            name: Spread(figures["99"] / 1e6, figures["50"] / 1e6, figures["99"] / 1e6, 1)
            for name, figures in size.latency_ns.items()
        }
        for size in sizes
    }
    draw(
        path,
        [
            ("One server core, one step after the other", "messages/s", throughput),
            ("Step to socket, p99 (whisker: p50)", "ms", latency),
        ],
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line("Compare fan-out rates")
    parser.add_argument("--connections", default="64,1000,10000")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.25, help="length of one run, of ten steps at least")
    parser.add_argument("--contenders", default=",".join((OURS, BOUND, *PYTHON)))
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Run the comparison and print its result."""
    arguments = parse_arguments()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    load = machine()["load_1min"]
    if load > MOST_LOAD:
        say(f"the machine is busy (load {load}): do not trust these figures")
    payloads.save(arguments.build / "payloads.bin")
    names = arguments.contenders.split(",")
    unknown = set(names) - {OURS, BOUND, *INFORMATION, *SERVERS}
    if unknown:
        raise BenchError(f"cannot run {', '.join(sorted(unknown))}: there is no such contender")
    sizes = [measure(int(count), names, arguments) for count in arguments.connections.split(",")]
    save(arguments.build / "fanout.json", {"machine": machine(), "sizes": sizes})
    picture(arguments.build / "fanout.png", sizes)
    publish("fanout", summary(sizes), arguments.build)


if __name__ == "__main__":
    run(main)
