"""A TCP proxy that cuts every connection after a random time, wherever the streams are just then."""

from __future__ import annotations

import asyncio
import contextlib
import random

_CHUNK_BYTES = 4096


class ChaosProxy:
    """An asynchronous context manager; `address` is where to connect, `cuts` how many connections it has cut."""

    def __init__(self, target: str, choose: random.Random, shortest_s: float, longest_s: float) -> None:
        self.address = ""
        self.cuts = 0
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._choose = choose
        self._life_s = shortest_s, longest_s
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ChaosProxy:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            # `__aexit__` cancels this, and asyncio would report it: nobody else awaits it.
            with contextlib.suppress(asyncio.CancelledError):
                await self._join(reader, writer)
        finally:
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection(*self._target)
        try:
            async with asyncio.timeout(self._choose.uniform(*self._life_s)), asyncio.TaskGroup() as group:
                group.create_task(_carry(reader, their_writer))
                group.create_task(_carry(their_reader, writer))
        except TimeoutError:
            self.cuts += 1
        except ExceptionGroup as group_error:
            if group_error.split(OSError)[1] is not None:
                raise  # else one side has ended it
        finally:
            their_writer.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
