"""Frames against the examples of RFC 6455 and a slow, obvious mask."""

from __future__ import annotations

import pytest

from seedance.daemon.protocol.frame import (
    CloseCode,
    Opcode,
    TextTemplate,
    close_payload,
    frame_binary,
    frame_control,
    frame_text,
    parse_close,
    unmask,
)
from seedance.errors import LocalProtocolError, RemoteProtocolError


def test_examples_of_the_rfc() -> None:
    """RFC 6455 §5.7."""
    assert frame_text(b"Hello") == bytes.fromhex("810548656c6c6f")
    assert frame_control(Opcode.PING, b"Hello") == bytes.fromhex("890548656c6c6f")
    assert frame_binary(b"a" * 256) == bytes.fromhex("827e0100") + b"a" * 256
    assert frame_binary(b"a" * 65536) == bytes.fromhex("827f0000000000010000") + b"a" * 65536
    assert unmask(bytes.fromhex("7f9f4d5158"), bytes.fromhex("37fa213d")) == b"Hello"


@pytest.mark.parametrize(
    ("length", "header"),
    [(0, "8100"), (125, "817d"), (126, "817e007e"), (65535, "817effff"), (65536, "817f0000000000010000")],
)
def test_lengths_are_in_their_shortest_form(length: int, header: str) -> None:
    payload = b"a" * length
    assert frame_text(payload) == bytes.fromhex(header) + payload
    assert frame_binary(payload) == b"\x82" + frame_text(payload)[1:]


@pytest.mark.parametrize("length", [0, 1, 104, 105, 106, 65514, 65515, 65516])
def test_a_template_frames_what_frame_text_does(length: int) -> None:
    prefix, suffix, text = b'{"delta":"', b'","100%":1}', b"a" * length
    assert TextTemplate(prefix, suffix).frame(text) == frame_text(prefix + text + suffix)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 125, 8191, 8192, 8193, 16384, 20001])
def test_unmasks_any_length(length: int) -> None:
    payload = bytes(index * 7 & 0xFF for index in range(length))
    mask = b"\x01\x80\xff\x5a"
    assert unmask(payload, mask) == bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))


def test_control_frames_are_short() -> None:
    assert len(frame_control(Opcode.PONG, b"a" * 125)) == 127
    with pytest.raises(LocalProtocolError):
        frame_control(Opcode.PONG, b"a" * 126)


def test_close_payloads_come_back() -> None:
    assert parse_close(close_payload(1000, "bye é")) == (1000, "bye é")
    assert parse_close(close_payload(4999)) == (4999, "")
    assert parse_close(b"") == (CloseCode.NO_STATUS, "")


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535])
def test_codes_that_are_not_for_the_wire(code: int) -> None:
    with pytest.raises(LocalProtocolError):
        close_payload(code)
    with pytest.raises(RemoteProtocolError) as caught:
        parse_close(code.to_bytes(2, "big"))
    assert caught.value.code == CloseCode.PROTOCOL_ERROR


@pytest.mark.parametrize(("payload", "code"), [(b"\x03", 1002), (b"\x03\xe8\xff", 1007), (b"\x03\xe8\xe2\x82", 1007)])
def test_malformed_close_payloads(payload: bytes, code: int) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_close(payload)
    assert caught.value.code == code
