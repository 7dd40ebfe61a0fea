"""The FM door of a worker: `/v2/stream`, the connections of FM sessions."""

from __future__ import annotations

from typing import Protocol

from seedance.daemon import infer_door
from seedance.daemon.fm_sessions import FmSessions
from seedance.daemon.fm_streams import FmSession
from seedance.daemon.infer_door import WebSocketConnection
from seedance.daemon.protocol.fm_frame import HEADER_BYTES
from seedance.daemon.protocol.fm_messages import Error
from seedance.daemon.protocol.fm_opening import HelloReceived, ServerOpening
from seedance.daemon.protocol.fm_timing import HEARTBEAT_S
from seedance.daemon.protocol.frame import CloseCode, frame_binary
from seedance.daemon.protocol.websocket import CloseReceived, Event
from seedance.daemon.ring.driver import Flow


class Owner(infer_door.Owner, Protocol):
    """What a connection needs of its worker."""

    sessions: FmSessions
    ping_interval_s: float


class FmConnection(WebSocketConnection):
    """A connection of an FM session, or one that has not said HELLO yet.

    Its end is not the session's, however it comes, unless the client closes with 1000: that says that it wants no more.
    """

    __slots__ = ("_opening", "_session", "_sessions")

    _owner: Owner

    def __init__(self, owner: Owner, flow: Flow) -> None:
        payload_bytes = owner.sessions.options.payload_bytes
        super().__init__(owner, flow, payload_bytes + HEADER_BYTES)
        self._sessions = owner.sessions
        self._opening = ServerOpening(payload_bytes)
        self._session: FmSession | None = None

    def message_received(self, message: str | bytes) -> None:
        if isinstance(message, str):
            self.close(CloseCode.UNSUPPORTED_DATA, "cannot take text: frames are binary")
        elif self._session is not None:
            self._session.message_received(message)
        else:
            self._open(message)

    def _open(self, message: bytes) -> None:
        opening = self._opening
        opening.receive_data(message)
        for event in opening.events_received():
            if not isinstance(event, HelloReceived):
                continue
            found = self._sessions.find(event.hello)
            if isinstance(found, Error):
                opening.refuse(found)
            else:
                self._session = found
                found.connect(self, event.hello)
        for data in opening.data_to_send():
            self.send_message(data)
        if opening.close_code is not None:
            self.end(opening.close_code)

    def _event(self, event: Event) -> None:
        if isinstance(event, CloseReceived) and event.code == CloseCode.NORMAL and self._session is not None:
            session, self._session = self._session, None
            session.end()
        super()._event(event)

    def tick(self) -> None:
        """See `WebSocketConnection`; a session has a heartbeat of its own, and that is enough if it is often enough."""
        if self._session is None or self._owner.ping_interval_s < HEARTBEAT_S:
            super().tick()

    @property
    def is_busy(self) -> bool:
        return self._session is not None and self._session.is_busy

    def cancel_all(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.disconnected(self)

    def set_paused(self, is_paused: bool) -> None:
        """See `WebSocketConnection`; a session says by itself when its streams are to pause."""

    def fell_behind(self, waiting_bytes: int) -> None:
        """Give the connection up when more waits than the session can have sent: what it has to answer to each ping."""
        if waiting_bytes > 2 * self._sessions.options.bound_bytes:
            self.end(CloseCode.ABNORMAL)

    # -- what its session needs: `fm_streams.Connection` -------------------------------------------------------------

    @property
    def fd(self) -> int:
        return self.flow.fd

    def send_message(self, message: bytes) -> None:
        self.send(frame_binary(message))

    def end(self, close_code: int) -> None:
        if close_code == CloseCode.ABNORMAL:
            self.cancel_all()
            self.flow.abort()
        else:
            self.close(close_code, "")

    def all_sent(self) -> None:
        if self._owner.leaving and not self.is_busy:
            self.close(CloseCode.GOING_AWAY, "the service is going away")
