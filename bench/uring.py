"""Options of io_uring, each beside the ring as our worker sets it up: over loopback, and over a pair of virtual links.

    python -m bench.uring [--links loopback,veth] [--rounds 5] [--seconds 0.4] [--connections 64]

A round runs a load with each option in turn, in another order each time; a ratio is formed from two runs of one round.
The pair of links lies between two network namespaces of its own, which need root and are removed at the end, and has a
queueing discipline. Progress goes to standard error, raw samples and a picture into the build folder, and the last line
of standard output is one JSON object; `README.md` in this folder explains its keys.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.processes import BenchError, add_core_arguments, end_in_order
from bench.report import BUILD, Spread, add_ratio, draw, machine, publish, rounded, save, say, spread, turn, versions

PROGRAM: Final = "uring_options"
DEFAULT: Final = "default"
LOADS: Final[dict[tuple[str, int], tuple[str, ...]]] = {
    ("fan", 64): ("taskrun", "coop", "zc"),
    ("fan", 1024): ("zc",),
    ("fan", 4096): ("zc",),
    ("fan", 16384): ("zc",),
    ("echo", 64): ("taskrun", "coop", "min-wait", "busy-poll", "napi"),
    ("take", 16384): ("bundle", "min-wait"),
}
"""By load and bytes: the options that have something to do with it."""

QDISCS: Final = (
    ("fq",),
    ("fq_codel",),
    ("tbf", "rate", "10gbit", "burst", "1mb", "latency", "50ms"),
)
"""The first that the kernel has is taken."""

ADDRESSES: Final = ("192.0.2.1", "192.0.2.2")  # RFC 5737
RUN_S: Final = 30.0


class Link(msgspec.Struct, frozen=True):
    """Where a server and its client meet: an address, and the words before each command."""

    name: str
    address: str
    server: tuple[str, ...] = ()
    client: tuple[str, ...] = ()
    qdisc: str = ""


class Run(msgspec.Struct, frozen=True):
    """One load with one option; `p99_us` is 0 for a load without answers."""

    operations_per_s: float
    cpu_us_per_operation: float
    enters_per_operation: float
    p99_us: float


class Refused(msgspec.Struct, frozen=True):
    """The kernel does not have the option."""

    why: str


def fields(line: str, word: str) -> dict[str, int]:
    """Return the numbers of a line such as "done ns=1". Raises BenchError on another one."""
    first, *rest = line.split()
    if first != word:
        raise BenchError(f"cannot use the answer '{line}' of {PROGRAM}: it should begin with '{word}'")
    return {key: int(value) for key, value in (field.split("=") for field in rest)}


def run_of(load: str, size: int, served: str, done: str) -> Run:
    """Return what a run came to, of the last lines of server and client."""
    server, client = fields(served, "served"), fields(done, "done")
    # What a connection took is not what was received: only the server knows that.
    operations = server["bytes"] // size if load == "take" else client["operations"]
    if not operations:
        raise BenchError(f"cannot use a run of '{load}' in which nothing was done")
    return Run(
        operations_per_s=operations / (client["ns"] / 1e9),
        cpu_us_per_operation=server["cpu_ns"] / operations / 1e3,
        enters_per_operation=server["enters"] / operations,
        p99_us=client["p99_ns"] / 1e3,
    )


def run(link: Link, load: tuple[str, int], option: str, arguments: argparse.Namespace) -> Run | Refused:
    """Start server and client, and have the load run."""
    program = str(arguments.build / PROGRAM)
    what = [load[0], str(arguments.connections), str(load[1])]
    pinned = [["taskset", "--cpu-list", ",".join(map(str, cores))] for cores in cores_of(arguments)]
    argv = [*link.server, *pinned[0], program, "server", f"{link.address}:0", *what, option]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        word, _, rest = server.stdout.readline().strip().partition(" ")
        if word == "refused":
            return Refused(rest)
        if word != "listening":
            raise BenchError(f"cannot go on: the server with '{option}' has ended")
        argv = [*link.client, *pinned[1], program, "client", f"{link.address}:{rest}", *what, str(arguments.seconds)]
        client = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=RUN_S, check=False)
        last = server.communicate(timeout=RUN_S)[0].strip()
        if last.startswith("refused"):
            return Refused(last.partition(" ")[2])
        return run_of(*load, last, client.stdout.strip())
    finally:
        if server.poll() is None:
            server.kill()
        server.communicate()


def cores_of(arguments: argparse.Namespace) -> tuple[Sequence[int], Sequence[int]]:
    """Return the processor of the server, and those of the client."""
    return arguments.server_cores[:1], arguments.client_cores


@contextmanager
def links(names: Sequence[str]) -> Iterator[list[Link]]:
    """Make what there is of these links, and remove it at the end."""
    found = []
    with ExitStack() as stack:
        for name in names:
            if name == "loopback":
                found.append(Link("loopback", "127.0.0.1"))
            elif name == "veth":
                found += stack.enter_context(veth())
            else:
                raise BenchError(f"cannot measure over '{name}': there are loopback and veth")
        yield found


@contextmanager
def veth() -> Iterator[list[Link]]:
    """Make two namespaces and a pair of links between them; nothing, with a word, where that is not allowed."""
    spaces = [f"seedance-bench-{os.getpid()}-{end}" for end in "ab"]
    with ExitStack() as stack:
        try:
            for space in spaces:
                administer("ip", "netns", "add", space)
                stack.callback(administer, "ip", "netns", "delete", space)
            pair = ["veth0", "netns", spaces[0], "type", "veth", "peer", "veth0", "netns", spaces[1]]
            administer("ip", "link", "add", *pair)
            for space, address in zip(spaces, ADDRESSES, strict=True):
                administer("ip", "-n", space, "address", "add", f"{address}/24", "dev", "veth0")
                administer("ip", "-n", space, "link", "set", "veth0", "up")
            qdisc = add_qdisc(spaces)
        except (OSError, subprocess.CalledProcessError) as exc:
            say(f"cannot make a pair of links, ignoring: {exc}")
            yield []
            return
        server, client = (("ip", "netns", "exec", space) for space in spaces)
        yield [Link("veth", ADDRESSES[0], server, client, qdisc)]


def add_qdisc(spaces: Sequence[str]) -> str:
    """Give both links the first queueing discipline that the kernel has, and return its name."""
    for qdisc in QDISCS:
        try:
            for space in spaces:
                administer("tc", "-n", space, "qdisc", "replace", "dev", "veth0", "root", *qdisc)
        except subprocess.CalledProcessError:
            continue
        return qdisc[0]
    raise OSError("no queueing discipline can be set")


def administer(*argv: str) -> None:
    """Run a command of the network's. Raises CalledProcessError and OSError."""
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def measure(link: Link, load: tuple[str, int], arguments: argparse.Namespace) -> dict[str, list[Run | Refused]]:
    """Run a load over a link with all its options, round by round."""
    options = (DEFAULT, *LOADS[load])
    found: dict[str, list[Run | Refused]] = {option: [] for option in options}
    for number in range(arguments.rounds):
        for option in turn(options, number):
            found[option].append(run(link, load, option, arguments))
    for option, runs in found.items():
        if isinstance(runs[0], Refused):
            say(f"{link.name}, {title(load)}: {option} is refused: {runs[0].why}")
        else:
            cpu = spread([one.cpu_us_per_operation for one in runs if isinstance(one, Run)])
            say(f"{link.name}, {title(load)}: {option:10} {cpu.median:7.2f} µs of processor time each")
    return found


def title(load: tuple[str, int]) -> str:
    """Return how results call a load."""
    return f"{load[0]} {load[1]}"


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the result, as `README.md` explains it."""
    result: dict[str, Any] = {}
    for record in records:
        at = f"{record['link']}, {record['load']}"
        base: list[Run] = record["runs"][DEFAULT]
        for key in ("operations_per_s", "cpu_us_per_operation", "p99_us"):
            figure = rounded(spread([getattr(one, key) for one in base]).median)
            result.setdefault(key, {})[at] = figure
        for option, runs in record["runs"].items():
            if option == DEFAULT:
                continue
            if isinstance(runs[0], Refused):
                result.setdefault("refused", {})[option] = runs[0].why
                continue
            add_ratio(result, "cpu_ratio", [at, option], ratios(runs, base, "cpu_us_per_operation"))
            add_ratio(result, "rate_ratio", [at, option], ratios(runs, base, "operations_per_s"))
            if base[0].p99_us:
                add_ratio(result, "p99_ratio", [at, option], ratios(runs, base, "p99_us"))
    result["qdisc"] = {record["link"]: record["qdisc"] for record in records if record["qdisc"]}
    result["machine"] = machine()
    result["versions"] = versions(())
    return result


def ratios(runs: Sequence[Run], base: Sequence[Run], key: str) -> list[float]:
    """Return a figure of runs by that of the others, round by round."""
    return [getattr(one, key) / getattr(other, key) for one, other in zip(runs, base, strict=True)]


def picture(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Draw processor time by the default's."""
    groups: dict[str, dict[str, Spread]] = {}
    for record in records:
        base = record["runs"][DEFAULT]
        groups[f"{record['link']}\n{record['load']}"] = {
            option: spread(ratios(runs, base, "cpu_us_per_operation"))
            for option, runs in record["runs"].items()
            if option != DEFAULT and isinstance(runs[0], Run)
        }
    draw(path, [("Processor time of an operation, by that of the default", "ratio", groups)])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare options of io_uring; see bench/README.md.")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--links", default="loopback,veth")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="length of one run")
    parser.add_argument("--connections", type=int, default=64)
    add_core_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Run the comparison and print its result."""
    end_in_order()
    arguments = parse_arguments()
    arguments.build = arguments.build.resolve()
    records: list[dict[str, Any]] = []
    with links(arguments.links.split(",")) as found:
        for link in found:
            for load in LOADS:
                runs = measure(link, load, arguments)
                records.append({"link": link.name, "qdisc": link.qdisc, "load": title(load), "runs": runs})
    save(arguments.build / "uring.json", {"machine": machine(), "records": records})
    picture(arguments.build / "uring.png", records)
    publish("uring", summary(records), arguments.build)


if __name__ == "__main__":
    try:
        main()
    except BenchError as exc:
        sys.exit(str(exc))
