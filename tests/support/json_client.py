"""A client of `/v2/infer` that goes on after every cut: asyncio, over the `websockets` library."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

from support import tasks
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage
from websockets.typing import Subprotocol

_LOST = (OSError, TimeoutError, EOFError, ConnectionClosed, InvalidHandshake, InvalidMessage)
_LONGEST_WAIT_S = 0.02
_OPEN_TIMEOUT_S = 10.0


class JsonStream:
    """A stream as it comes, each message exactly once and in order; its `last` message once it is over."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.id = ""
        self.token = ""
        self.seq = 0
        self.text = ""
        self.last: dict[str, Any] | None = None
        self.changed = asyncio.Event()

    def message(self) -> dict[str, Any]:
        """Return what is sent on a new connection."""
        if not self.token:
            return self.request
        return {"resume": self.token, "last_seq": self.seq, "id": self.request["id"]}

    def take(self, message: dict[str, Any]) -> None:
        assert message.pop("id") == self.request["id"]
        assert self.last is None
        self.changed.set()
        if "resume" in message:
            assert self.token in ("", message["resume"])
            self.token, self.id = message["resume"], message["stream_id"]
        elif "seq" not in message:
            self.last = message  # the request was refused
        else:
            assert message["seq"] == self.seq + 1
            self.seq += 1
            if "delta" in message:
                self.text += message["delta"]
            elif "note" not in message:
                self.last = message

    async def wait(self, condition: Callable[[JsonStream], bool]) -> None:
        """Wait until something is so of this stream."""
        while not condition(self):
            self.changed.clear()
            await self.changed.wait()

    async def end(self) -> dict[str, Any]:
        """Wait for the last message."""
        await self.wait(lambda stream: stream.last is not None)
        assert self.last is not None
        return self.last


class JsonClient:
    """A client with several streams at once on one connection; an asynchronous context manager.

    `task` connects and reads; it ends early only with what should not be.
    `keeps_trying` off leaves it to `reconnect` when there is to be another connection. `notes` are about no stream.
    """

    def __init__(
        self,
        address: str,
        key: str,
        *,
        name: str = "",
        keeps_trying: bool = True,
        choose: random.Random | None = None,
    ) -> None:
        self.connections = 0
        self.streams: list[JsonStream] = []
        self.notes: list[dict[str, Any]] = []
        self.told = asyncio.Event()
        self.socket: ClientConnection | None = None
        self._uri = f"ws://{address}/v2/infer"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._name = name
        self._keeps_trying = keeps_trying
        self._may_connect = asyncio.Event()
        self._may_connect.set()
        self._choose = choose or random.Random()
        self.task: asyncio.Task[None] | None = None
        self._unsent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def __aenter__(self) -> JsonClient:
        self.task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self.task is not None
        await tasks.end(self.task)
        self.drop()

    def ask(self, prompt: Any, **fields: Any) -> JsonStream:
        """Begin a resumable stream, under an idempotency key where the client has a name."""
        id = f"s{len(self.streams)}"
        request = {"id": id, "prompt": prompt, "resumable": True, **fields}
        if self._name:
            request["idempotency_key"] = f"{self._name}-{id}"
        stream = JsonStream(request)
        self.streams.append(stream)
        self.send(request)
        return stream

    def resume(self, token: str, seq: int = 0) -> JsonStream:
        """Go on with a stream that another client has begun."""
        stream = JsonStream({"id": f"s{len(self.streams)}"})
        stream.token, stream.seq = token, seq
        self.streams.append(stream)
        self.send(stream.message())
        return stream

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, on the connection that there is or the next one."""
        self._unsent.put_nowait(message)

    def drop(self) -> None:
        """Cut the connection."""
        if self.socket is not None:
            self.socket.transport.abort()

    def reconnect(self) -> None:
        """Connect anew, where that is left to the caller."""
        self._may_connect.set()

    async def _run(self) -> None:
        while True:
            await self._may_connect.wait()
            if not self._keeps_trying:
                self._may_connect.clear()
            with contextlib.suppress(*_LOST):
                self.socket = await connect(
                    self._uri,
                    additional_headers=self._headers,
                    subprotocols=[Subprotocol("seedance.json.v1")],
                    ping_interval=None,
                    compression=None,
                    open_timeout=_OPEN_TIMEOUT_S,
                    proxy=None,
                )
                self.connections += 1
                await self._talk(self.socket)
            self.drop()
            await asyncio.sleep(self._choose.uniform(0, _LONGEST_WAIT_S))

    async def _talk(self, socket: ClientConnection) -> None:
        while not self._unsent.empty():  # all of it is in the streams, too
            self._unsent.get_nowait()
        for stream in self.streams:
            if stream.last is None:
                await socket.send(json.dumps(stream.message()))
        sender = asyncio.create_task(self._send(socket))
        try:
            async for data in socket:
                message = json.loads(data)
                if "id" not in message:
                    self.notes.append(message)
                    self.told.set()
                    continue
                self.streams[int(message["id"][1:])].take(message)
        finally:
            with contextlib.suppress(*_LOST):
                await tasks.end(sender)

    async def _send(self, socket: ClientConnection) -> None:
        while True:
            await socket.send(json.dumps(await self._unsent.get()))
