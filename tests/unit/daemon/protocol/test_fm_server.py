"""The server's end: whose history is kept, streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.fm_pair import Pair, feed, messages

from seedance.daemon.protocol.fm_frame import Encoding
from seedance.daemon.protocol.fm_messages import (
    Accept,
    Ack,
    Cancel,
    End,
    Error,
    Hello,
    Infer,
    Modality,
    Note,
    Part,
    Tokens,
    Welcome,
)
from seedance.daemon.protocol.fm_sender import Backpressure
from seedance.daemon.protocol.fm_server import MAX_STREAMS, ServerSession
from seedance.daemon.protocol.fm_session import Options
from seedance.daemon.protocol.fm_states import State
from seedance.errors import LocalProtocolError

HELLO = Hello(client_id="c")


def connected(hello: Hello = HELLO, **kept: int) -> ServerSession:
    session = ServerSession("session", "token", 60_000, **kept)  # type: ignore[arg-type]
    session.connect(hello, 0.0)
    return session


def welcome(session: ServerSession) -> Welcome:
    first = messages(session.data_to_send(0.0))[0]
    assert isinstance(first, Welcome)
    return first


def test_a_new_session() -> None:
    session = connected()
    assert welcome(session) == Welcome(
        session_id="session",
        epoch=1,
        resume_token="token",
        resume_for_ms=60_000,
        oldest_seq=1,
        next_seq=1,
        last_seq=0,
        window=128,
        ack_delay_ms=10_000,
    )
    assert (session.state, session.encoding, session.is_parked) == (State.CONNECTED, Encoding.TEXT, False)


def test_the_first_encoding_that_is_known_is_taken() -> None:
    session = connected(Hello(client_id="c", encodings=(9, 2, 1, 0)))  # 2 is of streams, and no session's
    assert welcome(session).encoding == Encoding.BYTES


def test_no_encoding_in_common() -> None:
    session = connected(Hello(client_id="c", encodings=(9,)))
    (error,) = messages(session.data_to_send(0.0))
    assert isinstance(error, Error)
    assert error.code == "invalid_request"
    assert session.is_parked
    with pytest.raises(LocalProtocolError, match="cannot tell the encoding before a HELLO"):
        _ = session.encoding


def test_the_lesser_payload_holds() -> None:
    assert welcome(connected(Hello(client_id="c", max_payload_bytes=5000))).max_payload_bytes == 5000
    session = ServerSession("session", "token", 1, options=Options(payload_bytes=4096))
    session.connect(HELLO, 0.0)
    assert welcome(session).max_payload_bytes == 4096


def resumed(session: ServerSession, last_seq: int, epoch: int = 1) -> list[object]:
    session.receive_eof()
    hello = Hello(client_id="c", resume_token="token", epoch=epoch, last_seq=last_seq)
    session.connect(hello, 1.0)
    return list(messages(session.data_to_send(1.0)))


def with_history() -> ServerSession:
    """Return a session that sent 1 to 4, of which the client has ACKed 2."""
    session = connected()
    feed(session, 0.0, (1, Infer(stream=1, model="m")))
    session.accept(1, "id")
    for data in (b"a", b"b", b"c"):
        session.send_tokens(1, data)
    session.data_to_send(0.0)
    feed(session, 0.0, (0, Ack(seq=2, credit=128)))
    session.events_received()
    return session


def test_resume_sends_what_follows() -> None:
    back, *rest = resumed(with_history(), 3)
    assert isinstance(back, Welcome)
    assert (back.oldest_seq, back.next_seq, back.last_seq, back.epoch) == (4, 5, 1, 1)
    assert rest == [Tokens(1, 0, b"c")]


def test_what_is_not_kept_is_gone() -> None:
    session = with_history()
    (error,) = resumed(session, 1)
    assert isinstance(error, Error)
    assert (error.code, error.oldest_seq) == ("gone", 3)
    assert (session.is_parked, session.close_code) == (True, 1008)


def test_what_was_never_sent_is_an_error() -> None:
    (error,) = resumed(with_history(), 5)
    assert isinstance(error, Error)
    assert error.code == "protocol_error"


def test_a_client_of_another_epoch_begins_at_the_oldest() -> None:
    session = connected(epoch=2, next_seq=10, expected_seq=20)
    assert (welcome(session).oldest_seq, session.epoch) == (10, 2)
    back, *_ = resumed(session, 500, epoch=1)
    assert isinstance(back, Welcome)
    assert (back.epoch, back.oldest_seq, back.next_seq, back.last_seq) == (2, 10, 10, 19)


def test_a_new_connection_takes_over() -> None:
    session = with_history()
    session.connect(Hello(client_id="c", resume_token="token", epoch=1, last_seq=4), 1.0)
    assert [type(each) for each in messages(session.data_to_send(1.0))] == [Welcome]
    assert session.state is State.CONNECTED


def test_a_hello_that_comes_twice_is_answered_twice() -> None:
    session = connected()
    first = welcome(session)
    feed(session, 0.0, (0, HELLO))
    assert messages(session.data_to_send(0.0)) == [first]


def test_the_life_of_a_stream() -> None:
    pair = Pair()
    pair.client.infer(Infer(stream=1, model="m", prompt="p", more=True))
    pair.client.part(Part(stream=1, modality=Modality.TEXT, data=b"x"))
    pair.pump()
    assert [type(event) for event in pair.server_events] == [Infer, Part]
    pair.client_events.clear()
    pair.server.accept(1, "id")
    pair.server.note(Note(stream=1, note="queued"))
    pair.server.note(Note(stream=0, note="draining"))
    pair.server.send_tokens(1, b"a")
    pair.server.end_stream(End(stream=1, finish_reason="stop", usage={"completion_tokens": 1}))
    pair.pump()
    assert pair.client_events == [
        Accept(stream=1, id="id"),
        Note(stream=1, note="queued"),
        Note(stream=0, note="draining"),
        Tokens(1, 0, b"a"),
        End(stream=1, finish_reason="stop", usage={"completion_tokens": 1}),
    ]
    assert pair.server.streams == pair.client.streams == frozenset()


def test_what_comes_for_a_stream_that_is_over_is_passed_over() -> None:
    session = connected()
    feed(session, 0.0, (1, Infer(stream=1, model="m")))
    session.fail_stream(Error(stream=1, code="internal", message="m"))
    part = Part(stream=1, modality=Modality.TEXT, data=b"")
    feed(session, 0.0, (2, part), (3, Cancel(stream=1)), (4, Cancel(stream=0, id="elsewhere")))
    assert session.events_received()[1:] == [Cancel(stream=0, id="elsewhere")]
    assert not session.should_close


def test_a_long_error_is_cut_and_ends_its_stream_alone() -> None:
    pair = Pair()
    pair.client.infer(Infer(stream=1, model="m", prompt="p"))
    pair.pump()
    pair.client_events.clear()
    pair.server.fail_stream(Error(stream=1, code="internal", message=5_000 * "m"))
    pair.pump()
    assert pair.client_events == [Error(stream=1, code="internal", message=512 * "m")]
    assert not pair.client.should_close


def test_nothing_is_sent_for_a_stream_that_does_not_run() -> None:
    session = connected()
    acts: list[Callable[[], object]] = [
        lambda: session.accept(1, "id"),
        lambda: session.send_tokens(1, b"a"),
        lambda: session.note(Note(stream=1, note="n")),
        lambda: session.end_stream(End(stream=1, finish_reason="stop")),
    ]
    for act in acts:
        with pytest.raises(LocalProtocolError, match="cannot send for stream 1, which does not run"):
            act()


def test_too_many_streams() -> None:
    session = connected()
    for stream in range(1, MAX_STREAMS + 2):
        feed(session, 0.0, (stream, Infer(stream=stream, model="m")))
    assert len(session.events_received()) == MAX_STREAMS
    (error,) = [each for each in messages(session.data_to_send(0.0)) if isinstance(each, Error)]
    assert (error.stream, error.code) == (MAX_STREAMS + 1, "rate_limited")


def test_a_client_that_only_asks_and_never_takes_is_stopped() -> None:
    session = ServerSession("session", "token", 1, options=Options(bound_bytes=4000))
    session.connect(HELLO, 0.0)
    stream = 0
    while not session.should_close:
        stream += 1
        assert stream < 100
        feed(session, 0.0, (stream, Infer(stream=stream, model="m")))
        for event in session.events_received():
            if isinstance(event, Infer):
                session.accept(event.stream, "id")
                session.end_stream(End(stream=event.stream, finish_reason="stop"))
    (error,) = messages(session.data_to_send(0.0))
    assert isinstance(error, Error)
    assert error.code == "flow_control"
    assert session.statistics().held_bytes < 2 * 4000 + 500


def test_a_stream_that_comes_when_there_is_no_room_is_told_so() -> None:
    pair = Pair(Options(bound_bytes=4000))
    pair.begin()
    pair.wait(1.0)
    pair.client.set_window(0, pair.now)
    pair.pump()
    while pair.server.send_tokens(1, b"x" * 200) is not Backpressure.REFUSED:
        pass
    pair.client.infer(Infer(stream=2, model="m"))
    pair.pump()
    assert pair.server_events == []
    pair.client.set_window(128, pair.now)
    pair.pump()
    error = pair.client_events[-1]
    assert isinstance(error, Error)
    assert (error.stream, error.code, error.retry_after_ms) == (2, "overloaded", 1000)
    assert (pair.server.streams, pair.client.streams) == (frozenset({1}), frozenset({1}))
