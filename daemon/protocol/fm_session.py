"""What both ends of an FM session have in common; `fm_server` and `fm_client` are the two ends.

A session outlives its connections. Its owner feeds whole WebSocket messages to `receive_data`, takes `events_received`,
and sends each of `data_to_send` as a binary message. It calls `timer_fired` at `next_timer`, and `receive_eof` when the
connection has ended. Once `should_close` is set it sends what there is and closes the connection with `close_code`;
after that the session may be connected anew, unless it is CLOSED.

Time is an argument, in seconds of a clock that never goes back. A link that loses nothing (`lossless`, as is every
WebSocket) needs no timers but the heartbeat and the delayed ACK.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import msgspec

from seedance.daemon.protocol.fm_frame import DEFAULT_PAYLOAD_BYTES, HEADER_BYTES, frame, split_message
from seedance.daemon.protocol.fm_logprobs import ScoredTokens
from seedance.daemon.protocol.fm_messages import (
    RING_FRAMES,
    Ack,
    Error,
    Message,
    Nack,
    Ping,
    Pong,
    decode_payload,
    encode_payload,
)
from seedance.daemon.protocol.fm_receiver import ACK_DELAY_S, ACK_FRAMES, DEFAULT_RING_BYTES, Placed, Receiver
from seedance.daemon.protocol.fm_sender import DEFAULT_BOUND_BYTES, Backpressure, Sender
from seedance.daemon.protocol.fm_states import State, Trigger, next_state
from seedance.daemon.protocol.fm_timing import HEARTBEAT_S, NEVER, Heartbeat, RoundTrip
from seedance.daemon.protocol.frame import CloseCode
from seedance.errors import LocalProtocolError, RemoteProtocolError

_MAX_BACKOFF: Final = 64
WIDE_WINDOW: Final = 2 * ACK_FRAMES
"""In a smaller one the peer may be waiting for an ACK before there are enough frames for one."""
TEXT_CHARACTERS: Final = 512


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a session; `payload_bytes` is the most that this end would take, the lesser of both ends' counts."""

    payload_bytes: int = DEFAULT_PAYLOAD_BYTES
    window: int = RING_FRAMES
    bound_bytes: int = DEFAULT_BOUND_BYTES
    ring_bytes: int = DEFAULT_RING_BYTES
    lossless: bool = True


class Drained(msgspec.Struct, frozen=True):
    """Streams that were to pause may go on."""


class Failed(msgspec.Struct, frozen=True):
    """The connection cannot go on, and the ERROR that says so is in `data_to_send`; its last event."""

    code: str
    close_code: int
    message: str


class PeerGone(msgspec.Struct, frozen=True):
    """The peer has said nothing for too long; the connection's last event."""


class Welcomed(msgspec.Struct, frozen=True):
    """The session is connected; without `continued` it is a new one, and no stream of before is in it.

    `frames_resent` had a number before, have not come, and come now.
    """

    session_id: str
    resume_for_ms: int
    continued: bool
    frames_resent: int = 0


Event = Message | ScoredTokens | Drained | Failed | PeerGone | Welcomed


class Statistics(msgspec.Struct, frozen=True):
    """What a session holds; `held_bytes` counts what is under way and what waits, `early_bytes` the receiver's ring."""

    state: State
    srtt_s: float | None
    frames_under_way: int
    frames_waiting: int
    frames_resent: int
    held_bytes: int
    early_frames: int
    early_bytes: int


class Session:
    """One end, without what only a server or a client does."""

    __slots__ = (
        "_control",
        "_events",
        "_heartbeat",
        "_payload_bytes",
        "_probe_backoff",
        "_probe_due_s",
        "_receiver",
        "_round_trip",
        "_sender",
        "_window",
        "close_code",
        "options",
        "state",
    )

    NUMBERED: ClassVar[frozenset[type]] = frozenset()
    """What the peer may send with a sequence number."""
    UNNUMBERED: ClassVar[Mapping[type, Callable[[Any, Any, float], None]]] = {}
    """What it may send without one, and what is done then."""

    def __init__(self, options: Options | None = None, next_seq: int = 1, expected_seq: int = 1) -> None:
        self.options = options = options or Options()
        self.state = State.RECONNECTING
        self.close_code: int | None = None
        self._window = options.window
        self._payload_bytes = options.payload_bytes
        self._receiver = Receiver(expected_seq, options.ring_bytes)
        self._sender = Sender(options.bound_bytes, next_seq)
        self._round_trip = RoundTrip()
        self._heartbeat: Heartbeat | None = None
        self._events: list[Event] = []
        self._control: list[bytes] = []  # frames without a number, which go first
        self._probe_due_s = NEVER
        self._probe_backoff = 1

    # What the peer did.

    def receive_data(self, message: bytes, now: float) -> None:
        """Take a binary WebSocket message."""
        if self._heartbeat is None:
            return
        self._heartbeat.heard()
        try:
            for seq_id, start, end in split_message(message, self._payload_bytes):
                self._frame_arrived(seq_id, message, start, end, now)
                if self._heartbeat is None:
                    return
        except RemoteProtocolError as error:
            self._fail("protocol_error", str(error), error.code)

    def receive_eof(self) -> None:
        """Take the end of the connection, whoever ended it; the session waits for the next one."""
        if self._heartbeat is not None:
            self._end_connection(Trigger.LOST, CloseCode.ABNORMAL)
        self._control.clear()

    def timer_fired(self, now: float) -> None:
        """Do what is due."""
        heartbeat = self._heartbeat
        if heartbeat is None:
            return
        if heartbeat.due_s <= now:
            self._heartbeat_due(heartbeat, now)
        if self._receiver.nack_due_s <= now and (ranges := self._receiver.missing_ranges(now, self._round_trip)):
            self._send_control(Nack(ranges=ranges))
        if self._probe_due_s <= now:
            self._probe(now)

    def next_timer(self) -> float:
        """Return when `timer_fired` and `data_to_send` want to be called, NEVER when there is no connection."""
        if self._heartbeat is None:
            return NEVER
        if self.state is not State.CONNECTED:
            return self._heartbeat.due_s
        receiver = self._receiver
        return min(self._heartbeat.due_s, receiver.ack_due_s, receiver.nack_due_s, self._probe_due_s)

    # What it meant.

    def events_received(self) -> list[Event]:
        """Return what happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def data_to_send(self, now: float) -> list[bytes]:
        """Return WebSocket messages to be sent, in order."""
        out, self._control = self._control, []
        if self.state is State.CONNECTED:
            frames = self._sender.take()
            due_s = self._receiver.ack_due_s
            if due_s <= now or (due_s != NEVER and frames):
                out.append(frame(0, encode_payload(Ack(seq=self._receiver.ack_sent(), credit=self._window))))
            out += frames
            if self._probe_due_s == NEVER and not self.options.lossless and self._waits_for_ack():
                self._probe_due_s = now + self._probe_after_s()
        return out if len(out) <= 1 else _messages(out, self._payload_bytes + HEADER_BYTES)

    @property
    def should_close(self) -> bool:
        """Tell whether the connection is to be closed once everything is sent."""
        return self.close_code is not None

    @property
    def payload_bytes(self) -> int:
        """Return the largest payload, as agreed on."""
        return self._payload_bytes

    def statistics(self) -> Statistics:
        """Return what the session holds now."""
        return Statistics(
            state=self.state,
            srtt_s=self._round_trip.srtt_s,
            frames_under_way=len(self._sender),
            frames_waiting=self._sender.waiting_frames,
            frames_resent=self._sender.frames_resent,
            held_bytes=self._sender.held_bytes,
            early_frames=self._receiver.early_frames,
            early_bytes=self._receiver.early_bytes,
        )

    # What the owner does.

    def set_window(self, frames: int, now: float) -> None:
        """Have the peer send so many frames at most before the next ACK, 0 for none; RING_FRAMES is the most."""
        if not 0 <= frames <= RING_FRAMES:
            raise LocalProtocolError(f"cannot set a window of {frames} frames; it may be 0 to {RING_FRAMES}")
        self._window = frames
        if frames < WIDE_WINDOW:
            self._receiver.tokens_ack_delay_s = ACK_DELAY_S
        self._receiver.ack_due_s = now

    def close(self) -> None:
        """Want no more of this session, nor of its connection if there is one; idempotent."""
        if self._heartbeat is not None:
            self._end_connection(Trigger.CLOSED, CloseCode.NORMAL)
        self.state = State.CLOSED

    # Frames that arrive.

    def _frame_arrived(self, seq_id: int, data: bytes, start: int, end: int, now: float) -> None:
        message = decode_payload(data, start, end)
        kind = type(message)
        if kind in self.NUMBERED and not (isinstance(message, Error) and message.stream == 0):
            if self.state is State.CONNECTED:  # else it overtook the WELCOME, and will come again
                placed = self._receiver.place(seq_id, data, start, end, now, self._round_trip)
                self._placed(placed, message, now)
        elif (act := self.UNNUMBERED.get(kind)) is None:
            self._fail("protocol_error", f"cannot take {kind.__name__.upper()} from this side")
        elif seq_id:
            self._fail("protocol_error", f"cannot take a sequence number with {kind.__name__.upper()}")
        else:
            act(self, message, now)

    def _deliver(self, message: Message) -> None:
        """Act on a message that has come in order."""
        raise NotImplementedError

    def _placed(self, placed: Placed, message: Message, now: float) -> None:
        if placed is Placed.IN_ORDER:
            self._deliver(message)
            if self._receiver.has_gap:
                for waited in self._receiver.take_ready(now):
                    self._deliver(decode_payload(waited, 0, len(waited)))
                    if self._heartbeat is None:
                        return
        elif placed is Placed.TOO_FAR:
            self._fail("flow_control", f"cannot take a frame {RING_FRAMES} or more ahead of the next one")
        elif placed is Placed.STRANGE:
            self._fail("protocol_error", "cannot place a sequence number so far from the next one")

    def _ack_arrived(self, message: Any, now: float) -> None:
        if self.state is not State.CONNECTED:
            return
        acked_seq, credit = self._sender.acked_seq, self._sender.credit
        if not self._sender.ack_arrived(message.seq, message.credit):
            self._fail("protocol_error", f"cannot take an ACK of {message.seq}, which was not sent")
            return
        if (self._sender.acked_seq, self._sender.credit) != (acked_seq, credit):
            self._probe_due_s = NEVER
            self._probe_backoff = 1
        self._look_for_room()

    def _look_for_room(self) -> None:
        if self._sender.take_drained():
            self._events.append(Drained())

    def _nack_arrived(self, message: Any, now: float) -> None:
        if self.state is State.CONNECTED and not self._sender.nack_arrived(message.ranges):
            self._fail("protocol_error", "cannot take a NACK of what was not sent, or out of order")

    def _ping_arrived(self, message: Any, now: float) -> None:
        self._send_control(Pong(opaque=message.opaque))
        self._receiver.ack_due_s = now

    def _pong_arrived(self, message: Any, now: float) -> None:
        assert self._heartbeat is not None
        sample_s = self._heartbeat.pong_arrived(message.opaque, now)
        if sample_s is not None:
            self._round_trip.measured(sample_s)

    def _refused(self, message: Any, now: float) -> None:
        if message.stream:
            self._fail("protocol_error", "cannot take an ERROR about a stream from this side")
            return
        self._events.append(message)
        self._end_connection(self._trigger(message.code), CloseCode.NORMAL)

    # Timers.

    def _heartbeat_due(self, heartbeat: Heartbeat, now: float) -> None:
        opaque = heartbeat.next_ping(now)
        if opaque is None:
            self._control.clear()
            self._events.append(PeerGone())
            self._end_connection(Trigger.LOST, CloseCode.ABNORMAL)
        else:
            self._send_control(Ping(opaque=opaque))

    def _waits_for_ack(self) -> bool:
        return len(self._sender) > 0 or self._sender.waiting_frames > 0

    def _probe_after_s(self) -> float:
        return min(HEARTBEAT_S, (self._round_trip.answer_s + ACK_DELAY_S) * self._probe_backoff)

    def _probe(self, now: float) -> None:
        """Make the peer ACK: its last ACK may be lost, or the last of our frames, which nothing shows to be missing."""
        self._probe_due_s = NEVER
        if not self._waits_for_ack() or self._heartbeat is None:
            return
        if not self._sender.probe():
            self._send_control(Ping(opaque=self._heartbeat.extra_ping(now)))
        self._probe_backoff = min(self._probe_backoff * 2, _MAX_BACKOFF)
        self._probe_due_s = now + self._probe_after_s()

    # The connection.

    def _open_connection(self, now: float) -> None:
        self.state = next_state(self.state, Trigger.OPENED)
        self.close_code = None
        self._control.clear()
        self._heartbeat = Heartbeat(now)

    def _welcomed(self) -> None:
        self.state = next_state(self.state, Trigger.WELCOMED)
        self._look_for_room()  # a HELLO or WELCOME tells what the peer has, as an ACK does

    def _trigger(self, code: str) -> Trigger:
        """Return what an error of the connection is for the session."""
        raise NotImplementedError

    def _fail(self, code: str, message: str, close_code: int = CloseCode.PROTOCOL_ERROR, **also: Any) -> None:
        """End the connection with an ERROR, and with nothing else that was still to be said."""
        message = message[:TEXT_CHARACTERS]
        self._end_connection(self._trigger(code), close_code)
        self._control = [frame(0, encode_payload(Error(stream=0, code=code, message=message, **also)))]
        self._events.append(Failed(code, close_code, message))

    def _end_connection(self, trigger: Trigger, close_code: int) -> None:
        self.state = next_state(self.state, trigger)
        self.close_code = close_code
        self._heartbeat = None
        self._probe_due_s = NEVER
        self._probe_backoff = 1
        self._receiver.connection_lost()
        self._sender.connection_lost()

    def _send_control(self, message: Message) -> None:
        self._control.append(frame(0, encode_payload(message)))

    def _send(self, stream: int, message: Message, *, beyond_bound: bool = False) -> Backpressure:
        payload = encode_payload(message)
        if len(payload) > self._payload_bytes:
            raise LocalProtocolError(
                f"cannot send a frame with {len(payload)} bytes of payload; {self._payload_bytes} are agreed on"
            )
        return self._sender.send(stream, payload, beyond_bound=beyond_bound)


UNNUMBERED_FROM_BOTH: Final[Mapping[type, Callable[[Any, Any, float], None]]] = {
    Error: Session._refused,
    Ack: Session._ack_arrived,
    Nack: Session._nack_arrived,
    Ping: Session._ping_arrived,
    Pong: Session._pong_arrived,
}


def _messages(frames: list[bytes], limit_bytes: int) -> list[bytes]:
    """Return frames put together, none longer than a single frame may be."""
    if sum(map(len, frames)) <= limit_bytes:
        return [b"".join(frames)]
    messages: list[bytes] = []
    begin = size = 0
    for index, each in enumerate(frames):
        if size + len(each) > limit_bytes and index > begin:
            messages.append(b"".join(frames[begin:index]))
            begin, size = index, 0
        size += len(each)
    messages.append(b"".join(frames[begin:]))
    return messages
