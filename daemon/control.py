"""The control socket: how `seedancectl` asks the running daemon, and what it is told.

A Unix stream socket that only the daemon's user may open. A request and its reply are one line of JSON each, so that
a person can speak it too; a connection carries any number of them, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from seedance.daemon.ring.driver import DriverStatistics
from seedance.engine.adapter import EngineStatistics
from seedance.engine.request import ModelInfo
from seedance.errors import ResourceBroken
from seedance.qos.limiter import LimiterStatistics
from seedance.qos.quota import Quota

_log = logging.getLogger(__name__)

SOCKET_NAME: Final = "control.sock"
MAX_REQUEST_BYTES: Final = 64 << 10

_ANSWER_S: Final = 15.0


class GetStatus(msgspec.Struct, tag="status", tag_field="request", frozen=True):
    """Ask how the daemon is."""


class Reload(msgspec.Struct, tag="reload", tag_field="request", frozen=True):
    """Have the tenant files read again."""


class Stop(msgspec.Struct, tag="stop", tag_field="request", frozen=True):
    """Have the daemon end; answered before it does."""


Request = GetStatus | Reload | Stop


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A child of the supervisor; `pid` is 0 while it is down."""

    name: str
    pid: int
    restarts: int


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The engine: its state, what it serves, and what it counts; None where the host does not answer."""

    state: str
    detail: str
    model: ModelInfo | None
    statistics: EngineStatistics | None


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway: what moves its bytes, two counters since its start, and connections by stage."""

    driver: str
    accepted: int = 0
    refused: int = 0
    greeting: int = 0
    waiting: int = 0
    held: int = 0


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant; `worker_pid` is 0 while it has no worker. `used` counts since the daemon's start.

    `io` counts what the worker's driver does; None without a worker that has answered.
    """

    quota: Quota
    mark: int
    worker_pid: int
    driver: str
    connections: int
    used: LimiterStatistics
    io: DriverStatistics | None = None


class BadFile(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant file that is not in force; `kept` says whether its tenant goes on with an older quota."""

    path: str
    key: str
    reason: str
    kept: bool


class StatusReport(msgspec.Struct, tag="status", tag_field="reply", frozen=True, kw_only=True):
    """How the daemon is. `limits_off` maps each kernel limit that is not applied to the reason."""

    version: str
    pid: int
    uptime_s: float
    config: str
    listeners: list[str]
    engine: EngineReport
    gateway: GatewayReport
    processes: list[ProcessStatus]
    tenants: list[TenantStatus]
    bad_files: list[BadFile]
    limits_off: dict[str, str]


class Reloaded(msgspec.Struct, tag="reload", tag_field="reply", frozen=True, kw_only=True):
    """What a reload changed. `note` says what it has not put in force, "" where there is nothing to say."""

    added: list[str]
    changed: list[str]
    removed: list[str]
    bad_files: list[BadFile]
    note: str = ""


class Stopping(msgspec.Struct, tag="stop", tag_field="reply", frozen=True):
    """The daemon is ending."""

    pid: int


class Failed(msgspec.Struct, tag="failed", tag_field="reply", frozen=True):
    """The request could not be met; `message` is for people."""

    message: str


Reply = StatusReport | Reloaded | Stopping | Failed

_request_decoder: Final = msgspec.json.Decoder(Request)
_reply_decoder: Final[msgspec.json.Decoder[Reply]] = msgspec.json.Decoder(Reply)


class ControlServer:
    """The daemon's end; `answer` is asked for each request, one after the other on each connection."""

    def __init__(self, sock: socket.socket, answer: Callable[[Request], Awaitable[Reply]]) -> None:
        self._sock = sock
        self._path = str(sock.getsockname())
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to answer."""
        self._server = await asyncio.start_unix_server(self._connected, sock=self._sock, limit=MAX_REQUEST_BYTES)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._converse(reader, writer)
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # the peer went, sent a line without end, or we are closing: nothing to tell anybody
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            try:
                reply = await self._answer(_request_decoder.decode(line))
            except msgspec.DecodeError as exc:
                reply = Failed(f"cannot read the request: {exc}")
            writer.write(msgspec.json.encode(reply) + b"\n")
            await writer.drain()

    async def close(self) -> None:
        """Answer no more and remove the socket file."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def ask(path: str, request: Request) -> Reply:
    """Ask the daemon whose control socket is `path`. Raises ResourceBroken when it does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_ANSWER_S)
        try:
            sock.connect(path)
        except OSError as exc:
            question = "may this user?" if isinstance(exc, PermissionError) else "is it running?"
            raise ResourceBroken(f"cannot connect to seedanced at {path} ({exc.strerror}): {question}") from exc
        try:
            sock.sendall(msgspec.json.encode(request) + b"\n")
            with sock.makefile("rb") as replies:
                line = replies.readline()
        except OSError as exc:
            raise ResourceBroken(f"cannot get an answer from seedanced at {path}: {exc}") from exc
    try:
        return _reply_decoder.decode(line)
    except msgspec.DecodeError as exc:
        raise ResourceBroken(f"cannot read the answer of seedanced at {path}: {exc}") from exc
