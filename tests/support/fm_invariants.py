"""What must hold of FM for every input: the property tests and the fuzz target check the same.

An input is one end's life: a byte that says which end and what link, then the messages that its peer sends, each behind
its length in two bytes. A connection that ends is followed by another one, which resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, get_args

from support.fm_vectors import read

from seedance.daemon.protocol.fm_client import ClientSession
from seedance.daemon.protocol.fm_frame import HEADER_BYTES
from seedance.daemon.protocol.fm_logprobs import Candidate, ScoredTokens, encode_scored
from seedance.daemon.protocol.fm_messages import (
    RING_FRAMES,
    Cancel,
    End,
    Error,
    Hello,
    Infer,
    Message,
    Modality,
    Part,
    is_numbered,
)
from seedance.daemon.protocol.fm_opening import HelloReceived, ServerOpening
from seedance.daemon.protocol.fm_sender import Backpressure
from seedance.daemon.protocol.fm_server import ServerSession
from seedance.daemon.protocol.fm_session import Drained, Failed, Options, PeerGone, Session, Welcomed
from seedance.daemon.protocol.fm_states import State
from seedance.daemon.protocol.frame import CloseCode

IS_CLIENT: Final = 1
IS_LOSSY: Final = 2

SCORED: Final = Candidate(1, -0.5, b"x")

_BOUNDS: Final = {"bound_bytes": 8192, "ring_bytes": 4096, "payload_bytes": 8192}
_LENGTH_BYTES: Final = 2
# All that is sent beyond the bound: an item of up to a frame, and the answers to the streams of one message.
_BEYOND_BYTES: Final = 32 << 10
_ENDS: Final = (Failed, PeerGone, Error)
_CLOSE_CODES: Final = frozenset(
    (CloseCode.NORMAL, CloseCode.PROTOCOL_ERROR, CloseCode.MESSAGE_TOO_BIG, CloseCode.POLICY_VIOLATION)
)
_EVENTS: Final = (*get_args(Message), ScoredTokens, Drained, Failed, PeerGone, Welcomed)
_BREAKS: Final = frozenset(("protocol_error", "flow_control", "gone", "invalid_request"))


def pack(flags: int, messages: list[bytes]) -> bytes:
    """Return messages as an input."""
    return bytes((flags,)) + b"".join(len(each).to_bytes(_LENGTH_BYTES, "big") + each for each in messages)


def unpack(data: bytes) -> tuple[int, list[bytes]]:
    """Return the flags and messages that any input stands for."""
    flags, at = data[0] if data else 0, 1
    messages = []
    while at < len(data):
        length = int.from_bytes(data[at : at + _LENGTH_BYTES], "big")
        at += _LENGTH_BYTES
        messages.append(data[at : at + length])
        at += length
    return flags, messages


def check_fm_input(data: bytes) -> None:
    """Check one input of the fuzz target."""
    flags, messages = unpack(data)
    options = Options(lossless=not flags & IS_LOSSY, **_BOUNDS)
    if flags & IS_CLIENT:
        _client(iter(messages), options)
    else:
        _server(iter(messages), options)


def _server(messages: Iterator[bytes], options: Options) -> None:
    session = ServerSession("session", "token", 1000, options=options)
    now = 0.0
    while (hello := _opened(messages, options)) is not None:
        session.connect(hello, now)
        now = _converse(session, messages, now)


def _opened(messages: Iterator[bytes], options: Options) -> Hello | None:
    """Return the next HELLO; what comes in its place has to be refused."""
    for message in messages:
        opening = ServerOpening(options.payload_bytes)
        opening.receive_data(message)
        (event,) = opening.events_received()
        out = [each for data in opening.data_to_send() for each in read(data, options.payload_bytes)]
        if isinstance(event, HelloReceived):
            assert not out
            return event.hello
        assert out == [(0, Error(stream=0, code=event.code, message=event.message))]
        assert opening.close_code == event.close_code
        assert event.close_code in _CLOSE_CODES
    return None


def _client(messages: Iterator[bytes], options: Options) -> None:
    now = 0.0
    session = ClientSession("client", options=options)
    for _ in range(4):
        session.connect(now)
        now = _converse(session, messages, now)
        if session.state is State.CLOSED:
            break


def _converse(session: Session, messages: Iterator[bytes], now: float) -> float:
    """Feed messages up to the end of the connection, and let time pass; return the time."""
    _look(session, now)
    for message in messages:
        if session.should_close:
            break
        session.receive_data(message, now)
        _look(session, now)
        now += 0.01
        while session.next_timer() <= now:
            session.timer_fired(now)
            _look(session, now)
    session.receive_eof()
    assert session.data_to_send(now) == []
    return now


def _look(session: Session, now: float) -> None:
    """Act on the events as an owner does, and see that all is as declared."""
    events = session.events_received()
    for event in events:
        assert isinstance(event, _EVENTS)
        if isinstance(session, ServerSession):
            _serve(session, event)
        elif isinstance(session, ClientSession) and isinstance(event, Welcomed):
            _ask(session)
    ends = [isinstance(event, _ENDS) and getattr(event, "stream", 0) == 0 for event in events]
    assert ends == [False] * (len(ends) - 1) + [session.should_close] if ends else not session.should_close
    sent = session.data_to_send(now)
    assert all(len(message) <= session.options.payload_bytes + HEADER_BYTES for message in sent)
    frames = [each for message in sent for each in read(message, session.options.payload_bytes)]
    assert all(is_numbered(message) or seq_id == 0 for seq_id, message in frames)
    _look_at_end(session, events, [message for _, message in frames])
    held = session.statistics()
    assert held.frames_under_way <= RING_FRAMES
    assert held.early_frames < RING_FRAMES
    assert held.early_bytes <= session.options.ring_bytes
    assert held.held_bytes <= session.options.bound_bytes + _BEYOND_BYTES


def _look_at_end(session: Session, events: Sequence[object], sent: Sequence[Message]) -> None:
    if not session.should_close:
        assert not any(isinstance(message, Error) and not message.stream for message in sent)
        return
    match events[-1]:
        case Failed(code=code, close_code=close_code, message=text):
            assert sent == [Error(stream=0, code=code, message=text, oldest_seq=_oldest(sent))]
            assert session.close_code == close_code
            assert close_code in _CLOSE_CODES
            assert code in _BREAKS
            assert text.startswith("cannot ")
        case _:
            assert not any(isinstance(message, Error) for message in sent)
    assert session.state in (State.RECONNECTING, State.CLOSED)
    assert session.next_timer() == float("inf")


def _oldest(sent: Sequence[Message]) -> int | None:
    return sent[0].oldest_seq if isinstance(sent[0], Error) else None


def _serve(session: ServerSession, event: object) -> None:
    match event:
        case Infer(stream=stream, model=model, more=more):
            session.accept(stream, "id")
            if more:
                session.send_scored(stream, *encode_scored(model, [[SCORED]], session.scored_bytes))
                return
            for _ in range(len(model)):
                if session.send_tokens(stream, model.encode()) is Backpressure.REFUSED:
                    break
        case Part(stream=stream, data=data, more=more) if stream in session.streams:
            session.send_tokens(stream, data)
            if not more:
                session.end_stream(End(stream=stream, finish_reason="stop"))
        case Cancel(stream=stream) if stream in session.streams:
            session.fail_stream(Error(stream=stream, code="internal", message="cannot go on"))


def _ask(session: ClientSession) -> None:
    for _ in range(3):
        stream = session.next_stream
        sampling = {"logprobs": 0} if stream % 2 else {}
        infer = Infer(stream=stream, model="m", prompt="p", more=True, sampling=sampling)
        if session.infer(infer) is not Backpressure.REFUSED:
            session.part(Part(stream=stream, modality=Modality.TEXT, data=b"part"))
