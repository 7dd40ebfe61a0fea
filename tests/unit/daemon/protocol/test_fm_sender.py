"""The sender: numbers, what is kept, merging, back pressure, what is sent again."""

from __future__ import annotations

import pytest
from support.fm_vectors import read

from seedance.daemon.protocol.fm_frame import DEFAULT_PAYLOAD_BYTES, Encoding, tokens_prefix
from seedance.daemon.protocol.fm_messages import End, Note, Tokens, encode_payload
from seedance.daemon.protocol.fm_sender import FRAME_COST_BYTES, MERGED_BYTES, Backpressure, Sender

PREFIX = {stream: tokens_prefix(stream, Encoding.TEXT) for stream in (1, 2, 3)}
END = encode_payload(End(stream=1, finish_reason="stop"))


def sender(credit: int = 128, bound_bytes: int = 1 << 20) -> Sender:
    made = Sender(bound_bytes)
    assert made.resume(0, credit)
    return made


def tokens(sender: Sender, stream: int, *texts: str) -> Backpressure:
    pressure = Backpressure.NONE
    for text in texts:
        pressure = sender.send_tokens(stream, PREFIX[stream], text.encode())
    return pressure


def taken(sender: Sender) -> list[tuple[int, object]]:
    """Return sequence and text, or message, of the frames that leave now."""
    frames = [each for framed in sender.take() for each in read(framed, DEFAULT_PAYLOAD_BYTES)]
    return [
        (seq, (message.stream, message.data.decode()) if isinstance(message, Tokens) else message)
        for seq, message in frames
    ]


def test_frames_are_numbered_as_they_are_sent() -> None:
    made = sender()
    tokens(made, 1, "a", "b")
    made.send(1, END)
    assert taken(made) == [(1, (1, "a")), (2, (1, "b")), (3, End(stream=1, finish_reason="stop"))]
    assert taken(made) == []
    assert (len(made), made.next_seq, made.acked_seq) == (3, 4, 0)


def test_a_frame_is_kept_until_it_is_acked() -> None:
    made = sender()
    tokens(made, 1, "a", "b", "c")
    made.take()
    held = made.held_bytes
    assert held == 3 * (len(PREFIX[1]) + 1 + FRAME_COST_BYTES)
    assert made.ack_arrived(2, 128)
    assert (len(made), made.acked_seq, made.held_bytes) == (1, 2, held // 3)
    assert made.ack_arrived(3, 128)
    assert (len(made), made.held_bytes) == (0, 0)


def test_what_exceeds_the_credit_waits_and_is_merged_by_stream() -> None:
    made = sender(credit=2)
    tokens(made, 1, "a", "b", "c")
    tokens(made, 2, "x")
    tokens(made, 1, "d")
    tokens(made, 2, "y")
    assert taken(made) == [(1, (1, "a")), (2, (1, "b"))]
    assert (made.waiting_frames, made.next_seq) == (2, 3)
    made.ack_arrived(1, 2)
    assert taken(made) == [(3, (1, "cd"))]
    tokens(made, 1, "e")
    made.ack_arrived(3, 2)
    assert taken(made) == [(4, (2, "xy")), (5, (1, "e"))]


def test_nothing_is_merged_past_another_frame_of_its_stream() -> None:
    made = sender(credit=0)
    tokens(made, 1, "a")
    note = encode_payload(Note(stream=1, note="n"))
    made.send(1, note)
    tokens(made, 1, "b")
    tokens(made, 2, "x")
    tokens(made, 1, "c")
    made.ack_arrived(0, 128)
    assert taken(made) == [(1, (1, "a")), (2, Note(stream=1, note="n")), (3, (1, "bc")), (4, (2, "x"))]


def test_merging_ends_where_a_frame_would_be_too_long() -> None:
    made = sender(credit=0)
    piece = "x" * (MERGED_BYTES // 2)
    tokens(made, 1, piece, piece, "y")
    made.ack_arrived(0, 128)
    assert taken(made) == [(1, (1, piece + piece)), (2, (1, "y"))]


def test_a_delta_too_long_for_a_frame_is_cut_between_characters() -> None:
    made = sender()
    made.agree(4096)
    text = "é" * 5000 + "a"
    tokens(made, 1, text)
    frames = taken(made)
    assert "".join(frame[1][1] for frame in frames if isinstance(frame[1], tuple)) == text
    assert len(frames) == 3
    assert all(len(PREFIX[1]) + len(frame[1][1].encode()) <= 4096 for frame in frames if isinstance(frame[1], tuple))


def test_bytes_that_are_no_text_are_cut_all_the_same() -> None:
    made = sender()
    data = b"\x80" * (MERGED_BYTES * 2 + 5)
    made.send_tokens(1, PREFIX[1], data)
    found = [message for framed in made.take() for _, message in read(framed, DEFAULT_PAYLOAD_BYTES)]
    assert b"".join(message.data for message in found if isinstance(message, Tokens)) == data


def test_back_pressure_by_quarters_of_the_bound() -> None:
    made = sender(credit=0, bound_bytes=8000)
    assert tokens(made, 1, "x" * 1800) is Backpressure.NONE
    assert not made.take_drained()
    assert tokens(made, 1, "x" * 200) is Backpressure.PAUSE
    assert tokens(made, 1, "x" * 4000) is Backpressure.PARK
    assert tokens(made, 1, "x" * 5000) is Backpressure.PARK
    assert made.is_full
    held = made.held_bytes
    assert tokens(made, 1, "x") is Backpressure.REFUSED
    assert made.send(1, END) is Backpressure.REFUSED
    assert made.held_bytes == held
    assert made.send(1, END, beyond_bound=True) is Backpressure.PARK
    assert made.held_bytes == held + len(END) + FRAME_COST_BYTES


def test_drained_is_told_once_and_only_after_pressure() -> None:
    made = sender(bound_bytes=8000)
    assert not made.take_drained()
    assert tokens(made, 1, *["x" * 900] * 3) is Backpressure.PAUSE
    made.take()
    made.ack_arrived(1, 128)
    assert not made.take_drained()
    made.ack_arrived(2, 128)
    assert made.take_drained()
    assert not made.take_drained()


def test_only_what_is_missing_is_sent_again_as_it_was() -> None:
    made = sender()
    tokens(made, 1, "a", "b", "c", "d", "e")
    first = made.take()
    made.ack_arrived(1, 128)
    assert made.nack_arrived([(1, 2), (4, 4)])
    assert made.nack_arrived([(4, 4)])
    tokens(made, 1, "f")
    again = made.take()
    assert again[:2] == [first[1], first[3]]
    assert len(again) == 3
    assert made.frames_resent == 2
    assert made.take() == []


@pytest.mark.parametrize("ranges", [[(0, 1)], [(2, 1)], [(1, 4)], [(2, 2), (2, 3)], [(3, 3), (1, 1)]])
def test_ranges_that_no_right_peer_sends(ranges: list[tuple[int, int]]) -> None:
    made = sender()
    tokens(made, 1, "a", "b", "c")
    made.take()
    assert not made.nack_arrived(ranges)


def test_an_ack_that_was_overtaken_changes_nothing() -> None:
    made = sender()
    tokens(made, 1, "a", "b", "c")
    made.ack_arrived(2, 7)
    assert made.ack_arrived(1, 99)
    assert (made.acked_seq, made.credit) == (2, 7)
    assert made.ack_arrived(2, 9)
    assert made.credit == 9
    assert not made.ack_arrived(4, 9)


def test_a_probe_is_the_last_frame() -> None:
    made = sender()
    assert not made.probe()
    tokens(made, 1, "a", "b")
    made.take()
    assert made.probe()
    assert taken(made) == [(2, (1, "b"))]


def test_without_a_connection_everything_waits_merged() -> None:
    made = sender()
    tokens(made, 1, "a", "b")
    made.connection_lost()
    assert made.take() == []
    tokens(made, 1, "c", "d")
    assert (len(made), made.waiting_frames) == (2, 1)
    assert made.resume(1, 128)
    assert taken(made) == [(2, (1, "b")), (3, (1, "cd"))]


def test_resume_from_what_is_kept_only() -> None:
    made = sender()
    tokens(made, 1, "a", "b", "c")
    made.take()
    made.ack_arrived(1, 128)
    made.connection_lost()
    assert not made.resume(0, 128)
    assert not made.resume(4, 128)
    assert made.resume(3, 128)
    assert (len(made), made.held_bytes, made.take()) == (0, 0, [])


def test_under_way_is_sent_again_whatever_the_new_credit() -> None:
    made = sender(credit=3)
    tokens(made, 1, "a", "b", "c", "d")
    made.take()
    made.connection_lost()
    assert made.resume(0, 1)
    assert [seq for seq, _ in taken(made)] == [1, 2, 3]
    made.ack_arrived(3, 1)
    assert [seq for seq, _ in taken(made)] == [4]
