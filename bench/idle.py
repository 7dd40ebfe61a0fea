"""Idle WebSockets: how many are held, what one takes, how fast they are accepted, and what they do to who streams.

    python -m bench.idle [--connections 100000] [--rounds 3] [--hold-seconds 60] [--tenants N]

The whole daemon with its synthetic engine; each tenant has a worker and, on the other side, a client in C with its idle
connections and one with those that stream (1 % of all). Runs without and with the idle ones take turns. Progress goes
to standard error, raw samples into the build folder, and the last line of standard output is one JSON object;
`README.md` in this folder explains its keys.
"""

from __future__ import annotations

import argparse
import array
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.openai_servers import MODEL, ServerProcess
from bench.processes import BenchError, LineProcess, add_core_arguments, end_in_order, private_bytes
from bench.report import (
    BUILD,
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
from seedance.daemon.keys import hash_key, new_key

# Half of the loopback's ports for one address, and what is left of the descriptors beside all others.
MOST_PER_TENANT: Final = 14_000
DESCRIPTORS_USED: Final = 0.7
TOKENS_PER_S: Final = 20
STREAMING: Final = 0.01
LEAST_MESSAGES: Final = 0.1
SETTLE_S: Final = 3.0
CONNECT_S: Final = 600.0
DISTRIBUTIONS: Final = ("msgspec", "tokenizers")


class Memory(msgspec.Struct, frozen=True):
    """Private memory of the workers and of the daemon's other processes, and the kernel's for sockets of both ends."""

    workers_bytes: int
    others_bytes: int
    kernel_bytes: int

    def __sub__(self, before: Memory) -> Memory:
        return Memory(
            self.workers_bytes - before.workers_bytes,
            self.others_bytes - before.others_bytes,
            self.kernel_bytes - before.kernel_bytes,
        )


class Phase(msgspec.Struct, frozen=True):
    """What who streams saw. `tokens_per_message` over 1: the engine or the worker was late, and put tokens together."""

    messages: int
    gap_p50_us: int
    gap_p99_us: int
    gap_p999_us: int
    tokens_per_message: float


class Round(msgspec.Struct, frozen=True):
    """One round: without idle connections, then their arrival, then with them for as long as they are held."""

    connections: int
    without: Phase
    connect_s: float
    grown: Memory
    held: list[Phase]
    held_s: float
    dropped: int


class IdleServer(ServerProcess):
    """The daemon with its synthetic engine and so many tenants, each with an address of its own to connect to."""

    NAME = "seedance-idle"

    def __init__(self, build: Path, cores: Sequence[int], tenants: int, streams: int, ping_interval: str) -> None:
        super().__init__(Path(), build, cores)
        self._keys = [new_key() for _ in range(tenants)]
        self._streams = streams
        self._ping_interval = ping_interval

    def address(self, tenant: int) -> str:
        """Return where a tenant's clients connect: a pair of addresses has only so many ports."""
        return f"127.0.0.{1 + tenant}:{self._port}"

    def command(self, folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
        """Write the configuration and return `seedanced` with it."""
        (folder / "tenants.d").mkdir()
        most = self._streams
        for number, key in enumerate(self._keys):
            (folder / "tenants.d" / f"bench{number}.toml").write_text(
                f'keys = ["{hash_key(key)}"]\n[tokens]\nstreams = {most}\n[requests]\nqueue = {most}\n'
            )
        addresses = ", ".join(f'"{self.address(tenant)}"' for tenant in range(len(self._keys)))
        config = folder / "seedanced.toml"
        config.write_text(
            f"[listen]\ntcp = [{addresses}]\n"
            f'[paths]\nstate = "{folder}/state"\nrun = "{folder}/run"\n'
            f'[http]\nping_interval = "{self._ping_interval}"\n'
            f'[engine]\nkind = "synthetic"\nname = "{MODEL}"\nmax_streams = {self._streams * len(self._keys)}\n'
            f"[engine.synthetic]\ntokens_per_s = {TOKENS_PER_S}\nprompt_tokens_per_s = 0\nkv_blocks = 10000000\n"
        )
        return [sys.executable, "-m", "seedance.daemon", "--config", str(config), "--log-level", "warning"], {}

    def headers(self, tenant: int = 0) -> dict[str, str]:
        """Return the tenant's key."""
        return {"Authorization": f"Bearer {self._keys[tenant]}"}

    def is_engine(self, pid: int) -> bool:
        """Say that no process is left out: the engine is a part of the host."""
        return False

    def memory(self) -> Memory:
        """Return what the processes and the kernel take now."""
        workers = others = 0
        for pid, role in self.front_pids().items():
            if role.startswith("seed-w:"):
                workers += private_bytes(pid)
            else:
                others += private_bytes(pid)
        return Memory(workers, others, kernel_bytes(read("/proc/meminfo"), read("/proc/net/sockstat")))


def read(path: str) -> str:
    """Return a file of the kernel's."""
    return Path(path).read_text()


def kernel_bytes(meminfo: str, sockstat: str) -> int:
    """Return the kernel's slabs and TCP's buffers: what sockets are made of (`/proc/meminfo`, `/proc/net/sockstat`)."""
    slab_kib = next(int(line.split()[1]) for line in meminfo.splitlines() if line.startswith("Slab:"))
    tcp = next(line.split() for line in sockstat.splitlines() if line.startswith("TCP:"))
    pages = int(tcp[tcp.index("mem") + 1])
    return (slab_kib << 10) + pages * resource.getpagesize()


def tenants_for(connections: int, descriptors: int) -> int:
    """Return how many tenants, each with a worker and a client, hold so many connections."""
    each = min(MOST_PER_TENANT, int(descriptors * DESCRIPTORS_USED))
    return -(-connections // each)


def parts(total: int, count: int) -> list[int]:
    """Divide a number into `count` parts that differ by one at most."""
    return [total // count + (number < total % count) for number in range(count)]


def phase_of(gaps_us: Sequence[int], streams: int, seconds: float) -> Phase:
    """Return what all streams saw in so many seconds. Raises BenchError when they brought next to nothing."""
    if len(gaps_us) < streams * seconds * TOKENS_PER_S * LEAST_MESSAGES:
        raise BenchError(f"cannot go on: {streams} streams brought {len(gaps_us)} messages in {seconds:.0f} s")
    return Phase(
        messages=len(gaps_us),
        gap_p50_us=percentile(gaps_us, 50),
        gap_p99_us=percentile(gaps_us, 99),
        gap_p999_us=percentile(gaps_us, 99.9),
        tokens_per_message=streams * seconds * TOKENS_PER_S / len(gaps_us),
    )


class Clients:
    """The load clients of one kind, one for each tenant."""

    def __init__(self, server: IdleServer, counts: Sequence[int], arguments: argparse.Namespace, kind: str) -> None:
        self._counts = counts
        self._files = [arguments.build / f"gaps-{kind}-{tenant}.bin" for tenant in range(len(counts))]
        self._processes = []
        for tenant, count in enumerate(counts):
            argv = [str(arguments.build / "fanout_client"), "--connect", server.address(tenant), "--path", "/v2/infer"]
            argv += ["--room", str(max(count, 1)), "--header", ": ".join(*server.headers(tenant).items())]
            self._processes.append(LineProcess(argv, arguments.client_cores))

    def stop(self) -> None:
        """End them."""
        for process in self._processes:
            process.stop()

    def connect(self) -> float:
        """Open all connections; return the seconds until the last was upgraded."""
        begun_s = time.monotonic()
        for process, count in zip(self._processes, self._counts, strict=True):
            process.tell(f"connect {count}")
        self._hear("connected", CONNECT_S)
        return time.monotonic() - begun_s

    def message(self, text: str) -> None:
        """Send a message on every connection."""
        self._tell(f"message {text}")
        self._hear("sent")

    def close(self) -> None:
        """Reset all connections."""
        self._tell("close")
        self._hear("closed")

    def gaps_us(self, seconds: float) -> list[int]:
        """Return the times between the messages of each connection in so many seconds. Raises BenchError on a loss."""
        self._tell("gaps")
        self._hear("watching")
        time.sleep(seconds)
        for process, path in zip(self._processes, self._files, strict=True):
            process.tell(f"gaps {path}")
        if lost := sum(int(words[1]) for words in self._hear("gaps")):
            raise BenchError(f"cannot go on: {lost} connections that stream were lost")
        found: list[int] = []
        for path in self._files:
            gaps = array.array("I")
            gaps.frombytes(path.read_bytes())
            path.unlink()
            found += gaps
        return found

    def lost(self) -> int:
        """Return how many connections the server has ended."""
        self._tell("counters")
        return sum(int(words[-1].removeprefix("lost=")) for words in self._hear("counters"))

    def _tell(self, command: str) -> None:
        for process in self._processes:
            process.tell(command)

    def _hear(self, word: str, timeout_s: float = 60.0) -> list[list[str]]:
        return [process.hear(word, timeout_s) for process in self._processes]


def stream(clients: Clients, streams: int, runs: int, seconds: float) -> list[Phase]:
    """Have all of them stream, for some runs one after the other, and close them."""
    clients.connect()
    clients.message(f'{{"model":"{MODEL}","prompt":"x","stream":true,"max_tokens":30000,"ignore_eos":true}}')
    time.sleep(SETTLE_S)
    phases = [phase_of(clients.gaps_us(seconds), streams, seconds) for _ in range(runs)]
    clients.close()
    time.sleep(SETTLE_S)
    return phases


def run_round(server: IdleServer, idle: Clients, busy: Clients, arguments: argparse.Namespace, hold_s: float) -> Round:
    """Run one round; see `Round`."""
    seconds, streams = arguments.seconds, arguments.streams
    without = stream(busy, streams, 1, seconds)[0]
    before, lost_before = server.memory(), idle.lost()
    connect_s = idle.connect()
    time.sleep(SETTLE_S)
    grown = server.memory() - before
    begun_s = time.monotonic()
    held = stream(busy, streams, max(1, round(hold_s / seconds)), seconds)
    held_s = time.monotonic() - begun_s
    dropped = idle.lost() - lost_before
    idle.close()
    time.sleep(SETTLE_S)
    return Round(arguments.connections, without, connect_s, grown, held, held_s, dropped)


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
        "accepts_per_s": rounded(spread([connections / one.connect_s for one in rounds]).median),
        "gap_p99_ms_without": rounded(spread([one.without.gap_p99_us / 1e3 for one in rounds]).median),
        "gap_p99_ms_with": rounded(spread([phase.gap_p99_us / 1e3 for phase in held]).median),
        "gap_p50_ms_without": rounded(spread([one.without.gap_p50_us / 1e3 for one in rounds]).median),
        "gap_p50_ms_with": rounded(spread([phase.gap_p50_us / 1e3 for phase in held]).median),
        "tokens_per_message_without": rounded(spread([one.without.tokens_per_message for one in rounds]).median),
        "tokens_per_message_with": rounded(spread([phase.tokens_per_message for phase in held]).median),
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
    parser = argparse.ArgumentParser(description="Hold idle WebSockets; see bench/README.md.")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--connections", type=int, default=100_000)
    parser.add_argument("--tenants", type=int, help="as many as it takes without it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of one run")
    parser.add_argument("--hold-seconds", type=float, default=60.0, help="of the last round")
    parser.add_argument("--ping-interval", default="15s", help="the daemon's; 15s is its default")
    add_core_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Run the comparison and print its result."""
    end_in_order()
    arguments = parse_arguments()
    arguments.build = arguments.build.resolve()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    tenants = arguments.tenants or tenants_for(arguments.connections, hard)
    arguments.streams = max(tenants, round(arguments.connections * STREAMING))
    rounds = []
    with ExitStack() as stack:
        # Those of the last run may not be over yet.
        most = 2 * max(parts(arguments.streams, tenants))
        server = IdleServer(arguments.build, arguments.server_cores, tenants, most, arguments.ping_interval)
        stack.callback(server.stop)
        server.start()
        idle = Clients(server, parts(arguments.connections, tenants), arguments, "idle")
        stack.callback(idle.stop)
        busy = Clients(server, parts(arguments.streams, tenants), arguments, "busy")
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
    try:
        main()
    except BenchError as exc:
        sys.exit(str(exc))
