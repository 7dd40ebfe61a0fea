"""The client's end of an FM session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

from seedance.daemon.protocol.fm_frame import OF_SESSIONS, Encoding
from seedance.daemon.protocol.fm_logprobs import ScoredTokens, decode_scored
from seedance.daemon.protocol.fm_messages import (
    Accept,
    Cancel,
    End,
    Error,
    Hello,
    Infer,
    Message,
    Note,
    Part,
    Tokens,
    Welcome,
)
from seedance.daemon.protocol.fm_receiver import Receiver
from seedance.daemon.protocol.fm_sender import Backpressure, Sender
from seedance.daemon.protocol.fm_session import (
    UNNUMBERED_FROM_BOTH,
    WIDE_WINDOW,
    Options,
    PeerGone,
    Session,
    Welcomed,
)
from seedance.daemon.protocol.fm_states import FINAL_CODES, State, Trigger
from seedance.daemon.protocol.fm_timing import NEVER, Heartbeat
from seedance.daemon.protocol.frame import CloseCode
from seedance.errors import LocalProtocolError, RemoteProtocolError

_HELLO_AGAIN_S: Final = 1.0
_WELCOME_WITHIN_S: Final = 15.0


class ClientSession(Session):
    """A session as a client has it.

    The owner connects when the state is RECONNECTING, as `fm_states` says when, and may ask once a `Welcomed` came.
    Events of a stream are `Accept`, `Tokens`, `Note`, and last `End` or `Error`; `ScoredTokens` in place of `Tokens` if
    its `sampling` has `logprobs`. A prompt that is too long for a frame goes by `infer` and `part`, as
    `fm_parts.in_parts` cuts it.
    """

    __slots__ = (
        "_encodings",
        "_hello",
        "_hello_at_s",
        "_hello_wait_s",
        "_last_stream",
        "_scored",
        "_streams",
        "_welcome",
        "client_id",
    )

    NUMBERED: ClassVar[frozenset[type]] = frozenset((Accept, Tokens, End, Error, Note))

    def __init__(
        self, client_id: str, *, encodings: Sequence[Encoding] = (Encoding.TEXT,), options: Options | None = None
    ) -> None:
        super().__init__(options)
        self.client_id = client_id
        self._encodings = tuple(map(int, encodings))
        self._welcome: Welcome | None = None
        self._hello: Hello | None = None
        self._hello_at_s = NEVER
        self._hello_wait_s = _HELLO_AGAIN_S
        self._streams: set[int] = set()
        self._scored: set[int] = set()  # those of them that have log probabilities
        self._last_stream = 0

    @property
    def streams(self) -> frozenset[int]:
        """Return the streams that are not over."""
        return frozenset(self._streams)

    @property
    def next_stream(self) -> int:
        """Return the number of the next stream to be begun."""
        return self._last_stream + 1

    def connect(self, now: float) -> None:
        """Begin a connection, with a HELLO."""
        self._open_connection(now)
        welcome = self._welcome
        self._hello = Hello(
            client_id=self.client_id,
            resume_token=welcome.resume_token if welcome else None,
            epoch=welcome.epoch if welcome else 0,
            last_seq=self._receiver.expected_seq - 1 if welcome else 0,
            window=self._window,
            encodings=self._encodings,
            max_payload_bytes=self.options.payload_bytes,
        )
        self._hello_at_s = now
        self._hello_wait_s = _HELLO_AGAIN_S
        self._send_control(self._hello)
        if self._heartbeat is not None:
            self._heartbeat.due_s = now + (_WELCOME_WITHIN_S if self.options.lossless else _HELLO_AGAIN_S)

    # What the owner sends.

    def infer(self, infer: Infer) -> Backpressure:
        """Begin a stream, of a number larger than any before; REFUSED leaves the number free."""
        if infer.stream <= self._last_stream:
            raise LocalProtocolError(f"cannot begin stream {infer.stream}; {self.next_stream} is the next")
        pressure = self._ask(infer)
        if pressure is not Backpressure.REFUSED:
            self._last_stream = infer.stream
            self._streams.add(infer.stream)
            if infer.sampling.get("logprobs") is not None:
                self._scored.add(infer.stream)
        return pressure

    def part(self, part: Part) -> Backpressure:
        """Send more of what a stream is asked; of one that is over, nothing is sent."""
        return self._ask(part) if part.stream in self._streams else Backpressure.NONE

    def cancel(self, cancel: Cancel) -> Backpressure:
        """Have a stream ended; its `End` comes still, if it is one of this session."""
        if cancel.stream and cancel.stream not in self._streams:
            return Backpressure.NONE
        return self._ask(cancel)

    def _ask(self, message: Infer | Part | Cancel) -> Backpressure:
        if self._welcome is None:
            raise LocalProtocolError("cannot ask before the session was welcomed once")
        return self._send(message.stream, message)

    # What the server sent.

    def _welcome_arrived(self, welcome: Welcome, now: float) -> None:
        if self.state is not State.RESTORING:
            return  # it came twice
        before = self._welcome
        continued = before is not None and before.epoch == welcome.epoch
        if (
            welcome.encoding not in OF_SESSIONS.intersection(self._encodings)
            or welcome.max_payload_bytes > self.options.payload_bytes
        ):
            self._fail("protocol_error", "cannot take a WELCOME with what was not offered")
            return
        if not continued:
            self._begin_anew(welcome)
        if not (
            self._sender.resume(welcome.last_seq, welcome.window)
            and welcome.oldest_seq <= self._receiver.expected_seq <= welcome.next_seq
        ):
            self._fail("protocol_error", "cannot go on where the server does")
            return
        self._welcome = welcome
        if self._window >= WIDE_WINDOW:
            self._receiver.tokens_ack_delay_s = welcome.ack_delay_ms / 1000
        self._heartbeat = Heartbeat(now)
        if self._hello_wait_s == _HELLO_AGAIN_S:  # asked once: the answer is to that
            self._round_trip.measured(now - self._hello_at_s)
        again = welcome.next_seq - self._receiver.expected_seq if continued else 0
        self._events.append(Welcomed(welcome.session_id, welcome.resume_for_ms, continued, again))
        self._welcomed()

    def _begin_anew(self, welcome: Welcome) -> None:
        self._payload_bytes = welcome.max_payload_bytes
        self._receiver = Receiver(welcome.oldest_seq, self.options.ring_bytes)
        self._sender = Sender(self.options.bound_bytes, welcome.last_seq + 1)
        self._sender.agree(welcome.max_payload_bytes)
        self._streams.clear()
        self._scored.clear()

    def _deliver(self, message: Message) -> None:
        assert isinstance(message, Accept | Tokens | End | Error | Note)
        stream = message.stream
        if stream not in self._streams and not (isinstance(message, Note) and not stream):
            self._fail("protocol_error", f"cannot take anything for stream {stream}, which does not run")
            return
        if isinstance(message, Tokens):
            self._tokens_arrived(message)
            return
        if isinstance(message, End | Error):
            self._streams.discard(stream)
            self._scored.discard(stream)
        self._events.append(message)

    def _tokens_arrived(self, tokens: Tokens) -> None:
        assert self._welcome is not None
        expected = Encoding.LOGPROBS if tokens.stream in self._scored else self._welcome.encoding
        if tokens.encoding != expected:
            self._fail("protocol_error", f"cannot take tokens in encoding {tokens.encoding}")
        elif expected != Encoding.LOGPROBS:
            self._events.append(tokens)
        else:
            try:
                scored = decode_scored(tokens.data)
            except RemoteProtocolError as error:
                self._fail("protocol_error", str(error))
            else:
                self._events.append(ScoredTokens(tokens.stream, scored.text, scored.positions))

    def _heartbeat_due(self, heartbeat: Heartbeat, now: float) -> None:
        if self.state is not State.RESTORING:
            super()._heartbeat_due(heartbeat, now)
        elif now - self._hello_at_s >= _WELCOME_WITHIN_S:
            self._control.clear()
            self._events.append(PeerGone())
            self._end_connection(Trigger.LOST, CloseCode.ABNORMAL)
        else:
            assert self._hello is not None
            self._send_control(self._hello)
            self._hello_wait_s *= 2
            heartbeat.due_s = min(now + self._hello_wait_s, self._hello_at_s + _WELCOME_WITHIN_S)

    def _trigger(self, code: str) -> Trigger:
        return Trigger.REFUSED if code in FINAL_CODES else Trigger.LOST

    UNNUMBERED: ClassVar[Mapping[type, Callable[[Any, Any, float], None]]] = {
        **UNNUMBERED_FROM_BOTH,
        Welcome: _welcome_arrived,
    }
