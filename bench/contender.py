"""What takes part in the fan-out comparison, and how one that is a server by itself is driven.

A run is the same for all: STEPS steps, each of which sends one message to each of N connections; the time is from the
beginning of the first step to the arrival of the last message at the client. The load client plays the engine too: a
step begins when it says so on a socket, which is when half of the last step's messages have arrived. So no server
waits, none runs ahead of the client (which would have the kernel merge messages, the more the faster the server), and
each pays for being told. The server has one core, the client another one.
"""

from __future__ import annotations

import array
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from bench.processes import BenchError, LineProcess, Spent, private_bytes, spent

CONNECT_S = 120.0
RUN_S = 120.0


class Received(msgspec.Struct, frozen=True):
    """What the client counted in one run; the fields are explained in `fanout_client.c`."""

    messages: int
    bytes: int
    payload_bytes: int
    reads: int
    segments: int
    start_ns: int
    first_ns: int
    last_ns: int
    busy_ns: int
    lost: int


class Run(msgspec.Struct, frozen=True):
    """One run. `late_sends` are those that the kernel took in part or not at once, None when not told."""

    connections: int
    steps: int
    messages_per_s: float
    server_cpu_us_per_message: float
    server_user_us_per_message: float
    client_busy: float
    messages_per_segment: float
    payload_bytes_per_message: float
    late_sends: int | None


class Idle(msgspec.Struct, frozen=True):
    """A server's private memory without connections, with half of them, and with all of them, upgraded and idle."""

    connections: int
    none_bytes: int
    half_bytes: int
    all_bytes: int


class Contender(Protocol):
    """A server and the client's connections to it."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    def start(self, connections: int) -> Idle:
        """Bring the server up, with all connections upgraded and waiting for steps."""

    def run(self, steps: int) -> Run:
        """Make `steps` steps, each when half of the last one's messages have arrived."""

    def pace(self, steps: int, period_ns: int) -> list[int]:
        """Make a step every `period_ns`; return for each message the ns from the step's begin to its arrival."""

    def stop(self) -> None:
        """End server and client; idempotent."""


class Client:
    """The load client, bound to one target; see `fanout_client.c` for its commands."""

    def __init__(self, build: Path, target: str, cores: Sequence[int], arguments: Sequence[str] = ()) -> None:
        argv = [str(build / "fanout_client"), "--connect", target, *arguments]
        fds = [int(arguments[i + 1]) for i, argument in enumerate(arguments) if argument == "--feed-fd"]
        self.process = LineProcess(argv, cores, pass_fds=fds)

    def connect(self, count: int) -> float:
        """Open `count` more connections; return the seconds that it took until all were upgraded."""
        return int(self.process.ask(f"connect {count}", "connected", CONNECT_S)[1]) / 1e9

    def message(self, text: str) -> None:
        """Send a text message on each connection."""
        self.process.ask(f"message {text}", "sent")

    def expect(self, messages: int) -> None:
        """Count from zero; `received` tells when so many have come."""
        self.process.ask(f"expect {messages}", "armed")

    def record(self, steps: int, path: Path) -> None:
        """Count from zero, and keep arrival times for so many steps; `received` tells when `path` is written."""
        self.process.ask(f"record {steps} {path}", "armed")

    def received(self) -> Received:
        """Wait for the end of what was expected. Raises BenchError when a connection was lost."""
        fields = dict(field.split("=") for field in self.process.hear("received", RUN_S))
        counters = Received(**{key: int(value) for key, value in fields.items()})
        if counters.lost:
            raise BenchError(f"cannot use the run: {counters.lost} connections were lost")
        return counters

    def stop(self) -> None:
        """End the client and with it its connections."""
        self.process.stop()


def connect_measured(client: Client, server_pid: int, connections: int) -> Idle:
    """Open the connections in two halves, and see what memory the server takes for them."""
    none_bytes = private_bytes(server_pid)
    client.connect(connections // 2)
    half_bytes = private_bytes(server_pid)
    client.connect(connections - connections // 2)
    return Idle(connections, none_bytes, half_bytes, private_bytes(server_pid))


def run_of(counted: Received, connections: int, steps: int, spent: Spent, late_sends: int | None = None) -> Run:
    """Put the figures of one run together; `spent` is the server's. Raises BenchError when they contradict."""
    if counted.messages != connections * steps:
        raise BenchError(f"cannot use the run: {counted.messages} messages arrived, not {connections * steps}")
    wall_ns = counted.last_ns - counted.start_ns
    return Run(
        connections=connections,
        steps=steps,
        messages_per_s=counted.messages / wall_ns * 1e9,
        server_cpu_us_per_message=spent.cpu_ns / counted.messages / 1e3,
        server_user_us_per_message=spent.user_ns / counted.messages / 1e3,
        client_busy=counted.busy_ns / wall_ns,
        messages_per_segment=counted.messages / counted.segments if counted.segments else 0.0,
        payload_bytes_per_message=counted.payload_bytes / counted.messages,
        late_sends=late_sends,
    )


def latencies(starts: array.array[int], times: array.array[int], steps: int, connections: int) -> list[int]:
    """Return each message's ns from its step's begin to its arrival; `times` is the client's file of arrivals."""
    found: list[int] = []
    for i in range(connections):
        at = steps * (i + 1)
        found.extend(arrived - began for arrived, began in zip(times[at : at + steps], starts, strict=True))
    return found


def read_times(path: Path) -> array.array[int]:
    """Return a file of native u64."""
    times = array.array("Q")
    times.frombytes(path.read_bytes())
    return times


class Server:
    """A contender that is one program with the commands of `fanout_uring.c`."""

    def __init__(self, name: str, argv: Sequence[str], build: Path, server_core: int, client_core: int) -> None:
        self.name = name
        self._argv = argv
        self._build = build
        self._cores = (server_core, client_core)
        self._server: LineProcess | None = None
        self._client: Client | None = None
        self._connections = 0

    def start(self, connections: int) -> Idle:
        """Start the program and connect to it."""
        self._connections = connections
        payloads = str(self._build / "payloads.bin")
        argv = [*self._argv, "--payloads", payloads, "--connections", str(connections)]
        engine, server_end = socket.socketpair()
        with engine, server_end:
            argv += ["--steps-fd", str(server_end.fileno())]
            self._server = LineProcess(argv, [self._cores[0]], pass_fds=[server_end.fileno()])
            port = self._server.hear("listening", 30.0)[0]
            feed = ["--feed-fd", str(engine.fileno())]
            self._client = Client(self._build, f"127.0.0.1:{port}", [self._cores[1]], feed)
        signals = self._build / "signals.bin"
        signals.write_bytes(struct.pack("=I", 1) + b"s")
        self._client.process.ask(f"batches {signals}", "loaded")
        idle = connect_measured(self._client, self._server.pid, connections)
        self._server.hear("ready", 30.0)
        return idle

    def run(self, steps: int) -> Run:
        """Make `steps` steps, each when half of the last one's messages have arrived."""
        server, client = self._parts()
        before = spent(server.pid)
        server.tell(f"steps {steps}")
        client.process.tell(f"feed {steps}")
        counted = client.received()
        late_sends = int(server.hear("stepped", RUN_S)[2])
        return run_of(counted, self._connections, steps, spent(server.pid) - before, late_sends)

    def pace(self, steps: int, period_ns: int) -> list[int]:
        """Make a step every `period_ns`, by the server's own clock."""
        server, client = self._parts()
        starts, times = self._build / "starts.bin", self._build / "times.bin"
        client.record(steps, times)
        server.tell(f"pace {steps} {period_ns} {starts}")
        client.received()
        server.hear("stepped", RUN_S)
        return latencies(read_times(starts), read_times(times), steps, self._connections)

    def stop(self) -> None:
        """End both programs."""
        for part in (self._client, self._server):
            if part is not None:
                part.stop()
        self._client = self._server = None

    def _parts(self) -> tuple[LineProcess, Client]:
        assert self._server is not None
        assert self._client is not None
        return self._server, self._client
