"""The whole daemon with its synthetic engine, and the load clients of its tenants.

The engine's tokens are those of a real model's tokenizer. In its own vocabulary every tenth word is cut inside a
character: then no message comes for a step, which would look like a late one.
"""

from __future__ import annotations

import array
import contextlib
import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from support.tiny_model import tiny_model

from bench.openai_servers import MODEL, ServerProcess
from bench.processes import BenchError, LineProcess, private_bytes, spent
from seedance.daemon.keys import hash_key, new_key

CONNECT_S: Final = 600.0
ENDLESS: Final = 30_000

Tables = Mapping[str, Mapping[str, object]]


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


class SyntheticServer(ServerProcess):
    """The daemon with so many tenants, each with an address of its own to connect to and so many streams at most.

    `tables` is more of its configuration, by table and key.
    """

    NAME = "seedance-synthetic"

    def __init__(self, build: Path, cores: Sequence[int], tenants: int, streams: int, tables: Tables) -> None:
        super().__init__(Path(), build, cores)
        self._keys = [new_key() for _ in range(tenants)]
        self._streams = streams
        self._tables = tables

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
        own: dict[str, dict[str, object]] = {
            "listen": {"tcp": [self.address(tenant) for tenant in range(len(self._keys))]},
            "paths": {"state": f"{folder}/state", "run": f"{folder}/run"},
            "engine": {"kind": "synthetic", "name": MODEL, "max_streams": most * len(self._keys)},
            "engine.synthetic": {
                "prompt_tokens_per_s": 0,
                "kv_blocks": 10_000_000,
                "tokenizer": str(tiny_model()),
            },
        }
        for name, table in self._tables.items():
            own.setdefault(name, {}).update(table)
        config = folder / "seedanced.toml"
        config.write_text(toml(own))
        return [sys.executable, "-m", "seedance.daemon", "--config", str(config), "--log-level", "warning"], {}

    def headers(self, tenant: int = 0) -> dict[str, str]:
        """Return the tenant's key."""
        return {"Authorization": f"Bearer {self._keys[tenant]}"}

    def is_engine(self, pid: int) -> bool:
        """Say that no process is left out: the engine is a part of the host."""
        return False

    def pid_of(self, role: str) -> int:
        """Return the process of this name. Raises BenchError when there is none."""
        for pid, name in self.front_pids().items():
            if name == role:
                return pid
        raise BenchError(f"cannot go on: {self.name} has no process '{role}'")

    def memory(self) -> Memory:
        """Return what the processes and the kernel take now."""
        workers = others = 0
        for pid, role in self.front_pids().items():
            if role.startswith("seed-w:"):
                workers += private_bytes(pid)
            else:
                others += private_bytes(pid)
        return Memory(workers, others, kernel_bytes(read("/proc/meminfo"), read("/proc/net/sockstat")))

    def cpu_ns(self) -> dict[str, int]:
        """Return the processor time that the processes have spent so far, by name."""
        found: dict[str, int] = {}
        for pid, role in self.front_pids().items():
            found[role] = found.get(role, 0) + spent(pid).cpu_ns
        return found


def toml(tables: Tables) -> str:
    """Return tables as TOML; strings, numbers and lists of them look as in JSON."""
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join([*lines, ""])


def read(path: str) -> str:
    """Return a file of the kernel's."""
    return Path(path).read_text()


def kernel_bytes(meminfo: str, sockstat: str) -> int:
    """Return the kernel's slabs and TCP's buffers: what sockets are made of (`/proc/meminfo`, `/proc/net/sockstat`)."""
    slab_kib = next(int(line.split()[1]) for line in meminfo.splitlines() if line.startswith("Slab:"))
    tcp = next(line.split() for line in sockstat.splitlines() if line.startswith("TCP:"))
    pages = int(tcp[tcp.index("mem") + 1])
    return (slab_kib << 10) + pages * resource.getpagesize()


def raise_descriptors() -> int:
    """Allow this process and its children as many descriptors as may be; return how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def parts(total: int, count: int) -> list[int]:
    """Divide a number into `count` parts that differ by one at most."""
    return [total // count + (number < total % count) for number in range(count)]


def request(max_tokens: int = ENDLESS) -> str:
    """Return the message that asks `/v2/infer` for a stream."""
    return f'{{"model":"{MODEL}","prompt":"x","stream":true,"max_tokens":{max_tokens},"ignore_eos":true}}'


class Clients:
    """WebSockets of a kind: a load client for each tenant, with so many of them each."""

    def __init__(
        self, server: SyntheticServer, counts: Sequence[int], build: Path, cores: Sequence[int], kind: str
    ) -> None:
        self._counts = counts
        self._files = [build / f"times-{kind}-{tenant}.bin" for tenant in range(len(counts))]
        self._stack = contextlib.ExitStack()
        self._processes = []
        for tenant, count in enumerate(counts):
            argv = [str(build / "fanout_client"), "--connect", server.address(tenant), "--path", "/v2/infer"]
            argv += ["--room", str(max(count, 1)), "--header", ": ".join(*server.headers(tenant).items())]
            self._processes.append(LineProcess(argv, cores))
            self._stack.callback(self._processes[-1].stop)

    def stop(self) -> None:
        """End them."""
        self._stack.close()

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

    def begin(self, what: str) -> None:
        """Begin to keep "gaps" or "arrivals"."""
        self._tell(what)
        self._hear("watching")

    def take(self, what: str) -> array.array[int]:
        """Return the times between the messages of each connection (µs), or when each arrived (ns), since `begin`.

        Raises BenchError when connections were lost.
        """
        for process, path in zip(self._processes, self._files, strict=True):
            process.tell(f"{what} {path}")
        if lost := sum(int(words[1]) for words in self._hear(what)):
            raise BenchError(f"cannot go on: {lost} connections that stream were lost")
        found = array.array("I" if what == "gaps" else "Q")
        for path in self._files:
            found.frombytes(path.read_bytes())
            path.unlink()
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
