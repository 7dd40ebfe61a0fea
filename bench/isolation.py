"""How exactly the kernel's limits hold, and what a tenant at its limits does to its neighbour.

    python -m bench.isolation [--seconds 20] [--pairs 1]

It takes a machine with systemd, cgroup v2 with its controllers and fq, so it runs in the guest of the VM tests: limits
by the host's clock, and latencies by one that counts the guest's instructions.
Progress goes to standard error, raw samples into the build folder, and the last line of standard output is one JSON
object; `README.md` in this folder explains its keys.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from support import isolation
from vm.run import BUILD, Unavailable
from vm.systemd_guest import BOOT_S, Clock, Ended, Machine
from vm.systemd_image import LIB, TESTS_SITE, find_image
from vm.systemd_install import GUEST_ROOT, install

from bench.isolation_guest import LimitSamples
from bench.report import machine, publish, rounded, save, say

SET: Final[dict[str, float]] = {
    "cpu_cores": isolation.CPU_CORES,
    "egress_bytes_per_s": isolation.EGRESS_BYTES_PER_S,
    "ingress_bytes_per_s": isolation.INGRESS_BYTES_PER_S,
}
T = TypeVar("T")


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """`neighbours` has the times between a neighbour's tokens, by the limit at which others are."""

    limits: LimitSamples
    neighbours: dict[str, isolation.Neighbour]


def measured_in_guest(clock: Clock, kind: type[T], *words: str) -> T:
    """Start a guest, install this checkout, and measure there; `words` say what (see `isolation_guest`)."""
    guest = Machine(BUILD / "bench-isolation", clock)
    image = find_image()
    guest.start(image)
    try:
        with guest.agent(BOOT_S) as agent:
            say("installing")
            install(agent, guest.folder)
            output = io.BytesIO()
            status = agent.run(
                [f"{LIB}/bin/python", "-m", "bench.isolation_guest", *words],
                stdout=output,
                stderr=sys.stderr.buffer,
                cwd=GUEST_ROOT,
                environment={"PYTHONPATH": f"{TESTS_SITE}:{GUEST_ROOT}:{GUEST_ROOT}/tests"},
            )
            if status:
                raise Ended(f"measuring failed with status {status}")
            return msgspec.json.decode(output.getvalue(), type=kind)
    finally:
        guest.stop()


def farthest(by_connections: Mapping[int, float], limit: float) -> float:
    """Return the rate that is farthest from the limit."""
    return max(by_connections.values(), key=lambda rate: abs(rate - limit))


def result(samples: Samples) -> dict[str, Any]:
    """Return what is printed."""
    limits = samples.limits
    measured = {"cpu_cores": limits.cpu_cores}
    for name, by_connections in limits.wire.items():
        measured[f"{name}_bytes_per_s"] = farthest(by_connections, SET[f"{name}_bytes_per_s"])
    return {
        "set": SET,
        "measured": {name: rounded(value) for name, value in measured.items()},
        "error": {name.partition("_")[0]: rounded(measured[name] / limit - 1) for name, limit in SET.items()},
        "by_connections": {
            name: {str(number): rounded(rate) for number, rate in by_connections.items()}
            for name, by_connections in limits.wire.items()
        },
        "dropped_packets": limits.dropped_packets,
        "cpu_throttled": limits.cpu_throttled,
        "neighbour_p99_loss": rounded(samples.neighbours[" ".join(isolation.LOADS)].p99_loss),
        "neighbour_p99_loss_by_limits": {name: rounded(one.p99_loss) for name, one in samples.neighbours.items()},
        "neighbour_p99_ms": {
            name: [rounded(1e3 * one.quiet_p99_s), rounded(1e3 * one.loaded_p99_s)]
            for name, one in samples.neighbours.items()
        },
        "machine": machine(),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=isolation.SECONDS)
    parser.add_argument("--pairs", type=int, default=1)
    options = parser.parse_args()
    try:
        seconds, pairs = str(options.seconds), str(options.pairs)
        samples = Samples(
            limits=measured_in_guest(Clock.HOST, LimitSamples, "limits", seconds),
            neighbours=measured_in_guest(Clock.COUNTED, dict[str, isolation.Neighbour], "neighbours", seconds, pairs),
        )
    except (Unavailable, Ended) as exc:
        print(f"cannot measure isolation: {exc}", file=sys.stderr)
        return 1
    save(Path("build/bench/isolation.json"), samples)
    publish("isolation", result(samples))
    return 0


if __name__ == "__main__":
    sys.exit(main())
