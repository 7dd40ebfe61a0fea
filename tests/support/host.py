"""A real engine host process, its control link, and workers on its channels, as a test drives them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from support.batches import all_deltas

from seedance.engine import host_link
from seedance.engine.channel import Abort, Batch, EngineChanged, Receiver, Refused, SetPaused, Submit, ToWorker, encode
from seedance.engine.ledger import Ledger
from seedance.engine.model_load import LoadState
from seedance.engine.packets import PacketSocket, pair
from seedance.engine.request import FinishReason, Sampling, TenantContext
from seedance.engine.settings import EngineSettings, SyntheticSettings

TIMEOUT_S = 20.0


def make_settings(**synthetic: Any) -> EngineSettings:
    """Return settings of a synthetic engine with room for thousands of streams."""
    return EngineSettings(
        kind="synthetic", name="synthetic", max_streams=4096, synthetic=SyntheticSettings(**{"seed": 7, **synthetic})
    )


def make_tenant(name: str = "acme", row: int = 0) -> TenantContext:
    return TenantContext(name=name, scheduling_class="gold", cache_salt=f"salt of {name}", row=row)


class WorkerEnd:
    """A worker's end of a channel; reads only while `reading` is set."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.batches: list[Batch] = []
        self.states: list[EngineChanged] = []
        self.refusals: list[Refused] = []
        self.token_ids: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, FinishReason] = {}
        self.order: list[ToWorker] = []
        self.eof = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self._changed = asyncio.Condition()
        self._receiver: Receiver[ToWorker] = Receiver(ToWorker)
        self._task = asyncio.create_task(self._read())

    async def submit(self, stream: int, prompt_token_ids: list[int], **sampling: Any) -> None:
        await self.send(encode(Submit(stream, prompt_token_ids, Sampling(**{"max_tokens": 10, **sampling}))))

    async def abort(self, *streams: int) -> None:
        await self.send(encode(Abort(list(streams))))

    async def set_paused(self, is_paused: bool, *streams: int) -> None:
        await self.send(encode(SetPaused(list(streams), is_paused)))

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def wait_for(self, condition: Any) -> None:
        """Wait until `condition()` holds, looking again at each message."""
        async with asyncio.timeout(TIMEOUT_S), self._changed:
            await self._changed.wait_for(condition)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self.sock.close()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self.reading.wait()
            try:
                data = await loop.sock_recv(self.sock, 1 << 18)
            except ConnectionResetError:
                data = b""
            async with self._changed:
                for message in self._receiver.receive_data(data):
                    self._take(message)
                self._changed.notify_all()
            if not data:
                self.eof.set()
                return

    def _take(self, message: ToWorker) -> None:
        self.order.append(message)
        if isinstance(message, Batch):
            self.batches.append(message)
            for delta in all_deltas(message):
                assert delta.stream not in self.finished, "an output came after the last one"
                self.token_ids[delta.stream] += delta.token_ids
                if delta.finish_reason is not None:
                    self.finished[delta.stream] = delta.finish_reason
        elif isinstance(message, EngineChanged):
            self.states.append(message)
        elif isinstance(message, Refused):
            self.refusals.append(message)


class HostProcess:
    """A running host, seen from the supervisor's side."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.process = process
        self.states: list[host_link.EngineChanged] = []
        self.loads: list[LoadState] = []
        self.closed_channels: list[host_link.ChannelClosed] = []
        self.link_closed = asyncio.Event()
        self.ledger = Ledger.create()
        self._changed = asyncio.Event()
        self._queries = itertools.count(1)
        self._answers: dict[int, asyncio.Future[host_link.Statistics]] = {}
        self._workers: list[WorkerEnd] = []
        self._loop = asyncio.get_running_loop()
        self.link = PacketSocket(control, self._loop, self._received, self.link_closed.set)

    def send(self, message: host_link.ToHost, fds: tuple[int, ...] = ()) -> None:
        self.link.send(host_link.TO_HOST.encode(message), fds)

    def start_engine(self, settings: EngineSettings) -> None:
        self.send(host_link.StartEngine(settings), (self.ledger.fd,))

    def attach(self, channel: int, tenant: str = "acme", row: int = 0) -> WorkerEnd:
        ours, theirs = socket.socketpair()
        with theirs:
            self.send(host_link.Attach(channel, make_tenant(tenant, row)), (theirs.fileno(),))
        self._workers.append(WorkerEnd(ours))
        return self._workers[-1]

    async def close(self) -> None:
        """Close our ends; the process then ends by itself."""
        self.link.close()
        self.ledger.close()
        for worker in self._workers:
            await worker.close()

    async def statistics(self) -> host_link.Statistics:
        query = next(self._queries)
        self._answers[query] = self._loop.create_future()
        self.send(host_link.QueryStatistics(query))
        async with asyncio.timeout(TIMEOUT_S):
            return await self._answers[query]

    async def wait_for(self, condition: Any) -> None:
        """Wait until `condition()` holds, looking again at each packet."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def wait_ready(self) -> None:
        await self.wait_for(lambda: self.states and self.states[-1].state == "ready")

    async def exit_code(self) -> int:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.process.wait()

    def _received(self, data: bytes, fds: list[int]) -> None:
        assert not fds
        message = host_link.FROM_HOST.decode(data)
        if isinstance(message, host_link.EngineChanged):
            self.states.append(message)
        elif isinstance(message, host_link.ChannelClosed):
            self.closed_channels.append(message)
        elif isinstance(message, host_link.LoadChanged):
            self.loads.append(message.state)
        else:
            self._answers.pop(message.query).set_result(message)
        self._changed.set()


@contextlib.asynccontextmanager
async def running_host(settings: EngineSettings | None = None) -> AsyncIterator[HostProcess]:
    """Run a host process; with settings, wait until its engine is ready. It is gone afterwards."""
    ours, theirs = pair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "seedance.engine.host", "--control-fd", str(theirs.fileno()),
            pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    host = HostProcess(process, ours)
    try:
        if settings is not None:
            host.start_engine(settings)
            await host.wait_ready()
        yield host
    finally:
        await host.close()
        if process.returncode is None:
            try:
                await host.exit_code()
            except TimeoutError:
                process.send_signal(signal.SIGKILL)
                await process.wait()
                raise
