"""FM frames as bytes; the vectors hold most examples."""

from __future__ import annotations

import pytest

from seedance.daemon.protocol.fm_frame import (
    DEFAULT_PAYLOAD_BYTES,
    HEADER_BYTES,
    MAX_STREAM,
    TOKENS_PREFIX_BYTES,
    Encoding,
    frame,
    parse_tokens,
    split_message,
    tokens_frame,
    tokens_prefix,
)
from seedance.errors import RemoteProtocolError

STREAMS = (1, 127, 128, 16383, 16384, 2097151, 2097152, MAX_STREAM)


def test_a_frame_by_hand() -> None:
    assert frame(0x0102030405060708, b"\x0bbody") == b"FM\x01\x05\x06\x07\x08\x00\x00\x00\x05\x0bbody"
    assert tokens_frame(2, tokens_prefix(300, Encoding.BYTES), b"ab") == b"FM\x01\0\0\0\x02\0\0\0\x06\x06\xac\x02\x01ab"


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("encoding", [0, 1, 255])
def test_tokens_come_back(stream: int, encoding: int) -> None:
    prefix = tokens_prefix(stream, encoding)
    assert len(prefix) <= TOKENS_PREFIX_BYTES
    data = b"before" + prefix + b"data" + b"behind"
    assert parse_tokens(data, 7, len(data) - 6) == (stream, encoding, b"data")


@pytest.mark.parametrize("stream", STREAMS)
def test_tokens_that_end_early(stream: int) -> None:
    prefix = tokens_prefix(stream, 0)
    for end in range(1, len(prefix)):
        with pytest.raises(RemoteProtocolError, match="^cannot read an FM frame: "):
            parse_tokens(prefix + b"data", 1, end)


def test_frames_are_found_in_a_message() -> None:
    message = frame(1, b"a") + frame(2, b"bb") + frame(3, b"ccc")
    found = [(seq_id, message[start:end]) for seq_id, start, end in split_message(message, 3)]
    assert found == [(1, b"a"), (2, b"bb"), (3, b"ccc")]


def test_good_frames_come_before_the_error() -> None:
    frames = split_message(frame(1, b"a") + b"FM\x02" + bytes(HEADER_BYTES), DEFAULT_PAYLOAD_BYTES)
    assert next(frames) == (1, HEADER_BYTES, HEADER_BYTES + 1)
    with pytest.raises(RemoteProtocolError, match="version 2, and only 1"):
        next(frames)


def test_the_limit_is_the_largest_payload() -> None:
    assert list(split_message(frame(1, b"a" * 5000), 5000))
    with pytest.raises(RemoteProtocolError, match="5001 bytes of payload; 5000 are agreed on") as caught:
        list(split_message(frame(1, b"a" * 5001), 5000))
    assert caught.value.code == 1009
