"""A gateway in the test's own event loop, with the test as its supervisor, its workers and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from seedance.daemon import links
from seedance.daemon.config import Address
from seedance.daemon.gateway import Gateway
from seedance.daemon.keys import hash_key
from seedance.daemon.ring.driver import Driver
from seedance.daemon.ring.loop import new_loop
from seedance.daemon.sockets import listen_tcp
from seedance.engine.packets import Codec, PacketSocket, pair

TIMEOUT_S = 10.0


class Peer:
    """The other end of a link: what it said is kept in order."""

    def __init__(self, sock: socket.socket, incoming: Codec[Any], outgoing: Codec[Any]) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._messages: asyncio.Queue[tuple[Any, list[int]]] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.link = PacketSocket(sock, asyncio.get_running_loop(), self._received, self.closed.set)

    def _received(self, data: bytes, fds: list[int]) -> None:
        self._messages.put_nowait((self._incoming.decode(data), fds))

    def send(self, message: Any, *fds: int) -> None:
        self.link.send(self._outgoing.encode(message), fds)

    async def next(self) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self._messages.get()

    @property
    def is_empty(self) -> bool:
        return self._messages.empty()

    def close(self) -> None:
        self.link.close()
        while not self._messages.empty():
            for fd in self._messages.get_nowait()[1]:
                os.close(fd)


class Client:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """Return the next response: status, fields in lower case, body."""
        async with asyncio.timeout(TIMEOUT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.rstrip().split("\r\n")
            fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await self.reader.readexactly(int(fields["content-length"]))
        return int(first.split()[1]), fields, body

    async def rest(self) -> bytes:
        """Return everything up to the end."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self.reader.read()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class Harness:
    """See the module's docstring; `supervisor` is the test's end of the gateway's link."""

    def __init__(self, loop: asyncio.AbstractEventLoop, driver: Driver, settings: dict[str, Any]) -> None:
        self.listener = listen_tcp(Address("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        ours, theirs = pair()
        values: dict[str, Any] = {
            "listeners": ["127.0.0.1:0"],
            "io": "auto",
            "head_timeout_s": 5.0,
            "keep_alive_s": 5.0,
            "max_head_bytes": 4096,
            "max_connections": 100,
            "max_greeting": 50,
            "max_waiting": 10,
        }
        self.supervisor = Peer(ours, links.GATEWAY_REPORTS, links.GATEWAY_ORDERS)
        self.gateway = Gateway(loop, driver, theirs, links.GatewaySettings(**values | settings), [self.listener])
        self._driver = driver
        self._closers: list[Callable[[], None]] = []
        self._clients: list[Client] = []
        self._workers = 0

    def set_tenants(self, *names: str, connections: int | None = None) -> None:
        """Have tenants whose key is `key_of(name)`."""
        entries = [
            links.TenantEntry(name, number, connections, [hash_key(key_of(name))])
            for number, name in enumerate(names, start=7)
        ]
        self.supervisor.send(links.Tenants(entries, True))

    async def client(self, data: bytes = b"") -> Client:
        """Connect, and send."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(client)
        client.send(data)
        return client

    def attach(self, tenant: str, copies: int = 1) -> Peer:
        """Be this tenant's worker."""
        ours, theirs = pair()
        worker = Peer(ours, links.TO_WORKER, links.TO_GATEWAY)
        self._workers += 1
        with theirs:
            for _ in range(copies):
                self.supervisor.send(links.WorkerAttached(tenant, self._workers), theirs.fileno())
        self._closers.append(worker.close)
        return worker

    async def wanted(self, tenant: str) -> Peer:
        """Be this tenant's worker once the gateway asks for it."""
        assert await self.supervisor.next() == (links.WorkerWanted(tenant), [])
        return self.attach(tenant)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        for closer in self._closers:
            closer()
        async with asyncio.timeout(TIMEOUT_S):
            while self._driver.statistics().flows:  # last words to clients that have just left
                await asyncio.sleep(0.001)
        self.gateway.close()
        self.supervisor.close()
        self.listener.close()


def key_of(name: str) -> str:
    """Return the API key of a tenant of `Harness.set_tenants`."""
    return f"sk-seed-test-key-of-{name}"


def request(tenant: str, path: str = "/v1/models", method: str = "GET", body: bytes = b"") -> bytes:
    """Return a request with this tenant's key."""
    head = f"{method} {path} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {key_of(tenant)}\r\n"
    if body:
        head += f"Content-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


@contextlib.asynccontextmanager
async def gateway(loop: asyncio.AbstractEventLoop, driver: Driver, **settings: Any) -> AsyncIterator[Harness]:
    """Run a gateway that has told that it is ready."""
    harness = Harness(loop, driver, settings)
    try:
        harness.set_tenants()
        ready, _ = await harness.supervisor.next()
        assert isinstance(ready, links.GatewayReady)
        yield harness
    finally:
        await harness.close()


@contextlib.contextmanager
def ring_loop(io: str) -> Iterator[tuple[asyncio.AbstractEventLoop, Driver]]:
    """Make an event loop of the daemon's own kind."""
    loop, driver = new_loop(io)
    try:
        yield loop, driver
    finally:
        loop.close()


class Connection:
    """A descriptor that was handed over, blocking, for a few bytes each way."""

    def __init__(self, fd: int) -> None:
        self.sock = socket.socket(fileno=fd)
        self.sock.setblocking(True)
        self.sock.settimeout(TIMEOUT_S)

    def __enter__(self) -> socket.socket:
        return self.sock

    def __exit__(self, *_: object) -> None:
        self.sock.close()
