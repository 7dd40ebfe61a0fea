"""Our contender: a real worker process, between the load client and a bench that plays its neighbours.

The zygote is started as the supervisor starts it and forks the worker. This process then stands for the gateway (it
accepts, reads a connection's first request and hands both over) and for the engine host (it answers on the channel).
Every client opens `/v2/infer` and asks for one endless stream; from then on the load client itself writes the batches,
made here beforehand with the channel's own encoder, into the channel: one token for each stream a step, the next
batch when half of the last one's messages have arrived, so that the worker never waits and never finds two batches at
once (which it would merge into one send for each connection, and win the comparison by another kind of work).
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from tokenizers import Tokenizer

from bench.contender import RUN_S, Client, Idle, Run, connect_measured, latencies, read_times, run_of
from bench.payloads import STRIDE
from bench.processes import BenchError, descendants, end, spent
from seedance.daemon import shared_log
from seedance.daemon.children import spawn
from seedance.daemon.config import HttpConfig, WorkerConfig
from seedance.daemon.keys import hash_key, new_key
from seedance.daemon.links import (
    TO_WORKER,
    WORKER_REPORTS,
    ZYGOTE_ORDERS,
    ZYGOTE_REPORTS,
    Handover,
    Spawn,
    Spawned,
    WorkerReady,
    WorkerSettings,
    ZygoteReady,
)
from seedance.engine.channel import Batch, EngineChanged, Receiver, Submit, ToHost, encode, pack_singles
from seedance.engine.packets import MAX_PACKET_BYTES, Codec, pair
from seedance.engine.request import ModelInfo
from seedance.qos.quota import Quota, RequestQuota

MODEL: Final = "bench"
REQUEST: Final = '{"model":"bench","prompt":"x","stream":true,"max_tokens":100000000,"ignore_eos":true}'
START_S: Final = 30.0
BATCHES: Final = 8
BACKLOG: Final = 4096
# A delta's message is {"delta":"…"}: with so many bytes of text it is as long as the shortest of the others' payloads.
MIN_TEXT_BYTES: Final = 5
MAX_TEXT_BYTES: Final = 48
# No timer of the worker may fire while another contender has its turn.
PATIENCE_S: Final = 86_400.0
MIN_TOKENS: Final = 500

M = TypeVar("M", bound=msgspec.Struct)


class Seedance:
    """The worker process, its links, and the client; `io` is the worker's setting of that name."""

    def __init__(self, build: Path, tokenizer_dir: Path, server_core: int, client_core: int, io: str = "auto") -> None:
        self.name = "seedance" if io == "auto" else f"seedance-{io}"
        self._build = build
        self._tokenizer_dir = tokenizer_dir
        self._cores = (server_core, client_core)
        self._io = io
        self._stack = ExitStack()
        self._worker_pid = 0
        self._connections = 0
        self._control: socket.socket | None = None
        self._client: Client | None = None
        self.driver = ""

    def start(self, connections: int) -> Idle:
        """Start the zygote and the worker, connect, and have a stream open on every connection."""
        self._connections = connections
        key = new_key()
        handover, channel = self._start_worker(key)
        listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=BACKLOG))
        # What is accepted inherits it, as from the gateway's own listeners.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stack.callback(listener.shutdown, socket.SHUT_RDWR)
        threading.Thread(target=hand_over_all, args=(listener, handover), daemon=True).start()
        arguments = ["--path", "/v2/infer", "--header", f"Authorization: Bearer {key}"]
        arguments += ["--feed-fd", str(channel.fileno())]
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        self._client = Client(self._build, target, [self._cores[1]], arguments)
        self._stack.callback(self._client.stop)
        idle = connect_measured(self._client, self._worker_pid, connections)
        self._client.message(REQUEST)
        streams = receive_submits(channel, connections)
        batches = self._build / "batches.bin"
        write_batches(batches, streams, plain_tokens(self._tokenizer_dir / "tokenizer.json"))
        self._client.process.ask(f"batches {batches}", "loaded")
        return idle

    def run(self, steps: int) -> Run:
        """Feed `steps` batches, each as soon as half of the last has arrived."""
        client = self._ready()
        before = spent(self._worker_pid)
        client.process.tell(f"feed {steps}")
        counted = client.received()
        return run_of(counted, self._connections, steps, spent(self._worker_pid) - before)

    def pace(self, steps: int, period_ns: int) -> list[int]:
        """Feed a batch every `period_ns`; a step begins when its batch is about to be written to the channel."""
        client = self._ready()
        path = self._build / "times.bin"
        client.process.tell(f"pace {steps} {period_ns} {path}")
        client.received()
        times = read_times(path)
        return latencies(times[:steps], times, steps, self._connections)

    def stop(self) -> None:
        """End client, worker and zygote."""
        self._stack.close()
        self._client = self._control = None

    def _start_worker(self, key: str) -> tuple[socket.socket, socket.socket]:
        """Start zygote and worker on the server's core; return our ends of the handover link and the channel."""
        link, zygote_end = pair()
        zygote_pid = spawn("seedance.daemon.zygote", ["warning"], zygote_end)
        # The zygote is still importing; the worker inherits its processors.
        os.sched_setaffinity(zygote_pid, {self._cores[0]})
        self._stack.callback(end_family, zygote_pid)
        self._stack.enter_context(link)
        zygote_end.close()
        expect(link, ZYGOTE_REPORTS, ZygoteReady)
        (handover, worker_handover), (control, worker_control) = pair(), pair()
        channel, worker_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        settings = WorkerSettings(
            quota=Quota(tenant=MODEL, keys=(hash_key(key),), requests=RequestQuota(queue=None)),
            worker=WorkerConfig(io=self._io, idle_timeout_s=PATIENCE_S),
            http=HttpConfig(idle_timeout_s=PATIENCE_S, ping_interval_s=PATIENCE_S),
            log_level="warning",
            session_key=os.urandom(32),
        )
        journal = shared_log.create("bench")
        self._stack.callback(os.close, journal)
        fds = [worker_handover.fileno(), worker_channel.fileno(), worker_control.fileno(), journal]
        socket.send_fds(link, [ZYGOTE_ORDERS.encode(Spawn(1, settings))], fds)
        self._worker_pid = expect(link, ZYGOTE_REPORTS, Spawned).pid
        for sock in (worker_handover, worker_channel, worker_control):
            sock.close()
        for sock in (handover, channel, control):
            self._stack.enter_context(sock)
        info = ModelInfo(
            name=MODEL,
            tokenizer_dir=str(self._tokenizer_dir),
            max_model_len=1 << 30,
            vocab_size=Tokenizer.from_file(str(self._tokenizer_dir / "tokenizer.json")).get_vocab_size(),
            eos_token_ids=(),
            created=0,
            engine="bench",
        )
        # A batch for 10,000 streams should go into the channel at once.
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        channel.sendall(encode(EngineChanged("ready", "", info)))
        self.driver = expect(control, WORKER_REPORTS, WorkerReady).driver
        handover.setblocking(True)
        self._control = control
        return handover, channel

    def _ready(self) -> Client:
        """Return the client, after throwing away what the worker has told its supervisor meanwhile."""
        assert self._client is not None
        assert self._control is not None
        drain(self._control)
        return self._client


def expect(link: socket.socket, codec: Codec[Any], kind: type[M]) -> M:
    """Wait for the next packet of a link, which must be a message of this kind; close descriptors that come with it."""
    link.settimeout(START_S)
    try:
        data, fds, _, _ = socket.recv_fds(link, MAX_PACKET_BYTES, 8)
    except TimeoutError as exc:
        raise BenchError(f"cannot go on: no {kind.__name__} within {START_S:.0f} s") from exc
    for fd in fds:
        os.close(fd)
    if not data:
        raise BenchError(f"cannot go on: the process ended before it said {kind.__name__}")
    message = codec.decode(data)
    if not isinstance(message, kind):
        raise BenchError(f"cannot go on: got {message}, not {kind.__name__}")
    return message


def drain(link: socket.socket) -> None:
    """Throw away what waits on a link."""
    link.setblocking(False)
    with suppress(BlockingIOError):
        while link.recv(MAX_PACKET_BYTES):
            pass


def hand_over_all(listener: socket.socket, handover: socket.socket) -> None:
    """Play the gateway until the listener is shut down: accept, read the first request's head, hand over both."""
    while True:
        try:
            connection, address = listener.accept()
        except OSError:
            return
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                part = connection.recv(65536)
                if not part:
                    break
                head += part
            connection.setblocking(False)
            send_with_fd(handover, TO_WORKER.encode(Handover(address[0], "bench", head)), connection.fileno())
        handover.recv(MAX_PACKET_BYTES)  # the worker says that it has taken it


def send_with_fd(link: socket.socket, packet: bytes, fd: int) -> None:
    """Send a packet with a descriptor, as soon as the kernel allows one more of them in flight."""
    while True:
        try:
            socket.send_fds(link, [packet], [fd])
        except OSError as exc:
            if exc.errno != errno.ETOOMANYREFS:
                raise
            time.sleep(0.001)
        else:
            return


def receive_submits(channel: socket.socket, count: int) -> list[int]:
    """Play the engine host until `count` generations have been asked for; return the worker's numbers for them."""
    receiver: Receiver[ToHost] = Receiver(ToHost)
    streams: list[int] = []
    channel.settimeout(RUN_S)
    while len(streams) < count:
        data = channel.recv(1 << 20)
        if not data:
            raise BenchError(f"cannot go on: the worker closed its channel after {len(streams)} requests")
        streams += [message.stream for message in receiver.receive_data(data) if isinstance(message, Submit)]
    return streams


def plain_tokens(tokenizer_json: Path) -> list[int]:
    """Return the tokens whose text is printable ASCII of a suitable length: each makes one message at once."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    found = []
    for token_id in sorted(tokenizer.get_vocab().values()):
        text = tokenizer.decode([token_id])
        fits = MIN_TEXT_BYTES <= len(text) <= MAX_TEXT_BYTES
        if fits and text.isascii() and text.isprintable() and not set(text) & set('"\\'):
            found.append(token_id)
    if len(found) < MIN_TOKENS:
        raise BenchError(f"cannot use '{tokenizer_json}': it has {len(found)} plain tokens, not {MIN_TOKENS}")
    return found


def write_batches(path: Path, streams: Sequence[int], tokens: Sequence[int]) -> None:
    """Write BATCHES batches for the load client: one token for each stream in each, another one in the next."""
    with path.open("wb") as file:
        for step in range(BATCHES):
            ids = (tokens[(i + step * STRIDE) % len(tokens)] for i in range(len(streams)))
            batch = encode(Batch([], pack_singles(chain.from_iterable(zip(streams, ids, strict=True)))))
            file.write(struct.pack("=I", len(batch)) + batch)


def end_family(pid: int) -> None:
    """Kill a child of ours and all that descend from it, and collect the child."""
    for member in reversed(descendants(pid)):
        end(member, signal.SIGKILL)
    os.waitpid(pid, 0)
