"""What both ends do: acknowledge, resume, beat, probe, and fail as declared."""

from __future__ import annotations

import pytest
from support.fm_pair import Pair, feed, messages

from seedance.daemon.protocol.fm_frame import HEADER_BYTES
from seedance.daemon.protocol.fm_messages import (
    Ack,
    Error,
    Infer,
    Modality,
    Nack,
    Note,
    Part,
    Ping,
    Pong,
    Tokens,
)
from seedance.daemon.protocol.fm_receiver import ACK_DELAY_S, ACK_FRAMES
from seedance.daemon.protocol.fm_sender import Backpressure
from seedance.daemon.protocol.fm_server import LOSSLESS_ACK_DELAY_MS
from seedance.daemon.protocol.fm_session import Drained, Failed, Options, PeerGone
from seedance.daemon.protocol.fm_states import State
from seedance.daemon.protocol.fm_timing import HEARTBEAT_S, NEVER
from seedance.errors import LocalProtocolError

LOSSY = Options(lossless=False)


def text(pair: Pair) -> bytes:
    return b"".join(event.data for event in pair.client_events if isinstance(event, Tokens))


def test_frames_of_one_turn_are_one_message() -> None:
    pair = Pair()
    pair.begin(2)
    pair.wait(1.0)
    pair.server.send_tokens(1, b"a")
    pair.server.send_tokens(2, b"b")
    (message,) = pair.server.data_to_send(pair.now)
    assert [type(each) for each in messages([message])] == [Tokens, Tokens]


def test_a_message_is_no_longer_than_a_frame_may_be() -> None:
    pair = Pair(Options(payload_bytes=4096))
    pair.begin()
    for _ in range(10):
        pair.client.part(Part(stream=1, modality=Modality.AUDIO, data=b"x" * 1500))
    sent = pair.client.data_to_send(pair.now)
    assert len(sent) == 5
    assert all(len(message) <= 4096 + HEADER_BYTES for message in sent)
    assert len(messages(sent)) == 10


def test_a_frame_over_what_was_agreed_on_is_our_mistake() -> None:
    pair = Pair(Options(payload_bytes=4096))
    pair.begin()
    with pytest.raises(LocalProtocolError, match="bytes of payload; 4096 are agreed on"):
        pair.client.part(Part(stream=1, modality=Modality.AUDIO, data=b"x" * 4096))


def test_acks_come_late_or_with_what_is_sent_anyway() -> None:
    pair = Pair()
    pair.begin()
    pair.wait(1.0)
    pair.server.send_tokens(1, b"a")
    pair.pump()
    assert pair.server.statistics().frames_under_way == 1
    assert pair.client.next_timer() == pair.now + LOSSLESS_ACK_DELAY_MS / 1000
    pair.client.part(Part(stream=1, modality=Modality.TEXT, data=b""))
    sent = messages(pair.client.data_to_send(pair.now))
    assert [type(each) for each in sent] == [Ack, Part]
    pair.server.send_tokens(1, b"b")
    pair.pump()
    pair.wait(LOSSLESS_ACK_DELAY_MS / 1000)
    assert pair.server.statistics().frames_under_way == 0


def test_only_tokens_are_acked_so_late() -> None:
    pair = Pair()
    pair.begin()
    pair.wait(1.0)
    pair.server.send_tokens(1, b"a")
    pair.server.note(Note(stream=1, note="queued"))
    pair.pump()
    assert pair.client.next_timer() == pair.now + ACK_DELAY_S


def test_every_so_many_frames_are_acked_at_once() -> None:
    pair = Pair()
    pair.begin()
    pair.wait(1.0)
    for _ in range(ACK_FRAMES):
        pair.server.send_tokens(1, b"a")
        for message in pair.server.data_to_send(pair.now):
            pair.client.receive_data(message, pair.now)
    assert messages(pair.client.data_to_send(pair.now)) == [Ack(seq=ACK_FRAMES, credit=128)]


def test_a_shut_window_stops_the_peer_and_merges() -> None:
    pair = Pair()
    pair.begin()
    pair.client.set_window(0, pair.now)
    pair.pump()
    for _ in range(50):
        pair.server.send_tokens(1, b"a")
    pair.pump()
    assert text(pair) == b""
    assert pair.server.statistics().frames_waiting == 1
    pair.client.set_window(1, pair.now)
    pair.pump()
    assert text(pair) == b"a" * 50
    assert pair.server.statistics().frames_under_way == 1
    with pytest.raises(LocalProtocolError, match="cannot set a window of 129 frames"):
        pair.client.set_window(129, pair.now)


def test_a_cut_loses_nothing_and_doubles_nothing() -> None:
    pair = Pair()
    pair.begin()
    for data in (b"a", b"b"):
        pair.server.send_tokens(1, data)
        pair.pump()
    pair.server.send_tokens(1, b"c")
    assert pair.server.data_to_send(pair.now)  # and they are lost
    pair.cut()
    assert (pair.client.state, pair.server.state) == (State.RECONNECTING, State.RECONNECTING)
    pair.server.send_tokens(1, b"d")
    pair.server.send_tokens(1, b"e")
    pair.client.part(Part(stream=1, modality=Modality.TEXT, data=b"late"))
    assert pair.server.data_to_send(pair.now) == []
    pair.connect()
    assert text(pair) == b"abcde"
    assert pair.server.statistics().frames_resent == 1
    assert [event.data for event in pair.server_events if isinstance(event, Part)] == [b"late"]


def test_a_frame_lost_within_a_connection_is_asked_for() -> None:
    pair = Pair(LOSSY)
    pair.begin()
    pair.server.send_tokens(1, b"a")
    assert pair.server.data_to_send(pair.now)
    pair.server.send_tokens(1, b"b")
    pair.pump()
    assert text(pair) == b""
    assert pair.client.statistics().early_frames == 1
    pair.wait(0.02)
    assert text(pair) == b"ab"
    assert pair.server.statistics().frames_resent == 1


def test_the_last_frame_that_is_lost_is_found_by_a_probe() -> None:
    pair = Pair(LOSSY)
    pair.begin()
    pair.wait(1.0)
    pair.server.send_tokens(1, b"a")
    pair.server.send_tokens(1, b"b")
    assert pair.server.data_to_send(pair.now)
    pair.wait(1.0)
    assert text(pair) == b"ab"
    assert pair.server.statistics().frames_resent == 2  # the probe, and what it showed to be missing


def test_a_lost_opening_of_the_window_is_found_by_a_ping() -> None:
    pair = Pair(LOSSY)
    pair.begin()
    pair.client.set_window(0, pair.now)
    pair.pump()
    pair.client.set_window(128, pair.now)
    assert messages(pair.client.data_to_send(pair.now)) == [Ack(seq=0, credit=128)]
    pair.server.send_tokens(1, b"a")
    pair.wait(HEARTBEAT_S / 2)
    assert text(pair) == b"a"


def test_without_losses_nothing_is_probed() -> None:
    pair = Pair()
    pair.begin()
    pair.wait(1.0)
    pair.server.send_tokens(1, b"a")
    assert pair.server.data_to_send(pair.now)
    pair.now = pair.server.next_timer()
    assert pair.now >= 100.0 + HEARTBEAT_S
    pair.server.timer_fired(pair.now)
    assert [type(each) for each in messages(pair.server.data_to_send(pair.now))] == [Ping]


def test_a_ping_is_answered_with_what_has_come() -> None:
    pair = Pair()
    feed(pair.server, pair.now, (0, Ping(opaque=b"12345678")))
    assert messages(pair.server.data_to_send(pair.now)) == [Pong(opaque=b"12345678"), Ack(seq=0, credit=128)]


def test_quiet_ends_stay_connected() -> None:
    pair = Pair()
    pair.wait(20 * HEARTBEAT_S)
    assert (pair.client.state, pair.server.state) == (State.CONNECTED, State.CONNECTED)
    assert pair.server.statistics().srtt_s == 0.0


def test_three_pings_without_an_answer_are_the_end() -> None:
    pair = Pair()
    pair.wait(1.0)
    began = pair.now
    while not pair.server.should_close:
        pair.now = pair.server.next_timer()
        pair.server.timer_fired(pair.now)
        pair.server.data_to_send(pair.now)
    assert 3 * HEARTBEAT_S <= pair.now - began < 4 * HEARTBEAT_S
    assert pair.server.events_received() == [PeerGone()]
    assert (pair.server.state, pair.server.close_code) == (State.RECONNECTING, 1006)
    assert pair.server.next_timer() == NEVER


def test_back_pressure_ends_with_the_reader_that_reads() -> None:
    pair = Pair(Options(bound_bytes=10_000))
    pair.begin()
    pair.client.set_window(0, pair.now)
    pair.pump()
    sent = 0
    while pair.server.send_tokens(1, b"x" * 100) < Backpressure.PARK:
        sent += 1
    assert pair.server.send_tokens(1, b"x" * 5000) is Backpressure.PARK
    assert pair.server.send_tokens(1, b"x") is Backpressure.REFUSED
    pair.client.set_window(128, pair.now)
    pair.pump()
    pair.wait(ACK_DELAY_S)
    assert pair.server_events == [Drained()]
    assert len(text(pair)) == (sent + 1) * 100 + 5000
    assert pair.server.send_tokens(1, b"x") is Backpressure.NONE


def test_room_made_by_a_resume_is_told_too() -> None:
    pair = Pair(Options(bound_bytes=10_000))
    pair.begin()
    pair.wait(1.0)
    assert pair.server.send_tokens(1, b"x" * 3000) is Backpressure.PAUSE
    for message in pair.server.data_to_send(pair.now):
        pair.client.receive_data(message, pair.now)
    pair.cut()  # before the ACK
    pair.connect()
    assert pair.server_events == [Drained()]


def test_a_failure_is_said_last_and_alone() -> None:
    pair = Pair()
    pair.begin()
    pair.server.send_tokens(1, b"a")
    pair.server.receive_data(b"no frame", pair.now)
    (event,) = pair.server.events_received()
    assert isinstance(event, Failed)
    sent = messages(pair.server.data_to_send(pair.now))
    assert sent == [Error(stream=0, code="protocol_error", message=event.message)]
    assert pair.server.should_close
    pair.server.receive_data(b"more", pair.now)
    assert (pair.server.events_received(), pair.server.data_to_send(pair.now)) == ([], [])
    pair.client.receive_eof()
    pair.connect()
    assert text(pair) == b"a"


def test_a_long_reason_is_cut() -> None:
    pair = Pair()
    pair.server._fail("internal", "x" * 5000)
    (error,) = messages(pair.server.data_to_send(pair.now))
    assert isinstance(error, Error)
    assert error.message == "x" * 512


def test_what_came_before_the_bad_frame_counts() -> None:
    pair = Pair()
    feed(pair.server, pair.now, (1, Infer(stream=1, model="m")), (0, Nack(ranges=[(5, 5)])))
    assert [type(event) for event in pair.server.events_received()] == [Infer, Failed]
    pair.cut()
    pair.connect()
    assert pair.server.streams == {1}


def test_a_closed_session_is_no_use() -> None:
    pair = Pair()
    pair.client.close()
    pair.client.close()
    assert (pair.client.state, pair.client.should_close, pair.client.close_code) == (State.CLOSED, True, 1000)
    pair.client.receive_eof()
    with pytest.raises(LocalProtocolError, match="cannot be 'opened' while 'closed'"):
        pair.client.connect(pair.now)
