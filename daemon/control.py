"""The control socket: how `seedancectl` asks the running daemon, and what it is told.

HTTP/1.1 over a Unix stream socket, with bodies of JSON, so that a person can use it too:

    curl --unix-socket /run/seedance/control.sock http://localhost/v1/status

    GET  /v1/status           StatusReport
    GET  /v1/tenants          {"tenants": [TenantStatus, …]}
    GET  /v1/tenants/<name>   TenantStatus
    GET  /v1/model            ModelReport
    POST /v1/model/load       ModelReport; the body is a LoadOrder, e.g. {"path": "/srv/models/next"}
    POST /v1/model/cancel     ModelReport
    POST /v1/reload           Reloaded
    POST /v1/stop             Stopping

An error has a status from 400 on and a body as at the daemon's other doors: {"error": {"message": "cannot …", …}}.
Who may ask is said by the permissions of the socket file, and again by the credentials that the kernel vouches for:
root, the daemon's own user, and the members of the group that it was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from seedance.daemon.control_messages import (
    BadFile,
    CancelLoad,
    EngineReport,
    Failed,
    GatewayReport,
    GetModel,
    GetStatus,
    LoadModel,
    ModelReport,
    ProcessStatus,
    Reload,
    Reloaded,
    Reply,
    Request,
    StatusReport,
    StepReport,
    Stop,
    Stopping,
    TenantStatus,
)
from seedance.daemon.network import ListenerStatus
from seedance.daemon.protocol import head
from seedance.daemon.protocol.http import Event, HeadReceived, HttpServer, RequestReceived
from seedance.daemon.protocol.response import JSON, Headers, error_object
from seedance.daemon.sockets import listen_unix
from seedance.engine.model_load import LoadOrder
from seedance.errors import KernelError, ResourceBroken

__all__ = [
    "BadFile",
    "CancelLoad",
    "ControlServer",
    "EngineReport",
    "Failed",
    "GatewayReport",
    "GetModel",
    "GetStatus",
    "ListenerStatus",
    "LoadModel",
    "ModelReport",
    "ProcessStatus",
    "Reload",
    "Reloaded",
    "Reply",
    "Request",
    "StatusReport",
    "StepReport",
    "Stop",
    "Stopping",
    "TenantStatus",
    "ask",
    "listen",
]

_log = logging.getLogger(__name__)

SOCKET_NAME: Final = "control.sock"
MAX_REQUEST_BYTES: Final = 64 << 10
MAX_CONNECTIONS: Final = 64

_ANSWER_S: Final = 15.0
_PATIENCE_S: Final = 30.0
_READ_BYTES: Final = 64 << 10
_MOST_ANSWER_BYTES: Final = 256 << 20
_LIMITS: Final = head.Limits(head_bytes=16 << 10, target_bytes=1024, body_bytes=MAX_REQUEST_BYTES)
_PLACES: Final[dict[str, tuple[str, Request | None]]] = {
    "/v1/status": ("GET", GetStatus()),
    "/v1/tenants": ("GET", GetStatus()),
    "/v1/model": ("GET", GetModel()),
    "/v1/model/load": ("POST", None),
    "/v1/model/cancel": ("POST", CancelLoad()),
    "/v1/reload": ("POST", Reload()),
    "/v1/stop": ("POST", Stop()),
}
"""Where what can be asked for; None where the body says more."""
_TENANTS: Final = "/v1/tenants"
_PLACE_OF: Final[dict[type, tuple[str, str]]] = {
    GetStatus: ("GET", "/v1/status"),
    GetModel: ("GET", "/v1/model"),
    LoadModel: ("POST", "/v1/model/load"),
    CancelLoad: ("POST", "/v1/model/cancel"),
    Reload: ("POST", "/v1/reload"),
    Stop: ("POST", "/v1/stop"),
}
_METHODS: Final = {"GET": ("GET", "HEAD"), "POST": ("POST",)}
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SO_PEERGROUPS: Final = 59
_PEER_GROUPS_BYTES: Final = 1024  # Python asks for no more

_reply_decoder: Final[msgspec.json.Decoder[Reply]] = msgspec.json.Decoder(Reply)
_order_decoder: Final[msgspec.json.Decoder[LoadOrder]] = msgspec.json.Decoder(LoadOrder)

_Answer = tuple[int, Headers, bytes]


def listen(path: str, group: int | None = None) -> socket.socket:
    """Return the listening control socket, for its owner and the members of a group. Raises KernelError."""
    sock = listen_unix(path, 0o600)
    if group is not None:
        try:
            os.chown(path, -1, group)
            os.chmod(path, 0o660)
        except OSError as exc:
            sock.close()
            os.unlink(path)
            raise KernelError(f"give '{path}' to group {group}", exc.errno or errno.EPERM) from exc
    return sock


class ControlServer:
    """The daemon's end; `answer` is asked for each request, one after the other on each connection."""

    def __init__(
        self, sock: socket.socket, answer: Callable[[Request], Awaitable[Reply]], group: int | None = None
    ) -> None:
        """`group` is whose members may ask, beside root and this process's own user."""
        self._sock = sock
        self._path = str(sock.getsockname())
        self._answer = answer
        self._group = group
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to answer."""
        self._server = await asyncio.start_unix_server(self._connected, sock=self._sock)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= MAX_CONNECTIONS:
                await self._converse(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the peer went or waited too long, or we are closing: nothing to tell anybody
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        may_ask = self._may_ask(writer.get_extra_info("socket"))
        server = HttpServer(_LIMITS)
        while not server.should_close:
            # Not `wait_for`: before 3.12 it loses a cancellation that comes when what it waits for is done.
            async with asyncio.timeout(_PATIENCE_S):
                data = await reader.read(_READ_BYTES)
            if data:
                server.receive_data(data)
            else:
                server.receive_eof()
            # An answer lets the next of several requests in; it has to be taken before that one is answered.
            while events := server.events_received():
                for event in events:
                    await self._take(event, server, may_ask=may_ask)
                writer.write(server.data_to_send())
                async with asyncio.timeout(_PATIENCE_S):
                    await writer.drain()

    async def _take(self, event: Event, server: HttpServer, *, may_ask: bool) -> None:
        if isinstance(event, HeadReceived):
            server.accept_body()
        elif isinstance(event, RequestReceived):
            server.send_response(*await self._respond(event.request, event.body, may_ask=may_ask))

    def _may_ask(self, sock: socket.socket) -> bool:
        """Say whether the peer, at the time that it connected, was somebody whom we answer."""
        _, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid in (0, os.geteuid()):
            return True
        if self._group is None:
            return False
        try:
            groups = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _PEER_GROUPS_BYTES)
        except OSError:  # it is in more groups than that
            groups = b""
        return self._group == gid or self._group in [group for (group,) in struct.iter_unpack("I", groups)]

    async def _respond(self, request: head.Request, body: bytes, *, may_ask: bool) -> _Answer:  # noqa: PLR0911
        if not may_ask:
            return _error(403, "forbidden", "cannot answer this user; ask as root or as a member of the daemon's group")
        tenant = request.path.removeprefix(f"{_TENANTS}/") if request.path.startswith(f"{_TENANTS}/") else None
        place = _PLACES.get(_TENANTS if tenant else request.path)
        if place is None:
            known = ", ".join((*_PLACES, f"{_TENANTS}/<name>"))
            return _error(404, "not_found", f"cannot find '{request.path}'; there are {known}")
        method, question = place
        if request.method not in _METHODS[method]:
            text = f"cannot do {request.method} here; use {method}"
            return _error(405, "method_not_allowed", text, (("Allow", ", ".join(_METHODS[method])),))
        try:
            question = question or LoadModel(_order_decoder.decode(body))
        except msgspec.DecodeError as exc:
            return _error(400, "invalid_request", f'cannot read the body: {exc}; send e.g. {{"path": "/srv/a-model"}}')
        if not isinstance(question, LoadModel) and body.strip() not in (b"", b"{}"):
            return _error(400, "invalid_request", "cannot take a body: this request has no parameters")
        try:
            reply = await self._answer(question)
        except Exception:
            _log.exception("cannot answer %s %s", request.method, request.path)
            return _error(500, "internal_error", "cannot answer: seedanced's log says why")
        return _rendered(request.path, tenant, reply)

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


def _rendered(path: str, tenant: str | None, reply: Reply) -> _Answer:
    """Return the response that shows a reply, or the part of it that the path asks for."""
    if isinstance(reply, Failed):
        return _error(500, "failed", reply.message)
    shown: object = reply
    if isinstance(reply, StatusReport) and path == _TENANTS:
        shown = {"tenants": reply.tenants}
    elif isinstance(reply, StatusReport) and tenant is not None:
        found = [status for status in reply.tenants if status.quota.tenant == tenant]
        if not found:
            return _error(404, "not_found", f"cannot find the tenant '{tenant}'; {_TENANTS} lists them")
        shown = found[0]
    return 200, JSON, msgspec.json.encode(shown) + b"\n"


def _error(status: int, code: str, message: str, headers: Headers = ()) -> _Answer:
    kind = "invalid_request_error" if status < http.client.INTERNAL_SERVER_ERROR else "server_error"
    return status, (*JSON, *headers), error_object(message, kind, code) + b"\n"


class _ErrorBody(msgspec.Struct):
    class _Error(msgspec.Struct):
        message: str

    error: _Error


def ask(path: str, request: Request) -> Reply:
    """Ask the daemon whose control socket is `path`. Raises ResourceBroken when it does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_ANSWER_S)
        try:
            sock.connect(path)
        except OSError as exc:
            question = "may this user?" if isinstance(exc, PermissionError) else "is it running?"
            raise ResourceBroken(f"cannot connect to seedanced at {path} ({exc.strerror}): {question}") from exc
        connection = http.client.HTTPConnection("localhost")
        connection.sock = sock
        method, place = _PLACE_OF[type(request)]
        try:
            body = msgspec.json.encode(request.order) if isinstance(request, LoadModel) else None
            connection.request(method, place, body, headers={"Connection": "close"})
            with contextlib.closing(connection.getresponse()) as response:
                answer = response.read(_MOST_ANSWER_BYTES)
            if response.status == http.client.OK:
                return _reply_decoder.decode(answer)
            return Failed(msgspec.json.decode(answer, type=_ErrorBody).error.message)
        except OSError as exc:
            raise ResourceBroken(f"cannot get an answer from seedanced at {path}: {exc}") from exc
        except (http.client.HTTPException, msgspec.DecodeError) as exc:
            raise ResourceBroken(f"cannot read the answer of seedanced at {path}: {exc!r}") from exc
