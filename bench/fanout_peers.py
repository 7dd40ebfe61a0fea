"""The Python servers that the fan-out comparison sets beside ours; each does the same work and nothing more.

    python -m bench.fanout_peers SERVER --payloads FILE --connections N [--steps-fd FD]

It prints `listening PORT`, then `ready` once N connections are upgraded, and obeys the same commands as
`fanout_uring.c`: `steps K`, each step at a byte of that socket where there is one, and `pace K PERIOD_NS FILE`,
answered by `stepped START_NS END_NS BACKLOG`, where BACKLOG counts the connections on which bytes still waited at the
end (0 when the client kept up). Every server runs on uvloop where that is installed, without compression, keep-alive
pings and access logs, and with the fastest way of sending that its documentation has.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import importlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.payloads import STRIDE, load

HOST = "127.0.0.1"
BACKLOG = 4096
TURN_S = 0.01
"""So often a loop within ours looks at its connections while there is nothing to come from them."""

Step = Callable[[int], Awaitable[None]]
"""Send each connection its frame of this step."""


class Fleet:
    """The connections of one server, in the order in which they came; a member is what that server sends by."""

    def __init__(self, size: int, payloads: list[bytes]) -> None:
        self.size = size
        self.members: list[Any] = []
        self.complete = asyncio.Event()
        self._payloads = payloads

    def joined(self, member: Any) -> None:
        """Take a connection that has just been upgraded."""
        self.members.append(member)
        if len(self.members) == self.size:
            self.complete.set()

    def frames(self, step: int) -> zip[tuple[Any, bytes]]:
        """Pair each connection with its payload of this step."""
        start = step * STRIDE % len(self._payloads)
        size = len(self.members)
        row = self._payloads[start : start + size]
        while len(row) < size:
            row += self._payloads[: size - len(row)]
        return zip(self.members, row, strict=True)


def listener() -> socket.socket:
    """Return a socket that listens on the loopback address, on a port of the kernel's choice."""
    sock = socket.create_server((HOST, 0), backlog=BACKLOG)
    sock.setblocking(False)
    return sock


@asynccontextmanager
async def websockets_broadcast(fleet: Fleet, sock: socket.socket) -> AsyncIterator[Step]:
    """`websockets`, by the two calls that its `broadcast` makes for each connection, with a payload for each."""
    library = importlib.import_module("websockets.asyncio.server")

    async def handle(connection: Any) -> None:
        fleet.joined(connection)
        await connection.wait_closed()

    async def step(number: int) -> None:
        for connection, payload in fleet.frames(number):
            connection.protocol.send_binary(payload)
            connection.send_data()
        await asyncio.sleep(0)

    async with library.serve(handle, sock=sock, backlog=BACKLOG, compression=None, ping_interval=None):
        yield step


@asynccontextmanager
async def websockets_send(fleet: Fleet, sock: socket.socket) -> AsyncIterator[Step]:
    """`websockets`, by `await connection.send(payload)`."""
    library = importlib.import_module("websockets.asyncio.server")

    async def handle(connection: Any) -> None:
        fleet.joined(connection)
        await connection.wait_closed()

    async def step(number: int) -> None:
        for connection, payload in fleet.frames(number):
            await connection.send(payload)
        await asyncio.sleep(0)

    async with library.serve(handle, sock=sock, backlog=BACKLOG, compression=None, ping_interval=None):
        yield step


@asynccontextmanager
async def uvicorn(fleet: Fleet, sock: socket.socket) -> AsyncIterator[Step]:
    """`uvicorn` with its `websockets-sansio` protocol and a bare ASGI application."""
    library = importlib.import_module("uvicorn")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        fleet.joined(send)
        while (await receive())["type"] != "websocket.disconnect":
            pass

    async def step(number: int) -> None:
        for send, payload in fleet.frames(number):
            await send({"type": "websocket.send", "bytes": payload})
        await asyncio.sleep(0)

    config = library.Config(
        application,
        ws="websockets-sansio",
        lifespan="off",
        log_level="error",
        access_log=False,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        backlog=BACKLOG,
    )
    serving = asyncio.create_task(library.Server(config).serve(sockets=[sock]))
    yield step
    serving.cancel()


@asynccontextmanager
async def aiohttp(fleet: Fleet, sock: socket.socket) -> AsyncIterator[Step]:
    """`aiohttp`, by `await response.send_bytes(payload)`."""
    library = importlib.import_module("aiohttp.web")

    async def handle(request: Any) -> Any:
        response = library.WebSocketResponse(compress=False, autoping=False)
        await response.prepare(request)
        fleet.joined(response)
        async for _ in response:
            pass
        return response

    async def step(number: int) -> None:
        for response, payload in fleet.frames(number):
            await response.send_bytes(payload)
        await asyncio.sleep(0)

    application = library.Application()
    application.router.add_get("/", handle)
    runner = library.AppRunner(application, access_log=None)
    await runner.setup()
    await library.SockSite(runner, sock, backlog=BACKLOG).start()
    yield step


@asynccontextmanager
async def picows(fleet: Fleet, sock: socket.socket) -> AsyncIterator[Step]:
    """`picows`, a WebSocket library in Cython: shown for information, not a Python server in the same sense."""
    library = importlib.import_module("picows")

    class Listener(library.WSListener):  # type: ignore[name-defined,misc]
        def on_ws_connected(self, transport: Any) -> None:
            fleet.joined(transport)

    async def step(number: int) -> None:
        binary = library.WSMsgType.BINARY
        for transport, payload in fleet.frames(number):
            transport.send(binary, payload)
        await asyncio.sleep(0)

    server = await library.ws_create_server(lambda _request: Listener(), sock=sock, backlog=BACKLOG)
    async with server:
        yield step


@asynccontextmanager
async def socketify(fleet: Fleet, sock: socket.socket) -> AsyncIterator[Step]:
    """`socketify`, uWebSockets by way of cffi: it binds for itself, and runs its own loop within ours."""
    library = importlib.import_module("socketify")
    port = sock.getsockname()[1]
    sock.close()
    app = library.App()
    behavior = {
        "compression": library.CompressOptions.DISABLED,
        "idle_timeout": 0,
        "send_pings_automatically": False,
        "open": fleet.joined,
    }
    app.ws("/*", behavior)
    app.listen(library.AppListenOptions(port=port, host=HOST))

    async def turn() -> None:
        while True:
            app.loop.uv_loop.run_nowait()
            await asyncio.sleep(0 if not fleet.complete.is_set() else TURN_S)

    turning = asyncio.create_task(turn())

    async def step(number: int) -> None:
        binary = library.OpCode.BINARY
        for web_socket, payload in fleet.frames(number):
            web_socket.send(payload, binary)
        await asyncio.sleep(0)

    yield step
    turning.cancel()


SERVERS = {
    "websockets-broadcast": websockets_broadcast,
    "websockets-send": websockets_send,
    "uvicorn": uvicorn,
    "aiohttp": aiohttp,
    "picows": picows,
    "socketify": socketify,
}


def backlog(members: list[Any]) -> int:
    """Count connections whose transport still holds bytes; 0 where the server does not show its transport."""
    transports = (getattr(member, "transport", None) for member in members)
    return sum(1 for transport in transports if transport is not None and transport.get_write_buffer_size())


async def run(step: Step, first: int, steps: int, period_ns: int, engine: socket.socket | None) -> array.array[int]:
    """Make `steps` steps, each at a byte of `engine` or one every `period_ns`; return when each began.

    The times are of CLOCK_MONOTONIC. Without `engine` a step follows the last one at once.
    """
    loop = asyncio.get_running_loop()
    starts = array.array("Q")
    begin = time.monotonic_ns()
    for number in range(first, first + steps):
        if period_ns:
            ahead_ns = begin + (number - first) * period_ns - time.monotonic_ns()
            await asyncio.sleep(max(ahead_ns, 0) / 1e9)
        elif engine is not None:
            await loop.sock_recv(engine, 1)
        starts.append(time.monotonic_ns())
        await step(number)
    return starts


async def obey(fleet: Fleet, step: Step, engine: socket.socket | None) -> None:
    """Carry out commands from standard input until it ends."""
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    number = 0
    while line := await commands.readline():
        verb, *values = line.decode().split()
        steps = int(values[0])
        starts = await run(step, number, steps, int(values[1]) if verb == "pace" else 0, engine)
        number += steps
        if verb == "pace":
            Path(values[2]).write_bytes(starts.tobytes())
        print("stepped", starts[0], time.monotonic_ns(), backlog(fleet.members), flush=True)


async def main(server: str, connections: int, payloads: list[bytes], engine: socket.socket | None) -> None:
    """Serve, wait for all connections, and obey."""
    fleet = Fleet(connections, payloads)
    with listener() as sock:
        port = sock.getsockname()[1]
        async with SERVERS[server](fleet, sock) as step:
            print("listening", port, flush=True)
            await fleet.complete.wait()
            print("ready", flush=True)
            await obey(fleet, step, engine)
            # Closing thousands of connections politely is no part of the comparison.
            sys.stdout.flush()
            os._exit(0)


def runner() -> Callable[[Coroutine[Any, Any, None]], None]:
    """Return `uvloop.run`, or `asyncio.run` where uvloop is missing."""
    try:
        library: Any = importlib.import_module("uvloop")
    except ImportError:
        library = asyncio
    run: Callable[[Coroutine[Any, Any, None]], None] = library.run
    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("server", choices=sorted(SERVERS))
    parser.add_argument("--payloads", type=Path, required=True)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--steps-fd", type=int)
    arguments = parser.parse_args()
    steps_socket = None
    if arguments.steps_fd is not None:
        steps_socket = socket.socket(fileno=arguments.steps_fd)
        steps_socket.setblocking(False)
    runner()(main(arguments.server, arguments.connections, load(arguments.payloads), steps_socket))
