"""The gateway: accepts connections, learns whose they are from the first request's key, and hands them over.

It owns no tenant's data for longer than a request's head takes to arrive. Connections pass through three stages:
*greeting* (no key seen yet; few, short-lived, bounded in number and time), *waiting* (for the tenant's worker to be
forked; bounded per tenant) and *held* (by the worker, which tells when one has closed). What needs no tenant is
answered here: /healthz, and refusals.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Final

from seedance.daemon import answers
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.greeting import Greeting
from seedance.daemon.keys import KeyTable, key_of
from seedance.daemon.links import (
    GATEWAY_ORDERS,
    GATEWAY_REPORTS,
    MAX_HANDOVER_BYTES,
    EngineStatus,
    GatewayOrder,
    GatewayReady,
    GatewayReport,
    GatewaySettings,
    GatewayStatistics,
    HandBack,
    Query,
    Released,
    StopAccepting,
    Taken,
    TenantEntry,
    Tenants,
    ToGateway,
    WorkerAttached,
    WorkerDetached,
    WorkerFailed,
    WorkerWanted,
)
from seedance.daemon.privileges import Capability
from seedance.daemon.process import LINK_FD, SERVING_SLICE_S, begin, shorten_slice
from seedance.daemon.protocol.head import Limits, Request
from seedance.daemon.protocol.response import Headers
from seedance.daemon.ring.driver import Driver, Listener
from seedance.daemon.ring.loop import new_loop
from seedance.daemon.route import Route, WorkerLink
from seedance.engine.adapter import EngineState
from seedance.engine.packets import MAX_DESCRIPTORS, MAX_PACKET_BYTES, PacketSocket
from seedance.errors import RemoteProtocolError
from seedance.qos.quota import Quota

_log = logging.getLogger(__name__)

_SWEEP_S: Final = 1.0
_WAIT_S: Final = 10.0
_LINK_RETRY_S: Final = 0.002
_INTERNET: Final = (socket.AF_INET, socket.AF_INET6)
_KEY_GONE: Final = ApiError("unauthorized", "cannot serve this request: its key is no longer valid")


class Gateway:
    """The gateway's state on one event loop; `link` leads to the supervisor."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        driver: Driver,
        link: socket.socket,
        settings: GatewaySettings,
        listeners: Sequence[socket.socket],
    ) -> None:
        self._loop = loop
        self._driver = driver
        self._settings = settings
        self._limits = Limits(head_bytes=settings.max_head_bytes)
        self._keys = KeyTable(())
        self._routes: dict[str, Route] = {}
        self._incoming: list[TenantEntry] = []
        self._engine = EngineStatus(EngineState.STARTING)
        self._greetings: set[Greeting] = set()
        self._waiting = self._held = self._accepted = self._refused = 0
        self._link = PacketSocket(link, loop, self._ordered, loop.stop)
        self._sockets = listeners
        self._listeners: list[Listener] = []
        self._marks_off = probe_marks()
        self._loop.call_later(_SWEEP_S, self._sweep)

    def _accept(self) -> None:
        """Begin to accept, once it is known who is a tenant: until then clients wait in the listeners' backlog."""
        for sock, name in zip(self._sockets, self._settings.listeners, strict=True):
            self._listeners.append(self._driver.listen(sock, functools.partial(self._connected, sock, name)))
        self._report(GatewayReady(self._driver.statistics().driver, self._marks_off))

    # connections that have not shown a key yet

    def _connected(self, listener: socket.socket, name: str, fd: int) -> None:
        self._accepted += 1
        sock = socket.socket(listener.family, listener.type, listener.proto, fileno=fd)
        if len(self._greetings) + self._waiting + self._held >= self._settings.max_connections:
            self._send_off(sock, ApiError("overloaded", "cannot take more connections now"))
            return
        if len(self._greetings) >= self._settings.max_greeting:
            # Who has been silent the longest leaves: a real client sends its request at once.
            min(self._greetings, key=lambda greeting: greeting.deadline_s).close()
        self._greet(Greeting(self, self._loop, self._limits, sock, _peer_of(sock), name), self._settings.head_timeout_s)

    def _greet(self, greeting: Greeting, timeout_s: float) -> None:
        greeting.deadline_s = self._loop.time() + timeout_s
        self._greetings.add(greeting)
        greeting.begin()

    def head_received(self, greeting: Greeting, request: Request) -> None:
        """See `greeting.Host`."""
        if request.path == answers.HEALTH_PATH:
            self._tell_health(greeting, request)
            return
        key = key_of(request.headers, request.query)
        tenant = None if key is None else self._keys.tenant_of(key)
        if tenant is None or tenant == greeting.returned_by:
            reason = "needs an API key, as 'Authorization: Bearer sk-…'" if key is None else "has a key nobody knows"
            self._refuse(greeting, ApiError("unauthorized", f"cannot serve this request: it {reason}"))
            return
        self._assign(greeting, self._routes[tenant])

    def head_failed(self, greeting: Greeting, error: RemoteProtocolError) -> None:
        """See `greeting.Host`."""
        self._refuse(greeting, ApiError("invalid_request", str(error), status=error.code))

    def left(self, greeting: Greeting) -> None:
        """See `greeting.Host`."""
        self._greetings.discard(greeting)

    def _tell_health(self, greeting: Greeting, request: Request) -> None:
        if request.method not in ("GET", "HEAD") or request.has_body:
            error = ApiError(
                "invalid_request", f"cannot do that to {answers.HEALTH_PATH}: it takes GET without a body", status=405
            )
            self._refuse(greeting, error, (("Allow", "GET, HEAD"),))
            return
        response = answers.health(self._engine.state, keep_alive=request.keep_alive, with_body=request.method == "GET")
        greeting.deadline_s = self._loop.time() + self._settings.keep_alive_s
        if request.keep_alive:
            greeting.answer(response, request)
        else:
            self._greetings.discard(greeting)
            self._say_last(greeting.take(), response)

    def _refuse(self, greeting: Greeting, error: ApiError, headers: Headers = ()) -> None:
        self._greetings.discard(greeting)
        self._send_off(greeting.take(), error, headers)

    def _send_off(self, sock: socket.socket, error: ApiError, headers: Headers = ()) -> None:
        self._refused += 1
        self._say_last(sock, answers.refusal(error, headers))

    def _say_last(self, sock: socket.socket, response: bytes) -> None:
        """Send a last response; the driver sees to it that it arrives although the peer may still be sending."""
        flow = self._driver.open(sock.detach(), answers.Farewell())
        flow.send(response)
        flow.close()

    # tenants and their workers

    def _assign(self, greeting: Greeting, route: Route) -> None:
        # First of all: what arrives before is nobody's for the kernel.
        self._mark(greeting.sock, route.entry.mark)
        limit = route.entry.connections
        if limit is not None and route.connections >= limit:
            text = f"cannot take this connection: the limit 'network.connections' of {limit} is reached"
            self._refuse(greeting, ApiError("rate_limited", text))
            return
        if len(route.waiting) >= self._settings.max_waiting:
            self._refuse(greeting, ApiError("overloaded", "cannot take this connection: too many are waiting"))
            return
        self._greetings.discard(greeting)
        greeting.deadline_s = self._loop.time() + _WAIT_S
        route.waiting.append(greeting)
        self._waiting += 1
        self._serve(route)

    def _serve(self, route: Route) -> None:
        """Hand over who waits, as far as the link takes it; ask for a worker where there is none."""
        link = route.link
        while route.waiting and link is not None and link.is_ready:
            link.hand_over(route.waiting.popleft())
        if not route.waiting:
            return
        if link is None and not route.wanted:
            route.wanted = True
            self._report(WorkerWanted(route.entry.name))
        elif link is not None and route.retry is None:
            route.retry = self._loop.call_later(_LINK_RETRY_S, self._serve_again, route)

    def _mark(self, sock: socket.socket, mark: int) -> None:
        if mark and not self._marks_off and sock.family in _INTERNET:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)

    def _serve_again(self, route: Route) -> None:
        route.retry = None
        self._serve(route)

    def _next_waiting(self, route: Route) -> Greeting:
        self._waiting -= 1
        return route.waiting.popleft()

    def _turn_away(self, route: Route, error: ApiError) -> None:
        while route.waiting:
            self._refuse(self._next_waiting(route), error)

    def worker_said(self, link: WorkerLink, message: ToGateway, fds: list[int]) -> None:
        """See `route.Listener`."""
        match message, fds:
            case Taken(), []:
                if link.taken():
                    self._waiting -= 1
                    self._held += not link.leaving
            case Released(), []:
                self._held -= link.released(message.count)
            case HandBack(), [fd] if len(message.data) <= MAX_HANDOVER_BYTES:
                self._held -= link.released(1)
                sock = socket.socket(fileno=fd)
                name = link.route.entry.name
                greeting = Greeting(
                    self, self._loop, self._limits, sock, message.peer, message.listener, message.data, name
                )
                self._greet(greeting, self._settings.head_timeout_s)
            case _:
                raise RemoteProtocolError("cannot take this message of a worker: its descriptors do not fit it", 1002)

    def worker_ended(self, link: WorkerLink) -> None:
        """See `route.Listener`: who was in flight is the first to be served by the next worker."""
        route = link.route
        route.waiting.extendleft(reversed(link.in_flight))
        link.in_flight.clear()
        self._unlink(link)
        if self._routes.get(route.entry.name) is route:
            self._serve(route)
        else:
            self._turn_away(route, _KEY_GONE)

    def _unlink(self, link: WorkerLink) -> None:
        """Forget a link, but for what is in flight: its worker is gone, leaving or replaced."""
        self._held -= link.released(link.held)
        if link.route.link is link:
            link.route.link = None

    # the supervisor's orders

    def _report(self, report: GatewayReport) -> None:
        self._link.send(GATEWAY_REPORTS.encode(report))

    def _ordered(self, data: bytes, fds: list[int]) -> None:
        order = GATEWAY_ORDERS.decode(data)
        if isinstance(order, WorkerAttached) and len(fds) == 1:
            self._attach(order, fds[0])
            return
        if fds:
            raise RemoteProtocolError("cannot take descriptors with this order", 1002)
        self._obey(order)

    def _obey(self, order: GatewayOrder) -> None:
        match order:
            case WorkerDetached():
                route = self._routes.get(order.tenant)
                if route is not None:
                    self._leave(route)
                    self._serve(route)
            case WorkerFailed():
                route = self._routes.get(order.tenant)
                if route is not None:
                    route.wanted = False
                    self._turn_away(route, ApiError("overloaded", f"cannot serve this tenant now: {order.reason}"))
            case Tenants():
                self._incoming += order.entries
                if order.last:
                    entries, self._incoming = self._incoming, []
                    self._replace_tenants(entries)
            case EngineStatus():
                self._engine = order
            case Query():
                self._report(
                    GatewayStatistics(self._accepted, self._refused, len(self._greetings), self._waiting, self._held)
                )
            case StopAccepting():
                self._loop.stop()

    def _attach(self, order: WorkerAttached, fd: int) -> None:
        sock = socket.socket(fileno=fd)
        route = self._routes.get(order.tenant)
        if route is None:
            sock.close()
            return
        route.wanted = False
        if route.link is not None and route.link.worker == order.worker:
            sock.close()
            return
        self._leave(route)
        route.link = WorkerLink(route, order.worker, sock, self._loop, self)
        self._serve(route)

    def _leave(self, route: Route) -> None:
        """Give a worker no more connections; its link stays open until it has taken those in flight, or ended."""
        link = route.link
        if link is not None:
            self._unlink(link)
            link.leave()

    def _replace_tenants(self, entries: Sequence[TenantEntry]) -> None:
        names = {entry.name for entry in entries}
        for name in self._routes.keys() - names:
            route = self._routes.pop(name)
            self._leave(route)
            self._turn_away(route, _KEY_GONE)
        for entry in entries:
            route = self._routes.setdefault(entry.name, Route(entry))
            route.entry = entry
        self._keys = KeyTable(Quota(tenant=entry.name, keys=tuple(entry.keys)) for entry in entries)
        if not self._listeners:
            self._accept()

    # time

    def _sweep(self) -> None:
        """Close who has been greeting for too long, and turn away who has waited too long."""
        self._loop.call_later(_SWEEP_S, self._sweep)
        now = self._loop.time()
        for greeting in [greeting for greeting in self._greetings if greeting.deadline_s <= now]:
            if greeting.data:
                self._refuse(greeting, ApiError("invalid_request", "cannot wait longer for the request", status=408))
            else:
                greeting.close()
        if self._waiting:
            for route in list(self._routes.values()):
                while route.waiting and route.waiting[0].deadline_s <= now:
                    self._refuse(
                        self._next_waiting(route), ApiError("overloaded", "cannot serve this tenant now: no worker yet")
                    )

    def close(self) -> None:
        """Stop accepting and close what has not been handed over; the listening sockets stay open elsewhere."""
        for listener in self._listeners:
            listener.close()
        for greeting in list(self._greetings):
            greeting.close()
        for route in self._routes.values():
            while route.waiting:
                self._next_waiting(route).close()
            if route.link is not None:
                route.link.close()
        self._link.close()


def probe_marks() -> str:
    """Return why this process cannot mark sockets, "" when it can; CAP_NET_RAW is enough since Linux 5.17."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 1)
        except OSError as exc:
            return "no CAP_NET_RAW" if exc.errno == errno.EPERM else exc.strerror or str(exc)
    return ""


def _peer_of(sock: socket.socket) -> str:
    if sock.family not in _INTERNET:
        return ""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:  # gone already; the next read will tell
        return ""
    return f"[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{host}:{port}"


def first_order(link: socket.socket) -> tuple[GatewaySettings, list[socket.socket]]:
    """Wait for the supervisor's first message: how to run, and the listening sockets. Raises RemoteProtocolError."""
    link.setblocking(True)
    data, fds, _, _ = socket.recv_fds(link, MAX_PACKET_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    sockets = [socket.socket(fileno=fd) for fd in fds]
    order = GATEWAY_ORDERS.decode(data)
    if not isinstance(order, GatewaySettings) or len(order.listeners) != len(sockets):
        raise RemoteProtocolError("cannot run without settings and listening sockets", 1002)
    return order, sockets


def main() -> None:
    """Run the gateway on the link that the supervisor left."""
    begin("gateway", sys.argv[1:], keep=[Capability.NET_RAW])  # which SO_MARK asks for
    shorten_slice(SERVING_SLICE_S)
    link = socket.socket(fileno=LINK_FD)
    try:
        settings, listeners = first_order(link)
    except (RemoteProtocolError, OSError):
        os._exit(1)  # the supervisor has gone before we began
    loop, driver = new_loop(settings.io)
    asyncio.set_event_loop(loop)
    gateway = Gateway(loop, driver, link, settings, listeners)
    try:
        loop.run_forever()
    finally:
        gateway.close()
        loop.close()
    os._exit(0)  # taking apart what was imported would only hold up the daemon's end


if __name__ == "__main__":
    main()
