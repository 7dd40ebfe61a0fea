"""Thousands of streams at a steady pace: how long after the engine's tokens do their bytes arrive, and the last one's?

    python -m bench.streams [--streams 2048] [--rate 20] [--seconds 60] [--tenants 1] [--rounds 1]

The whole daemon with its synthetic engine, and a client in C. When the engine made a step is read in the ledger, which
the scheduler writes ten times a second and after the last token; the client's clock is the same. Progress goes to
standard error, raw samples into the build folder, and the last line of standard output is one JSON object; `README.md`
in this folder explains its keys.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench.processes import BenchError, add_core_arguments
from bench.program import command_line, run, started
from bench.report import Spread, draw, machine, publish, rounded, save, say, spread, versions
from bench.synthetic import Clients, SyntheticServer, parts, raise_descriptors, request
from seedance.engine.ledger import EngineRecord, Ledger

POLL_S: Final = 0.01
GRACE_S: Final = 30.0
SETTLE_S: Final = 2.0
LEDGER: Final = "memfd:seedance-ledger"
DISTRIBUTIONS: Final = ("msgspec", "numpy")


class Round(msgspec.Struct, frozen=True):
    """One round, all times from the engine's: of the last byte, and of each message behind a step that is known.

    `tokens_per_message` over 1: somebody was late, and put tokens together.
    """

    messages: int
    known_steps: int
    last_byte_ms: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    tokens_per_message: float
    cpu_us_per_token: dict[str, float]


def ledger_of(pid: int) -> Ledger:
    """Open the ledger that a process of the daemon has. Raises BenchError when it has none."""
    folder = Path(f"/proc/{pid}/fd")
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if LEDGER in os.readlink(entry):
                return Ledger(os.open(entry, os.O_RDWR | os.O_CLOEXEC))
    raise BenchError(f"cannot go on: process {pid} has no '{LEDGER}'")


def watch(ledger: Ledger, steps_wanted: int, timeout_s: float) -> list[EngineRecord]:
    """Return what the scheduler told, until it has made at least so many steps and rests for a second and a half."""
    found: list[EngineRecord] = []
    begun_s = changed_s = time.monotonic()
    while time.monotonic() - begun_s < timeout_s:
        record, now_s = ledger.engine(), time.monotonic()
        if record is not None and (not found or record.steps != found[-1].steps):
            found.append(record)
            changed_s = now_s
        elif found and found[-1].steps - found[0].steps >= steps_wanted and now_s - changed_s > SETTLE_S:
            return found
        time.sleep(POLL_S)
    raise BenchError(f"cannot go on: the engine has not ended its streams within {timeout_s:.0f} s")


def lags_ns(arrivals: Sequence[int], steps_ns: Sequence[int], period_ns: int) -> list[np.ndarray[Any, Any]]:
    """Return, for each step whose time is known, how long after it each message of its period arrived."""
    ordered = np.sort(np.asarray(arrivals, np.int64))
    found = []
    for step_ns in steps_ns:
        first, last = np.searchsorted(ordered, [step_ns, step_ns + period_ns])
        found.append(ordered[first:last] - step_ns)
    return found


def round_of(
    arrivals: array.array[int], records: Sequence[EngineRecord], arguments: argparse.Namespace, spent: dict[str, int]
) -> tuple[Round, list[float]]:
    """Put a round together; also returns, for each known step, the ms until its last message was there."""
    tokens = arguments.streams * arguments.rate * arguments.seconds
    # Not the first second, while streams begin, nor the last, while they end: there a step is not one of all streams.
    settled = [record.beat_s for record in records if records[0].beat_s + 2 < record.beat_s < records[-1].beat_s - 2]
    steps = lags_ns(arrivals, [int(beat_s * 1e9) for beat_s in settled], 10**9 // arguments.rate)
    if not any(len(step) for step in steps):
        raise BenchError("cannot go on: no message arrived behind a step that is known")
    lags_ms = np.concatenate(steps) / 1e6
    one = Round(
        messages=len(arrivals),
        known_steps=len(steps),
        last_byte_ms=max(arrivals) / 1e6 - records[-1].beat_s * 1e3,
        lag_p50_ms=float(np.percentile(lags_ms, 50)),
        lag_p99_ms=float(np.percentile(lags_ms, 99)),
        lag_max_ms=float(lags_ms.max()),
        tokens_per_message=tokens / len(arrivals),
        cpu_us_per_token={role: ns / 1e3 / tokens for role, ns in spent.items()},
    )
    return one, [float(step.max()) / 1e6 for step in steps if len(step)]


def run_round(
    server: SyntheticServer, clients: Clients, ledger: Ledger, arguments: argparse.Namespace
) -> tuple[Round, list[float]]:
    """Have all streams run from their first to their last token."""
    clients.connect()
    before = server.cpu_ns()
    clients.begin("arrivals")
    clients.message(request(arguments.rate * arguments.seconds))
    records = watch(ledger, arguments.rate * arguments.seconds, arguments.seconds + GRACE_S)
    arrivals = clients.take("arrivals")
    after = server.cpu_ns()
    clients.close()
    return round_of(arrivals, records, arguments, {role: ns - before.get(role, 0) for role, ns in after.items()})


def summary(rounds: Sequence[Round], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result, as `README.md` explains it."""
    names = sorted({name for one in rounds for name in one.cpu_us_per_token})
    result: dict[str, Any] = {
        "streams": arguments.streams,
        "tenants": arguments.tenants,
        "tokens_per_s": arguments.streams * arguments.rate,
        "seconds": arguments.seconds,
        "last_byte_ms": rounded(max(one.last_byte_ms for one in rounds)),
    }
    for key in ("lag_p50_ms", "lag_p99_ms", "lag_max_ms", "tokens_per_message"):
        result[key] = rounded(spread([getattr(one, key) for one in rounds]).median)
    result["cpu_us_per_token"] = {
        name: rounded(spread([one.cpu_us_per_token.get(name, 0.0) for one in rounds]).median) for name in names
    }
    return result | {"machine": machine(), "versions": versions(DISTRIBUTIONS)}


def picture(path: Path, rounds: Sequence[Round]) -> None:
    """Draw the times."""
    times: dict[str, dict[str, Spread]] = {
        name: {"all": spread([getattr(one, field) for one in rounds])}
        for name, field in (
            ("p50", "lag_p50_ms"),
            ("p99", "lag_p99_ms"),
            ("longest", "lag_max_ms"),
            ("last byte", "last_byte_ms"),
        )
    }
    draw(path, [("From the engine's step to the message", "ms", times)])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line("Stream at a steady pace")
    parser.add_argument("--streams", type=int, default=2048)
    parser.add_argument("--rate", type=int, default=20, help="tokens/s of each stream")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    add_core_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Run the measurement and print its result."""
    arguments = parse_arguments()
    raise_descriptors()
    counts = parts(arguments.streams, arguments.tenants)
    rounds, samples = [], []
    with contextlib.ExitStack() as stack:
        # Those of the last round may not be over yet.
        tables = {"engine.synthetic": {"tokens_per_s": arguments.rate}}
        server = SyntheticServer(arguments.build, arguments.server_cores, arguments.tenants, 2 * max(counts), tables)
        stack.enter_context(started(server))
        ledger = ledger_of(server.pid_of("seed-engine"))
        stack.callback(ledger.close)
        clients = Clients(server, counts, arguments.build, arguments.client_cores, "streams")
        stack.callback(clients.stop)
        for number in range(arguments.rounds):
            one, steps_ms = run_round(server, clients, ledger, arguments)
            say(
                f"round {number + 1}: last byte {one.last_byte_ms:.1f} ms after the last token, a message"
                f" {one.lag_p50_ms:.1f} ms after its step, p99 {one.lag_p99_ms:.1f}, {one.lag_max_ms:.1f} at most"
            )
            rounds.append(one)
            samples.append({"round": one, "step_complete_ms": steps_ms})
    save(arguments.build / "streams.json", {"machine": machine(), "rounds": samples})
    picture(arguments.build / "streams.png", rounds)
    publish("streams", summary(rounds, arguments), arguments.build)


if __name__ == "__main__":
    run(main)
