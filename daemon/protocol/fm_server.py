"""The server's end of FM: the session that a HELLO asks for (`fm_opening`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from seedance.daemon.protocol.fm_frame import (
    HEADER_BYTES,
    OF_SESSIONS,
    TOKENS_PREFIX_BYTES,
    Encoding,
    tokens_prefix,
)
from seedance.daemon.protocol.fm_messages import (
    ACK_DELAY_MS,
    RING_FRAMES,
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
from seedance.daemon.protocol.fm_receiver import ACK_BYTES
from seedance.daemon.protocol.fm_sender import Backpressure
from seedance.daemon.protocol.fm_session import TEXT_CHARACTERS, UNNUMBERED_FROM_BOTH, Options, Session
from seedance.daemon.protocol.fm_states import State, Trigger
from seedance.daemon.protocol.frame import CloseCode
from seedance.errors import LocalProtocolError

MAX_STREAMS: Final = 256
"""Streams at once in one session, whatever the tenant's own limit."""

LOSSLESS_ACK_DELAY_MS: Final = 10_000
"""So long a client may wait with the ACK of TOKENS on a link that loses nothing: they come by count, then.

Not where the session's bound is small.
"""


class Unsaved(NamedTuple):
    """What has become of a session since the last time, for a journal.

    `waiting` is what began to wait (`Sender.unsaved`); `frames` were numbered, from `first_seq` on.
    """

    waiting: list[tuple[int, bytes, bytes]]
    acked_seq: int
    expected_seq: int
    last_stream: int
    first_seq: int
    frames: bytes


class Lent(NamedTuple):
    """Where a session's frames go on, and how far they may; by stream what its payloads begin with."""

    prefixes: Mapping[int, bytes]
    next_seq: int
    acked_seq: int
    credit: int


class ServerSession(Session):
    """A session as the server has it; its streams run on when no connection is there.

    `resume_token` and `session_id` are opaque here; whoever made them has checked that the HELLO may have this session.
    Events of a stream are `Infer`, `Part` and `Cancel`. A stream is over with `end_stream` or `fail_stream`, which
    every stream gets, a cancelled one too. An event may be of a stream that ended since: another one before it, of the
    same turn, may have made its owner do so.
    """

    __slots__ = (
        "_encoding",
        "_hello",
        "_last_stream",
        "_saved",
        "_streams",
        "epoch",
        "resume_for_ms",
        "resume_token",
        "session_id",
    )

    NUMBERED: ClassVar[frozenset[type]] = frozenset((Infer, Part, Cancel))

    def __init__(
        self,
        session_id: str,
        resume_token: str,
        resume_for_ms: int,
        *,
        epoch: int = 1,
        next_seq: int = 1,
        expected_seq: int = 1,
        options: Options | None = None,
    ) -> None:
        """Begin a session, or with other sequences than 1 one of which the history is lost, in the next epoch."""
        super().__init__(options, next_seq, expected_seq)
        self.session_id = session_id
        self.resume_token = resume_token
        self.resume_for_ms = resume_for_ms
        self.epoch = epoch
        self._encoding: Encoding | None = None  # agreed on with the first HELLO, as is the payload, for good
        self._hello: Hello | None = None
        self._streams: dict[int, bytes] = {}  # number → what its TOKENS begin with
        self._last_stream = 0
        self._saved = next_seq, expected_seq

    @property
    def streams(self) -> frozenset[int]:
        """Return the streams that are not over."""
        return frozenset(self._streams)

    @property
    def held_bytes(self) -> int:
        """Return what the session holds for its client."""
        return self._sender.held_bytes

    @property
    def oldest_seq(self) -> int:
        """Return the oldest sequence that is kept, behind which a client may go on."""
        return self._sender.acked_seq + 1

    def connect(self, hello: Hello, now: float) -> None:
        """Use a new connection, on which this HELLO came; an older one is of no use any more and is to be closed."""
        self.receive_eof()
        self._open_connection(now)
        self._hello = hello
        if not self._agree(hello):
            self._fail("invalid_request", "cannot send tokens in any encoding that the client takes")
        elif self._go_on(hello):
            self._welcomed()
            self._welcome()

    def _agree(self, hello: Hello) -> bool:
        if self._encoding is None:
            self._encoding = next((Encoding(each) for each in hello.encodings if each in OF_SESSIONS), None)
            self._payload_bytes = min(self._payload_bytes, hello.max_payload_bytes)
            self._sender.agree(self._payload_bytes)
        return self._encoding is not None and self._encoding in hello.encodings

    def _go_on(self, hello: Hello) -> bool:
        """Set the sender behind what the client has; a client of another epoch has nothing."""
        last_seq = hello.last_seq if hello.epoch == self.epoch else self._sender.acked_seq
        if self._sender.resume(last_seq, hello.window):
            return True
        if last_seq >= self._sender.next_seq:
            self._fail("protocol_error", f"cannot go on behind {last_seq}, which was not sent")
        else:
            self._fail(
                "gone",
                f"cannot go on behind {last_seq}: the oldest sequence that is kept is {self.oldest_seq}",
                CloseCode.POLICY_VIOLATION,
                oldest_seq=self.oldest_seq,
            )
        return False

    def _welcome(self) -> None:
        assert self._encoding is not None
        self._send_control(
            Welcome(
                session_id=self.session_id,
                epoch=self.epoch,
                resume_token=self.resume_token,
                resume_for_ms=self.resume_for_ms,
                oldest_seq=self.oldest_seq,
                next_seq=self._sender.next_seq,
                last_seq=self._receiver.expected_seq - 1,
                window=self._window,
                encoding=self._encoding,
                max_payload_bytes=self._payload_bytes,
                ack_delay_ms=self._ack_delay_ms(),
            )
        )

    def _ack_delay_ms(self) -> int:
        # With a small bound, what is not ACKed yet may be what streams wait for that were paused.
        is_wide = self.options.bound_bytes >= 16 * ACK_BYTES
        return LOSSLESS_ACK_DELAY_MS if self.options.lossless and is_wide else ACK_DELAY_MS

    # What the owner sends.

    def accept(self, stream: int, id: str) -> Backpressure:
        """Tell a stream's name for every connection of the tenant."""
        self._prefix(stream)
        return self._send(stream, Accept(stream=stream, id=id), beyond_bound=True)

    def send_tokens(self, stream: int, data: bytes) -> Backpressure:
        """Send the bytes of one or more tokens in the encoding agreed on."""
        prefix = self._streams.get(stream) or self._prefix(stream)
        return self._sender.send_tokens(stream, prefix, data)

    def send_scored(self, stream: int, data: bytes) -> Backpressure:
        """Send text with log probabilities: what `fm_logprobs` makes, of `scored_bytes` at most."""
        self._prefix(stream)
        return self._send(stream, Tokens(stream, Encoding.LOGPROBS, data))

    @property
    def scored_bytes(self) -> int:
        """Return the most that `send_scored` takes at once."""
        return self._payload_bytes - TOKENS_PREFIX_BYTES

    def end_stream(self, end: End) -> Backpressure:
        """Send the last of a stream."""
        return self._send_last(end.stream, end)

    def fail_stream(self, error: Error) -> Backpressure:
        """Send the last of a stream that cannot be served; a long text is cut."""
        return self._send_last(error.stream, msgspec.structs.replace(error, message=error.message[:TEXT_CHARACTERS]))

    def note(self, note: Note) -> Backpressure:
        """Tell what is going on with a stream, or with stream 0: all of them."""
        if note.stream:
            self._prefix(note.stream)
        return self._send(note.stream, note)

    @property
    def encoding(self) -> Encoding:
        """Return the encoding that was agreed on; there is one once a HELLO came."""
        if self._encoding is None:
            raise LocalProtocolError("cannot tell the encoding before a HELLO")
        return self._encoding

    def _prefix(self, stream: int) -> bytes:
        try:
            return self._streams[stream]
        except KeyError:
            raise LocalProtocolError(f"cannot send for stream {stream}, which does not run") from None

    def _send_last(self, stream: int, message: End | Error) -> Backpressure:
        self._prefix(stream)
        backpressure = self._send(stream, message, beyond_bound=True)
        del self._streams[stream]
        return backpressure

    # TOKENS that the owner numbers and sends by itself, for many sessions at once.

    def lend(self, payload_bytes: int) -> Lent | None:
        """Return where the numbers of the streams' TOKENS go on; None where they are to be sent one by one.

        Until `sent_elsewhere` nothing but `acked_elsewhere` may be called; no payload may be longer than this, and no
        more of a stream than one in a message. There is credit for two steps at least.
        """
        sender, streams = self._sender, len(self._streams)
        if self.state is not State.CONNECTED or self._control or sender.unsaved:
            return None
        if streams * (payload_bytes + HEADER_BYTES) > self._payload_bytes or not 0 < 2 * streams <= sender.credit:
            return None
        if not sender.can_lend(payload_bytes, RING_FRAMES):
            return None
        return Lent(self._streams, sender.next_seq, sender.acked_seq, sender.credit)

    def sent_elsewhere(self, frames: Sequence[bytes]) -> None:
        """Take back the numbers: these frames were sent, and are in the journal."""
        self._sender.sent_elsewhere(frames)
        self._saved = self._sender.next_seq, self._saved[1]

    def acked_elsewhere(self, seq: int, credit: int) -> None:
        """Take an ACK of all that was sent before the numbers were lent, and of what follows up to `seq`."""
        assert self._heartbeat is not None
        self._heartbeat.heard()
        self._sender.acked_elsewhere(seq + 1 - self._sender.next_seq, credit)
        self._saved = self._sender.next_seq, self._saved[1]

    def acked_quietly(self, seq: int, credit: int) -> bool:
        """Take an ACK that lets nothing out, as nothing waits; False where it has to be looked at, and is not taken."""
        sender = self._sender
        if self._heartbeat is None or self.state is not State.CONNECTED or not self.options.lossless:
            return False
        if self._control or not sender.is_quiet or not sender.ack_arrived(seq, credit):
            return False
        self._heartbeat.heard()
        return True

    def put_off_ping(self, now: float) -> bool:
        """Do nothing about a timer, if it is that of a ping, and the client has said something lately.

        For who sends elsewhere, and has since the last time: a ping says that we are there, too. False where
        `timer_fired` is to be called.
        """
        heartbeat = self._heartbeat
        return heartbeat is not None and self.next_timer() == heartbeat.due_s and heartbeat.put_off(now)

    # What the client sent.

    def _hello_arrived(self, hello: Hello, now: float) -> None:
        if hello == self._hello:
            self._welcome()  # it came twice, or our answer was lost
        else:
            self._fail("protocol_error", "cannot take another HELLO on the same connection")

    def _deliver(self, message: Message) -> None:
        if isinstance(message, Infer):
            self._infer_arrived(message)
        else:
            assert isinstance(message, Part | Cancel)
            if message.stream > self._last_stream:
                self._fail("protocol_error", f"cannot go on with stream {message.stream}, which did not begin")
            elif not message.stream or message.stream in self._streams:
                self._events.append(message)  # else it is over: the client did not know when it sent this

    def _infer_arrived(self, message: Infer) -> None:
        stream = message.stream
        if stream <= self._last_stream:
            self._fail("protocol_error", f"cannot begin stream {stream} after {self._last_stream}")
            return
        self._last_stream = stream
        if self._sender.is_flooded:
            self._fail("flow_control", "cannot go on beginning streams while nothing that was sent is taken")
        elif self._sender.is_full:
            self._refuse_stream(stream, "overloaded", "cannot begin a stream before what was sent is taken", 1000)
        elif len(self._streams) >= MAX_STREAMS:
            self._refuse_stream(stream, "rate_limited", f"cannot run more than {MAX_STREAMS} streams in one session")
        else:
            self._streams[stream] = tokens_prefix(stream, self.encoding)
            self._events.append(message)

    def _refuse_stream(self, stream: int, code: str, message: str, retry_after_ms: int | None = None) -> None:
        error = Error(stream=stream, code=code, message=message, retry_after_ms=retry_after_ms)
        self._send(stream, error, beyond_bound=True)

    def _trigger(self, code: str) -> Trigger:
        return Trigger.LOST  # the session is there for a client that does better

    # What a journal keeps, so that another process can go on.

    def save_from_now(self) -> None:
        """Begin to keep what `take_unsaved` returns."""
        self._sender.unsaved = []
        self._saved = self._sender.next_seq, self._receiver.expected_seq

    def has_unsaved(self) -> bool:
        """Tell whether something waits that was not saved."""
        return bool(self._sender.unsaved)

    def take_unsaved(self) -> Unsaved | None:
        """Return what is to be saved before anything of it leaves; None for nothing."""
        sender, waiting = self._sender, self._sender.unsaved
        now = sender.next_seq, self._receiver.expected_seq
        if waiting is None or (now == self._saved and not waiting):
            return None
        (first_seq, _), self._saved, sender.unsaved = self._saved, now, []
        frames = sender.kept_from(first_seq) if first_seq < now[0] else b""
        return Unsaved(waiting, sender.acked_seq, now[1], self._last_stream, first_seq, frames)

    def all_saved(self) -> tuple[Unsaved, list[tuple[int, bytes]], dict[int, int]]:
        """Return all that a session is but its streams: as though nothing had been saved yet, with what waits apart.

        That is payloads, with 0, and text of streams that are over, with their number. Last, how much text of each
        stream waits.
        """
        self.save_from_now()
        sender = self._sender
        first_seq = sender.acked_seq + 1
        frames = sender.kept_from(first_seq) if len(sender) else b""
        saved = Unsaved([], first_seq - 1, self._receiver.expected_seq, self._last_stream, first_seq, frames)
        return saved, sender.waiting(self._streams), sender.waiting_bytes()

    def restore(
        self,
        encoding: int,
        payload_bytes: int,
        last_stream: int,
        frames: Sequence[bytes],
        waiting: Iterable[tuple[int, bytes]],
        streams: Iterable[int],
    ) -> None:
        """Become what another process had, which has begun with the same sequences; `streams` are not over."""
        self._encoding = Encoding(encoding)
        self._payload_bytes = payload_bytes
        self._sender.agree(payload_bytes)
        self._last_stream = last_stream
        items = [(stream, tokens_prefix(stream, encoding) if stream else b"", data) for stream, data in waiting]
        self._sender.restore(frames, items)
        for stream in streams:
            self._streams[stream] = tokens_prefix(stream, encoding)

    @property
    def is_parked(self) -> bool:
        """Tell whether the session waits for its client."""
        return self.state is State.RECONNECTING

    UNNUMBERED: ClassVar[Mapping[type, Callable[[Any, Any, float], None]]] = {
        **UNNUMBERED_FROM_BOTH,
        Hello: _hello_arrived,
    }
