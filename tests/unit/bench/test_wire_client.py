from __future__ import annotations

import pytest

from bench.processes import BenchError
from bench.wire_client import client_frame, completion_text, dechunked, event_data, server_frames


def test_chunks_are_put_together_once_the_last_has_come() -> None:
    body = b"5\r\nhello\r\nA;x=1\r\n, wonderful\r\n0\r\n\r\n"
    assert dechunked(body.replace(b"A;x=1", b"b")) == b"hello, wonderful"
    assert all(dechunked(body[:end]) is None for end in range(len(body) - 5))


def test_events_are_told_without_the_last_one_and_without_comments() -> None:
    assert event_data(b": ping\n\ndata: {}\n\ndata: x\n\ndata: [DONE]\n\n") == ["{}", "x"]
    with pytest.raises(BenchError, match="does not end with"):
        event_data(b"data: {}\n\n")


def test_the_text_of_an_event_is_that_of_its_choices() -> None:
    assert completion_text('{"choices":[{"index":0,"text":"ab"}]}') == "ab"
    assert completion_text('{"choices":[]}') == ""


@pytest.mark.parametrize("size", [0, 125, 126, 300, 70_000])
def test_a_servers_frames_are_told_whole_however_they_are_cut(size: int) -> None:
    payload = b"x" * size
    if size < 126:
        head = bytes([0x82, size])
    elif size < 65536:
        head = b"\x82\x7e" + size.to_bytes(2)
    else:
        head = b"\x82\x7f" + size.to_bytes(8)
    whole = head + payload
    assert server_frames(whole + b"\x81") == ([(2, payload)], b"\x81")
    for end in {1, len(head) - 1, len(whole) - 1}:
        assert server_frames(whole[:end]) == ([], whole[:end])


def test_a_clients_frame_is_masked_with_zeros() -> None:
    assert client_frame(1, b"hi") == b"\x81\x82\0\0\0\0hi"
    assert client_frame(2, b"x" * 200)[:8] == b"\x82\xfe\x00\xc8\0\0\0\0"
