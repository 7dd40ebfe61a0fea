"""The worker: one process a tenant, everything between a client's socket and the engine channel.

It has three links: `handover` brings connections from the gateway, `engine` is the channel to the engine host, and
`control` belongs to the supervisor. When the handover link closes the worker finishes what it has and exits; when the
control link closes it exits at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Final

from seedance.daemon.connection import HttpConnection
from seedance.daemon.doors import infer
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.engine_client import EngineClient
from seedance.daemon.fm_door import FmConnection
from seedance.daemon.fm_sessions import FmSessions, log_bytes
from seedance.daemon.infer_answers import plain_frame
from seedance.daemon.infer_door import EchoConnection, InferConnection, WebSocketConnection
from seedance.daemon.journal import Journal
from seedance.daemon.kept_streams import KeptStreams
from seedance.daemon.links import (
    LAST_WORDS_S,
    MAX_HANDOVER_BYTES,
    TO_GATEWAY,
    TO_WORKER,
    WORKER_ORDERS,
    WORKER_REPORTS,
    Drain,
    EngineChannel,
    HandBack,
    LimiterState,
    Query,
    QuotaChanged,
    Released,
    Taken,
    WorkerIdle,
    WorkerReady,
    WorkerReport,
    WorkerSettings,
    WorkerStatistics,
)
from seedance.daemon.protocol import fm_frame
from seedance.daemon.protocol.fm_session import Options
from seedance.daemon.protocol.frame import CloseCode
from seedance.daemon.protocol.handshake import HandshakeRefused, accept_response_headers
from seedance.daemon.protocol.head import Limits, Request
from seedance.daemon.protocol.http import Phase
from seedance.daemon.ring.driver import Driver, Flow
from seedance.daemon.ring.loop import new_loop
from seedance.daemon.rounds import Rounds
from seedance.daemon.sampling_defaults import load_sampling_defaults
from seedance.daemon.service import DRAIN_RETRY_S, Service
from seedance.daemon.shared_log import SharedLog
from seedance.daemon.tokenizer_cache import tokenizer_in
from seedance.daemon.wheel import Wheel
from seedance.engine.channel import EngineChanged
from seedance.engine.packets import PacketSocket
from seedance.qos.limiter import LimiterStatistics, TenantLimiter

_log = logging.getLogger(__name__)
_LONGEST_TICK_S: Final = 1.0
_SWITCH_S: Final = 0.0005
# What a turn of these costs, some tenths of a millisecond, is what a token may wait for it.
_CHECKS_AT_ONCE: Final = 1024
_SUBPROTOCOLS: Final = {"/v2/infer": (infer.SUBPROTOCOL,), "/v2/stream": (fm_frame.SUBPROTOCOL,)}
_TAKEN: Final = TO_GATEWAY.encode(Taken())

Connection = HttpConnection | WebSocketConnection


class Worker:
    """A tenant's connections and what serves them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        driver: Driver,
        links: tuple[socket.socket, socket.socket, socket.socket],
        settings: WorkerSettings,
        journal: Journal | None = None,
    ) -> None:
        handover, engine, control = links
        self._loop = loop
        self._driver = driver
        self._settings = settings
        self._stalled: dict[Connection, tuple[int, float]] = {}
        self._released = 0
        self.leaving = False
        self._idle_since_s = loop.time()
        self._idle_told = False
        self._told = LimiterStatistics()
        self._tick_s = min(_LONGEST_TICK_S, settings.http.ping_interval_s / 4)
        self._next_tick_s = loop.time() + self._tick_s
        self.ping_interval_s = settings.http.ping_interval_s
        # Whether anything else was sent meanwhile or not: nobody has to remember who was quiet.
        self._pings: Wheel[Connection] = Wheel(self.ping_interval_s - self._tick_s, loop.time())
        self._connections = self._pings.members
        # WebSockets have no deadlines, and are looked at when they are pinged: most of many are idle.
        self._http: dict[HttpConnection, None] = {}
        self._checks = Rounds(self._http, self._tick_s, _CHECKS_AT_ONCE, loop.time())
        self._patience_s = {
            Phase.IDLE: settings.http.idle_timeout_s,
            Phase.HEAD: settings.http.head_timeout_s,
            Phase.BODY: settings.http.body_timeout_s,
            Phase.CLOSED: settings.http.idle_timeout_s,
            Phase.HANDED_OVER: settings.http.idle_timeout_s,
        }
        self.finished: asyncio.Future[None] = loop.create_future()
        self.limits = Limits(head_bytes=settings.worker.max_head_bytes, body_bytes=settings.worker.max_body_bytes)
        self.max_backlog_bytes = settings.worker.max_backlog_bytes
        self.test_echo = settings.test_echo
        self._limiter = TenantLimiter(settings.quota)
        if settings.limiter is not None:
            self._limiter.restore(settings.limiter, loop.time(), time.time())
        self.service = Service(loop, settings.quota, self._limiter)
        # The clock is the loop's own, without the call around it: it is asked twice a step.
        self.service.engine = EngineClient(
            driver, self._limiter, time.monotonic, self._engine_changed, plain_frame, journal, self._model_coming
        )
        self.service.engine.connect(engine.detach())
        options = Options(
            payload_bytes=max(settings.worker.max_message_bytes, fm_frame.MIN_PAYLOAD_BYTES),
            bound_bytes=self.max_backlog_bytes,
        )
        self.sessions = FmSessions(loop, self.service, settings.session_key, settings.quota, options, journal)
        self.streams = KeptStreams(
            loop, self.service, settings.session_key, settings.quota, self.sessions, self.max_backlog_bytes
        )
        self._engine_changed(settings.engine)
        self._handover = PacketSocket(handover, loop, self._handed_over, self._handover_closed)
        self._control = PacketSocket(control, loop, self._ordered, self._finish)
        self._report(WorkerReady(driver.statistics().driver))
        loop.call_later(self._tick_s, self._turn)

    # -- connections --------------------------------------------------------------------------------------------------

    def _handed_over(self, data: bytes, fds: list[int]) -> None:
        handover = TO_WORKER.decode(data)
        if len(fds) != 1:
            _log.error("a connection was handed over with %d descriptors, ignoring", len(fds))
            for fd in fds:
                os.close(fd)
            return
        self._handover.send(_TAKEN)
        connection = HttpConnection(self, handover.peer, handover.listener)
        connection.flow = self._driver.open(fds[0], connection)
        self._pings.add(connection)
        self._http[connection] = None
        connection.data_received(handover.data)

    def hand_back(self, connection: HttpConnection, data: bytes) -> None:
        if len(data) > MAX_HANDOVER_BYTES or self.leaving:
            connection.flow.abort()
            return
        late: list[bytes] = []
        connection.flow.endpoint = _Leaving(late, lambda: self.forget(connection))

        def detached(fd: int) -> None:
            self._remove(connection)
            everything = data + b"".join(late)
            if len(everything) <= MAX_HANDOVER_BYTES:
                packet = TO_GATEWAY.encode(HandBack(connection.peer, connection.listener, everything))
                self._handover.send(packet, (fd,))
            else:
                self._count_released()
            os.close(fd)

        connection.flow.detach(detached)

    def upgrade(self, connection: HttpConnection, request: Request) -> None:
        try:
            headers = accept_response_headers(request, _SUBPROTOCOLS.get(request.path, ()))
        except HandshakeRefused as exc:
            connection.refuse_upgrade(exc)
            return
        rest = connection.http.switch_protocols(headers)
        flow = connection.flow
        flow.send(connection.http.data_to_send())
        web_socket = self._web_socket(request.path, flow)
        flow.endpoint = web_socket
        self._remove(connection)
        self._pings.add(web_socket)
        if rest:
            web_socket.data_received(rest)

    def _web_socket(self, path: str, flow: Flow) -> WebSocketConnection:
        if path == "/v2/stream":
            return FmConnection(self, flow)
        kind = EchoConnection if path == "/echo" else InferConnection
        return kind(self, flow, self._settings.worker.max_message_bytes)

    def forget(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._remove(connection)
        self._count_released()
        if self.leaving and not self._connections:
            self._finish()

    def _remove(self, connection: Connection) -> None:
        self._pings.remove(connection)
        self._stalled.pop(connection, None)
        if isinstance(connection, HttpConnection):
            del self._http[connection]
        self._idle_since_s = self._loop.time()

    def _count_released(self) -> None:
        if not self._released:
            self._loop.call_soon(self._tell_released)
        self._released += 1

    def _tell_released(self) -> None:
        count, self._released = self._released, 0
        self._handover.send(TO_GATEWAY.encode(Released(count)))

    # -- time ---------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Look at some of the connections, and about once a second at what is not theirs."""
        now = self._loop.time()
        for http in self._checks.due(now):
            self._check_deadline(http, now)
            self._check_stalled(http, now, http.flow.waiting_bytes if http.http.phase is Phase.STREAMING else 0)
        for connection in self._pings.due(now):
            if not isinstance(connection, HttpConnection):
                self._check_stalled(connection, now, connection.flow.waiting_bytes)
                connection.tick()
            elif connection.http.phase is Phase.STREAMING:
                connection.ping()
        if now >= self._next_tick_s:
            self._next_tick_s = now + self._tick_s
            self._tick(now)
        if not self.finished.done():
            next_s = min(self._checks.next_s(now), self._pings.next_s(now), self._next_tick_s - now)
            self._loop.call_later(next_s, self._turn)

    def _tick(self, now: float) -> None:
        """See to the supervisor's books, to what waits for an engine, and whether to stay at all."""
        self._tell_limiter()
        self.service.resume_all()
        self.service.engine.end_overdue()
        for connection in [one for one in self._stalled if not isinstance(one, HttpConnection)]:
            self._check_stalled(connection, now, connection.flow.waiting_bytes)
        idle_s = now - self._idle_since_s
        is_idle = not self._connections and not len(self.sessions) and not len(self.streams)
        if is_idle and not self._idle_told and idle_s >= self._settings.worker.idle_timeout_s:
            self._idle_told = True
            self.sessions.leave()
            self._report(WorkerIdle())

    def _check_stalled(self, connection: Connection, now: float, left_bytes: int) -> None:
        """Cut off who has taken nothing for `idle_timeout` of a stream that waits for it, paused or not."""
        if not left_bytes:
            self._stalled.pop(connection, None)
            return
        before_bytes, deadline_s = self._stalled.get(connection, (0, 0.0))
        if left_bytes != before_bytes:
            self._stalled[connection] = left_bytes, now + self._settings.http.idle_timeout_s
        elif now >= deadline_s:
            _log.info("a client reads nothing any more; its streams are ended")
            connection.flow.abort()

    def _check_deadline(self, connection: HttpConnection, now: float) -> None:
        phase = connection.http.phase
        if phase is not connection.phase_seen:
            connection.phase_seen = phase
            connection.deadline_s = now + self._patience_s.get(phase, math.inf)
        elif now >= connection.deadline_s:
            self._end(connection, now)

    def _end(self, connection: HttpConnection, now: float) -> None:
        """Close a connection; one whose peer takes nothing of what is left for it is cut off the next time."""
        left_bytes = connection.flow.backlog_bytes
        if left_bytes and left_bytes == connection.left_bytes:
            connection.flow.abort()
            return
        connection.left_bytes = left_bytes
        connection.deadline_s = now + self._settings.http.idle_timeout_s
        if connection.http.phase is Phase.BODY:
            connection.fail(ApiError("invalid_request", "cannot wait longer for the request's body", status=408))
        else:
            connection.flow.close()

    def _tell_limiter(self) -> None:
        statistics = self._limiter.statistics()
        if statistics != self._told:
            self._told = statistics
            self._report(LimiterState(self._limiter.snapshot(self._loop.time(), time.time())))

    # -- the engine ---------------------------------------------------------------------------------------------------

    def _engine_changed(self, change: EngineChanged) -> None:
        tokenizer = defaults = None
        if change.model is not None:
            try:
                tokenizer = tokenizer_in(change.model.tokenizer_dir)
                if change.model.tokenizer_dir:
                    defaults = load_sampling_defaults(change.model.tokenizer_dir)
            except (OSError, ValueError) as exc:
                _log.error("cannot use the tokenizer of model '%s': %s", change.model.name, exc)
        self.service.engine_changed(change, tokenizer, defaults)

    def _model_coming(self, tokenizer_dir: str) -> None:
        """Load the tokenizer of a model that will be served, beside what goes on; and say that it is there."""

        def loaded(done: asyncio.Future[object]) -> None:
            if not done.cancelled():
                reason = "" if done.exception() is None else str(done.exception())
                self.service.engine.model_prepared(tokenizer_dir, reason)

        self.service.in_thread(_load_for, tokenizer_dir).add_done_callback(loaded)

    # -- the supervisor -----------------------------------------------------------------------------------------------

    def _report(self, report: WorkerReport) -> None:
        self._control.send(WORKER_REPORTS.encode(report))

    def _ordered(self, data: bytes, fds: list[int]) -> None:
        order = WORKER_ORDERS.decode(data)
        if isinstance(order, EngineChannel) and len(fds) == 1:
            self.service.engine.connect(fds.pop())
        elif isinstance(order, QuotaChanged):
            self.service.quota_changed(order.quota)
            self.sessions.quota_changed(order.quota)
            self.streams.quota_changed(order.quota)
        elif isinstance(order, Query):
            self._tell_limiter()
            self._report(
                WorkerStatistics(len(self._connections), self._limiter.statistics(), self._driver.statistics())
            )
        elif isinstance(order, Drain):
            self._drain(order.deadline_s)
        for fd in fds:
            os.close(fd)

    def _handover_closed(self) -> None:
        self._leave()

    def _drain(self, deadline_s: float) -> None:
        self.service.draining = True
        self._tell_all("draining", round(1000 * DRAIN_RETRY_S))
        self._loop.call_later(deadline_s, self._end_streams)
        self._leave()

    def _tell_all(self, note: str, retry_after_ms: int) -> None:
        """Tell all clients who can be told beside what they have asked for."""
        self.sessions.tell_all(note, retry_after_ms)
        self.streams.tell_all(note, retry_after_ms)
        for connection in list(self._connections):
            if isinstance(connection, InferConnection):
                connection.tell(note, retry_after_ms)

    def _end_streams(self) -> None:
        """Tell every client whose stream still runs; the last of them to close its connection ends the worker.

        Streams of sessions and kept streams are not ended: they stay in the journal, for the next worker.
        """
        text = "cannot finish this request: the service is being stopped"
        self.service.engine.end_all(ApiError("overloaded", text, retry_after_s=DRAIN_RETRY_S), is_kept=False)
        self.sessions.park()
        self.streams.park()
        self._loop.call_later(LAST_WORDS_S, self._finish)

    def _leave(self) -> None:
        """Take nothing new; exit with the last connection. Idle ones are closed."""
        self.leaving = True
        for connection in list(self._connections):
            if isinstance(connection, HttpConnection):
                connection.close_when_done()
            elif not connection.is_busy:
                connection.close(CloseCode.GOING_AWAY, "the service is going away")
        if not self._connections:
            self._finish()

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def close(self) -> None:
        """Leave: tell what was used, and close everything."""
        for connection in list(self._connections):
            connection.flow.abort()
        self.sessions.close()
        self.streams.close()
        self._tell_limiter()
        self.service.close()
        self.service.engine.close()
        self._handover.close()
        self._control.close()


def _load_for(tokenizer_dir: str) -> object:
    """Load all that a model needs here. Raises ValueError or OSError when that cannot be."""
    return tokenizer_in(tokenizer_dir), load_sampling_defaults(tokenizer_dir) if tokenizer_dir else None


class _Leaving:
    """The endpoint of a connection that is being handed back: keeps what still arrives."""

    __slots__ = ("_late", "_lost")

    def __init__(self, late: list[bytes], lost: Callable[[], None]) -> None:
        self._late = late
        self._lost = lost

    def data_received(self, data: bytes) -> None:
        self._late.append(data)

    def eof_received(self) -> None:
        pass

    def backlog_drained(self) -> None:
        pass

    def connection_lost(self, error: OSError | None) -> None:
        self._lost()


def run(
    handover: socket.socket, engine: socket.socket, control: socket.socket, journal_fd: int, settings: WorkerSettings
) -> int:
    """Be the worker of a tenant until there is nothing left to do; returns the exit status.

    `journal_fd` is the tenant's `shared_log`, or -1: its sessions then end with the worker.
    """
    # What a thread, such as one that loads a tokenizer, may keep the loop waiting for, each time it wants to go on.
    sys.setswitchinterval(_SWITCH_S)
    loop, driver = new_loop(settings.worker.io)
    asyncio.set_event_loop(loop)
    try:
        bound_bytes = log_bytes(settings.quota)
        journal = Journal(SharedLog(journal_fd) if journal_fd >= 0 else None, bound_bytes)
        worker = Worker(loop, driver, (handover, engine, control), settings, journal)
        gc.collect()
        gc.freeze()
        loop.run_until_complete(worker.finished)
        worker.close()
        # One more turn, so that what the closing sent and cancelled gets out.
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
    return 0
