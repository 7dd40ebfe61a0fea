"""The client's end: HELLO and WELCOME, what it may ask, how it takes what the server says."""

from __future__ import annotations

import msgspec
import pytest
from support.fm_pair import Pair, feed, messages

from seedance.daemon.protocol.fm_client import ClientSession
from seedance.daemon.protocol.fm_frame import Encoding
from seedance.daemon.protocol.fm_logprobs import Candidate, ScoredTokens, encode_scored
from seedance.daemon.protocol.fm_messages import (
    Accept,
    Cancel,
    End,
    Error,
    Hello,
    Infer,
    Modality,
    Part,
    Tokens,
    Welcome,
)
from seedance.daemon.protocol.fm_sender import Backpressure
from seedance.daemon.protocol.fm_session import Failed, Options, PeerGone, Welcomed
from seedance.daemon.protocol.fm_states import State
from seedance.errors import LocalProtocolError

WELCOME = Welcome(
    session_id="s", epoch=1, resume_token="t", resume_for_ms=60_000, oldest_seq=1, next_seq=1, last_seq=0, window=128
)


def welcomed(welcome: Welcome = WELCOME, options: Options | None = None) -> ClientSession:
    client = ClientSession("c", encodings=(Encoding.BYTES, Encoding.TEXT), options=options)
    client.connect(0.0)
    feed(client, 0.25, (0, welcome))
    return client


def test_the_first_hello() -> None:
    client = ClientSession("c", encodings=(Encoding.BYTES, Encoding.TEXT))
    client.connect(0.0)
    assert messages(client.data_to_send(0.0)) == [Hello(client_id="c", encodings=(1, 0))]
    assert client.state is State.RESTORING


def test_a_welcome_measures_the_round_trip() -> None:
    client = welcomed()
    assert client.events_received() == [Welcomed("s", 60_000, continued=False)]
    assert (client.state, client.statistics().srtt_s) == (State.CONNECTED, 0.25)


def test_nothing_is_asked_before_the_first_welcome() -> None:
    client = ClientSession("c")
    client.connect(0.0)
    with pytest.raises(LocalProtocolError, match="cannot ask before the session was welcomed once"):
        client.infer(Infer(stream=1, model="m"))


def test_what_is_asked_between_connections_is_sent_with_the_next() -> None:
    client = welcomed()
    client.receive_eof()
    client.infer(Infer(stream=1, model="m"))
    assert client.data_to_send(1.0) == []
    client.connect(2.0)
    (hello,) = messages(client.data_to_send(2.0))
    assert isinstance(hello, Hello)
    assert (hello.resume_token, hello.epoch, hello.last_seq) == ("t", 1, 0)
    feed(client, 3.0, (0, WELCOME))
    assert messages(client.data_to_send(3.0))[0] == Infer(stream=1, model="m")
    assert client.events_received() == [Welcomed("s", 60_000, continued=False), Welcomed("s", 60_000, continued=True)]


def test_a_welcome_tells_how_much_comes_again() -> None:
    client = welcomed()
    client.receive_eof()
    client.connect(1.0)
    feed(client, 2.0, (0, msgspec.structs.replace(WELCOME, next_seq=4)))
    assert client.events_received()[-1] == Welcomed("s", 60_000, continued=True, frames_resent=3)


def test_another_epoch_begins_anew() -> None:
    client = welcomed()
    client.infer(Infer(stream=1, model="m"))
    client.data_to_send(0.5)
    feed(client, 0.5, (1, Accept(stream=1, id="i")))
    client.receive_eof()
    client.connect(1.0)
    client.events_received()
    feed(client, 1.0, (0, msgspec.structs.replace(WELCOME, epoch=2, oldest_seq=8, next_seq=8, last_seq=6)))
    assert client.events_received() == [Welcomed("s", 60_000, continued=False)]
    assert client.streams == frozenset()
    assert client.infer(Infer(stream=client.next_stream, model="again")) is Backpressure.NONE
    (data,) = client.data_to_send(1.0)
    assert b"FM\x01\0\0\0\x07" in data
    feed(client, 1.0, (8, Accept(stream=2, id="j")))
    assert client.events_received() == [Accept(stream=2, id="j")]


def test_text_with_log_probabilities_is_an_event_of_its_own() -> None:
    client = welcomed()
    client.infer(Infer(stream=1, model="m", sampling={"logprobs": 1}))
    client.infer(Infer(stream=2, model="m", sampling={"logprobs": None}))
    client.events_received()
    position = [Candidate(7, -0.5, b"a"), Candidate(8, -1.5, b"b")]
    (data,) = encode_scored("a", [position], 1000)
    feed(client, 1.0, (1, Tokens(1, Encoding.LOGPROBS, data)), (2, Tokens(2, Encoding.TEXT, b"b")))
    assert client.events_received() == [ScoredTokens(1, "a", [position]), Tokens(2, Encoding.TEXT, b"b")]


@pytest.mark.parametrize(
    "tokens", [Tokens(1, Encoding.LOGPROBS, b"\x92"), Tokens(1, Encoding.LOGPROBS, b""), Tokens(1, Encoding.TEXT, b"a")]
)
def test_what_are_no_log_probabilities_ends_the_connection(tokens: Tokens) -> None:
    client = welcomed()
    client.infer(Infer(stream=1, model="m", sampling={"logprobs": 0}))
    client.events_received()
    feed(client, 1.0, (1, tokens))
    (event,) = client.events_received()
    assert isinstance(event, Failed)
    assert event.code == "protocol_error"


@pytest.mark.parametrize(
    "change",
    [
        {"encoding": 9},
        {"encoding": Encoding.LOGPROBS},
        {"max_payload_bytes": 1 << 21},
        {"last_seq": 3},  # of the same epoch, though it was not sent
        {"next_seq": 1},  # though 2 was sent
        {"oldest_seq": 9, "next_seq": 9},  # though what is between was not
    ],
    ids=str,
)
def test_a_welcome_back_that_cannot_be(change: dict[str, int]) -> None:
    client = welcomed()
    client.infer(Infer(stream=1, model="m"))
    client.data_to_send(0.5)
    feed(client, 0.5, (1, Accept(stream=1, id="i")), (2, Tokens(1, 0, b"a")))
    client.receive_eof()
    client.connect(1.0)
    client.events_received()
    feed(client, 1.0, (0, msgspec.structs.replace(WELCOME, **{"next_seq": 3, **change})))
    (event,) = client.events_received()
    assert isinstance(event, Failed)
    assert (event.code, client.state) == ("protocol_error", State.CLOSED)


def test_a_welcome_that_comes_twice_is_passed_over() -> None:
    client = welcomed()
    client.infer(Infer(stream=1, model="m"))
    client.data_to_send(0.5)
    feed(client, 0.5, (0, WELCOME))
    assert client.events_received() == [Welcomed("s", 60_000, continued=False)]
    assert client.statistics().frames_under_way == 1


def test_what_overtakes_the_welcome_is_dropped() -> None:
    client = ClientSession("c", options=Options(lossless=False))
    client.connect(0.0)
    feed(client, 0.1, (1, Accept(stream=1, id="i")))
    assert client.events_received() == []
    assert client.state is State.RESTORING


def test_hello_is_said_again_on_a_link_that_loses() -> None:
    client = ClientSession("c", options=Options(lossless=False))
    client.connect(0.0)
    client.data_to_send(0.0)
    said = []
    while not client.should_close:
        now = client.next_timer()
        client.timer_fired(now)
        said += [(now, type(each)) for each in messages(client.data_to_send(now))]
    assert said == [(1.0, Hello), (3.0, Hello), (7.0, Hello)]
    assert client.events_received() == [PeerGone()]
    assert client.state is State.RECONNECTING


def test_a_welcome_that_does_not_come() -> None:
    client = ClientSession("c")
    client.connect(0.0)
    client.data_to_send(0.0)
    assert client.next_timer() == 15.0
    client.timer_fired(15.0)
    assert (client.events_received(), client.data_to_send(15.0)) == ([PeerGone()], [])


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("gone", State.CLOSED),
        ("unauthorized", State.CLOSED),
        ("overloaded", State.RECONNECTING),
        ("engine_unavailable", State.RECONNECTING),
    ],
)
def test_an_error_of_the_connection(code: str, state: State) -> None:
    client = ClientSession("c")
    client.connect(0.0)
    error = Error(stream=0, code=code, message="cannot", retry_after_ms=5)
    feed(client, 0.0, (0, error))
    assert client.events_received() == [error]
    assert (client.state, client.should_close, client.close_code) == (state, True, 1000)


def test_stream_numbers_only_grow() -> None:
    client = welcomed()
    client.infer(Infer(stream=5, model="m"))
    assert client.next_stream == 6
    for stream in (5, 4):
        with pytest.raises(LocalProtocolError, match="6 is the next"):
            client.infer(Infer(stream=stream, model="m"))


def test_a_refused_stream_was_not_begun() -> None:
    client = welcomed(options=Options(bound_bytes=1000))
    assert client.infer(Infer(stream=1, model="m", prompt="x" * 2000)) is Backpressure.PARK
    assert client.infer(Infer(stream=2, model="m")) is Backpressure.REFUSED
    assert (client.next_stream, client.streams) == (2, frozenset({1}))


def test_what_is_sent_for_a_stream_that_is_over_is_nothing() -> None:
    pair = Pair()
    pair.begin()
    pair.server.end_stream(End(stream=1, finish_reason="stop"))
    pair.pump()
    pair.wait(1.0)
    before = pair.client.statistics()
    assert pair.client.part(Part(stream=1, modality=Modality.TEXT, data=b"x")) is Backpressure.NONE
    assert pair.client.cancel(Cancel(stream=1)) is Backpressure.NONE
    assert pair.client.statistics() == before
    pair.client.cancel(Cancel(stream=0, id="elsewhere"))
    pair.pump()
    assert pair.server_events == [Cancel(stream=0, id="elsewhere")]


def test_a_cancelled_stream_still_ends() -> None:
    pair = Pair()
    pair.begin()
    pair.client.cancel(Cancel(stream=1))
    pair.server.send_tokens(1, b"under way")
    pair.pump()
    assert pair.server_events == [Cancel(stream=1)]
    pair.server.end_stream(End(stream=1, finish_reason="abort"))
    pair.pump()
    assert [type(event) for event in pair.client_events] == [Tokens, End]
    assert pair.client.streams == frozenset()
