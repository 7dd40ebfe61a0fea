"""An engine host in the process of the test, with engines and a clock that the test has in its hands."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

from support.fake_adapter import FakeAdapter, FakeSource, one_after_the_other

from seedance.engine import host_link
from seedance.engine.channel import Receiver, ToHost, ToWorker, encode
from seedance.engine.host import EngineHost
from seedance.engine.ledger import Ledger
from seedance.engine.packets import PacketSocket, pair
from seedance.engine.request import TenantContext
from seedance.engine.settings import EngineSettings, FailoverSettings
from seedance.qos.gpu import GpuPart

TENANT = TenantContext(name="acme", scheduling_class="gold", cache_salt="s")


class Scene:
    """A host in this process with a fake adapter, one worker's channel, and the supervisor's end of the link."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = pair()
        self.adapter = FakeAdapter()
        self.told: list[host_link.FromHost] = []
        self.host = EngineHost(theirs, loop)
        self.link = PacketSocket(
            ours, loop, lambda data, _: self.told.append(host_link.FROM_HOST.decode(data)), self._link_closed
        )
        self.worker, self._theirs = socket.socketpair()
        self.worker.setblocking(False)
        self._receiver: Receiver[ToWorker] = Receiver(ToWorker)

    def start(
        self,
        *adapters: FakeAdapter,
        queue: int = 0,
        gpu: GpuPart | None = None,
        left: Sequence[int] = (),
        ledger: Ledger | None = None,
        **failover: Any,
    ) -> None:
        """`left` are the rows of engines that another host left."""
        settings = EngineSettings(
            kind="synthetic",
            name="s",
            queue=queue,
            gpu=gpu or GpuPart(),
            run_dir="/run/e",
            failover=FailoverSettings(**failover),
        )
        self.source = FakeSource(one_after_the_other(*adapters or [self.adapter]))
        self.source.left_rows += left
        self.host.start_engine(self.source, settings, ledger or Ledger.create())

    def _link_closed(self) -> None:
        """The host has gone; tests see it by what it stopped."""

    async def attach(self) -> None:
        with self._theirs:
            fds = [self._theirs.fileno()]
            self.link.send(host_link.TO_HOST.encode(host_link.Attach(1, TENANT)), fds)
        await settle()

    async def say(self, *messages: ToHost) -> None:
        self.worker.sendall(b"".join(map(encode, messages)))
        await settle()

    async def tell(self, message: host_link.ToHost, *fds: int) -> None:
        self.link.send(host_link.TO_HOST.encode(message), fds)
        await settle()

    def heard(self) -> list[ToWorker]:
        """Return what the worker has received since the last call."""
        with contextlib.suppress(BlockingIOError):
            return self._receiver.receive_data(self.worker.recv(1 << 20))
        return []

    def states(self) -> list[str]:
        return [message.state for message in self.told if isinstance(message, host_link.EngineChanged)]


async def settle() -> None:
    """Let everything happen that needs no time to pass."""
    for _ in range(20):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def scene(*, start: bool = True, queue: int = 0) -> AsyncIterator[Scene]:
    it = Scene()
    serving = asyncio.create_task(it.host.serve())
    if start:
        it.start(queue=queue)
    await settle()
    await it.attach()
    it.heard()
    try:
        yield it
    finally:
        it.host.stop()
        with contextlib.suppress(ZeroDivisionError):
            await serving
        it.link.close()
        it.worker.close()


def brought(it: Scene, key: int) -> list[int]:
    """Return all tokens of a generation so far, as another engine would get them."""
    generation = it.host._generations.get(key)
    assert generation is not None
    it.host._generations.fold()
    return generation.token_ids.tolist()
