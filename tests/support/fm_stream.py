"""A client of `/v2/stream` with input and output: asyncio, over the `websockets` library.

It connects again by itself, as `fm_states` says, for as long as the session can be gone on with.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from support import tasks
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage
from websockets.protocol import State as WebSocketState

from seedance.daemon.protocol.fm_client import ClientSession
from seedance.daemon.protocol.fm_frame import SUBPROTOCOL
from seedance.daemon.protocol.fm_logprobs import Candidate, ScoredTokens
from seedance.daemon.protocol.fm_messages import Accept, Cancel, End, Error, Infer, Note, Part, Tokens
from seedance.daemon.protocol.fm_parts import in_parts
from seedance.daemon.protocol.fm_sender import Backpressure
from seedance.daemon.protocol.fm_session import Event, Options, Welcomed
from seedance.daemon.protocol.fm_states import State, reconnect_delay_s
from seedance.daemon.protocol.fm_timing import NEVER

_OPEN_TIMEOUT_S = 10.0


class SessionLost(Exception):
    """The session cannot be gone on with; `error` is what the server said."""

    def __init__(self, error: Error) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.error = error


class FmStream:
    """One stream as it comes: `data` so far, log probabilities if asked for, and its `last` frame once it has ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.id = ""
        self.data = bytearray()
        self.positions: list[list[Candidate]] = []
        self.notes: list[str] = []
        self.last: End | Error | None = None
        self.changed = asyncio.Event()

    @property
    def text(self) -> str:
        return self.data.decode()

    async def wait(self, condition: Callable[[FmStream], bool]) -> None:
        """Wait until something is so of this stream."""
        while not condition(self):
            self.changed.clear()
            await self.changed.wait()

    async def end(self) -> End:
        """Wait for the end; raises SessionLost when it is an error."""
        await self.wait(lambda stream: stream.last is not None)
        if isinstance(self.last, Error):
            raise SessionLost(self.last)
        assert self.last is not None
        return self.last


class FmClient:
    """One session; an asynchronous context manager, which ends the session when it is left.

    `task` connects and reads; it ends early only with what should not be. While `reading` is not set, nothing is taken.
    `keeps_trying` off leaves it to `reconnect` when there is to be another connection.
    """

    def __init__(
        self,
        address: str,
        key: str,
        *,
        client_id: str = "test",
        options: Options | None = None,
        keeps_trying: bool = True,
        choose: random.Random | None = None,
        **connect_options: Any,
    ) -> None:
        self.session = ClientSession(client_id, options=options)
        self.streams: dict[int, FmStream] = {}
        self.notes: list[str] = []
        self.last_note: Note | None = None
        self.welcomes: list[Welcomed] = []
        self.connections = 0
        self.lost: SessionLost | None = None
        self.socket: ClientConnection | None = None
        self._uri = f"ws://{address}/v2/stream"
        self._options: dict[str, Any] = {
            "additional_headers": {"Authorization": f"Bearer {key}"},
            "subprotocols": [SUBPROTOCOL],
            "ping_interval": None,
            "open_timeout": _OPEN_TIMEOUT_S,
            "close_timeout": 1.0,
            "proxy": None,
            **connect_options,
        }
        self.reading = asyncio.Event()
        self.reading.set()
        self._choose = choose or random.Random()
        self._keeps_trying = keeps_trying
        self._may_connect = asyncio.Event()
        self._may_connect.set()
        self._changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._parts: deque[Part] = deque()

    async def __aenter__(self) -> FmClient:
        self.task = asyncio.create_task(self._run())
        await self.wait(lambda client: bool(client.welcomes))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.session.close()
        if self.socket is not None:
            await self.socket.close()
        await self.leave()

    async def leave(self) -> None:
        """Go away without a word, as a process that dies; the session stays at the server."""
        if self.task is not None:
            await tasks.end(self.task)
        self.drop()

    def drop(self) -> None:
        """Cut the connection."""
        if self.socket is not None:
            self.socket.transport.abort()

    def reconnect(self) -> None:
        """Connect anew, where that is left to the caller."""
        self._may_connect.set()

    async def wait(self, condition: Callable[[FmClient], bool]) -> None:
        """Wait until something is so of this client; raises SessionLost."""
        while not condition(self):
            if self.lost is not None:
                raise self.lost
            self._changed.clear()
            await self._changed.wait()

    def ask(self, prompt: Any, **fields: Any) -> FmStream:
        """Begin a stream."""
        number = self.session.next_stream
        stream = self.streams[number] = FmStream(number)
        known: dict[str, Any] = {name: fields.pop(name) for name in ("model", "deadline_ms", "more") if name in fields}
        known.setdefault("model", "")
        if isinstance(prompt, str):
            known["prompt"] = prompt
        elif prompt and isinstance(prompt[0], int):
            known["token_ids"] = prompt
        else:
            known["messages"] = prompt
        infer, parts = in_parts(Infer(stream=number, sampling=fields, **known), self.session.payload_bytes)
        self.session.infer(infer)
        for part in parts:
            self.part(part)
        self._wake.set()
        return stream

    def part(self, part: Part) -> None:
        """Send more of a prompt that was begun with `more`, as soon as there is room for it."""
        self._parts.append(part)
        self._wake.set()

    def cancel(self, stream: int = 0, id: str = "") -> None:
        """End a stream: one of this session, or with an id any of the tenant."""
        self.session.cancel(Cancel(stream=stream, id=id))
        self._wake.set()

    # -- the connections ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        attempt = 0
        while self.session.state is not State.CLOSED:
            if attempt:
                await asyncio.sleep(reconnect_delay_s(attempt, self._choose.random()))
            await self._may_connect.wait()
            if not self._keeps_trying:
                self._may_connect.clear()
            attempt += 1
            welcomes = len(self.welcomes)
            with contextlib.suppress(OSError, TimeoutError, InvalidHandshake, InvalidMessage, EOFError):
                async with connect(self._uri, **self._options) as socket:
                    self.socket = socket
                    self.connections += 1
                    try:
                        await self._talk(socket)
                    finally:
                        self.session.receive_eof()
                        if socket.state is WebSocketState.OPEN:
                            socket.transport.abort()  # to close well would end the session
            if len(self.welcomes) > welcomes:
                attempt = 1

    async def _talk(self, socket: ClientConnection) -> None:
        self.session.connect(time.monotonic())
        reader = asyncio.create_task(self._read(socket))
        try:
            while not reader.done():
                self._wake.clear()
                now = time.monotonic()
                self.session.timer_fired(now)
                self._act()
                while self._parts and self.session.part(self._parts[0]) is not Backpressure.REFUSED:
                    self._parts.popleft()
                for message in self.session.data_to_send(now):
                    await socket.send(message)
                if self.session.should_close:
                    await socket.close(self.session.close_code or 1000)
                    return
                await self._until_due()
        except ConnectionClosed:
            pass
        finally:
            await tasks.end(reader)

    async def _until_due(self) -> None:
        due_s = self.session.next_timer()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if due_s == NEVER else max(0.0, due_s - time.monotonic())):
                await self._wake.wait()

    async def _read(self, socket: ClientConnection) -> None:
        try:
            while True:
                await self.reading.wait()
                message = await socket.recv()
                assert isinstance(message, bytes)
                self.session.receive_data(message, time.monotonic())
                self._act()
                self._wake.set()
        except ConnectionClosed:
            self._wake.set()

    def _act(self) -> None:
        for event in self.session.events_received():
            self._act_on(event)
            self._changed.set()

    def _act_on(self, event: Event) -> None:
        if isinstance(event, Welcomed):
            self.welcomes.append(event)
        elif isinstance(event, Error) and not event.stream:
            self.lost = SessionLost(event)
        elif isinstance(event, Note) and not event.stream:
            self.notes.append(event.note)
            self.last_note = event
        elif isinstance(event, Accept | Tokens | ScoredTokens | Note | End | Error):
            _take(self.streams[event.stream], event)


def _take(stream: FmStream, event: Accept | Tokens | ScoredTokens | Note | End | Error) -> None:
    if isinstance(event, Accept):
        stream.id = event.id
    elif isinstance(event, Tokens):
        assert stream.last is None
        stream.data += event.data
    elif isinstance(event, ScoredTokens):
        assert stream.last is None
        stream.data += event.text.encode()
        stream.positions += event.positions
    elif isinstance(event, Note):
        stream.notes.append(event.note)
    else:
        stream.last = event
    stream.changed.set()
