"""The server's end of FM up to a connection's HELLO, which alone says whose session it is.

The owner looks its resume token up and goes on with `fm_server.ServerSession.connect`, or refuses.
"""

from __future__ import annotations

import msgspec

from seedance.daemon.protocol.fm_frame import DEFAULT_PAYLOAD_BYTES, frame, split_message
from seedance.daemon.protocol.fm_messages import Error, Hello, decode_payload, encode_payload
from seedance.daemon.protocol.fm_session import Failed
from seedance.daemon.protocol.frame import CloseCode
from seedance.errors import RemoteProtocolError


class HelloReceived(msgspec.Struct, frozen=True):
    """A client asks for a session, new or known."""

    hello: Hello


class ServerOpening:
    """A connection that has not said HELLO yet. The four verbs; `refuse` is the owner's answer when it has no session.

    HELLO is alone in its message: what may follow it depends on the answer.
    """

    __slots__ = ("_events", "_out", "_payload_bytes", "close_code")

    def __init__(self, payload_bytes: int = DEFAULT_PAYLOAD_BYTES) -> None:
        self._payload_bytes = payload_bytes
        self._events: list[HelloReceived | Failed] = []
        self._out: list[bytes] = []
        self.close_code: int | None = None

    def receive_data(self, message: bytes) -> None:
        """Take the connection's first binary WebSocket message."""
        if self.should_close:
            return
        try:
            frames = [
                (seq_id, decode_payload(message, start, end))
                for seq_id, start, end in split_message(message, self._payload_bytes)
            ]
        except RemoteProtocolError as error:
            self._fail("protocol_error", str(error), error.code)
            return
        hello = frames[0][1]
        if len(frames) == 1 and isinstance(hello, Hello) and frames[0][0] == 0:
            self._events.append(HelloReceived(hello))
        else:
            self._fail("protocol_error", "cannot begin with anything but one HELLO, without a sequence number")

    def receive_eof(self) -> None:
        """Take the end of the connection."""
        if not self.should_close:
            self.close_code = CloseCode.ABNORMAL

    def events_received(self) -> list[HelloReceived | Failed]:
        """Return what happened since the last call."""
        events, self._events = self._events, []
        return events

    def data_to_send(self) -> list[bytes]:
        """Return WebSocket messages to be sent."""
        out, self._out = self._out, []
        return out

    @property
    def should_close(self) -> bool:
        """Tell whether the connection is to be closed, with `close_code`, once everything is sent."""
        return self.close_code is not None

    def refuse(self, error: Error) -> None:
        """Answer with an error of the connection, such as `not_found` or `gone`."""
        self._out.append(frame(0, encode_payload(error)))
        self.close_code = CloseCode.POLICY_VIOLATION

    def _fail(self, code: str, message: str, close_code: int = CloseCode.PROTOCOL_ERROR) -> None:
        message = message[:512]
        self.refuse(Error(stream=0, code=code, message=message))
        self.close_code = close_code
        self._events.append(Failed(code, close_code, message))
