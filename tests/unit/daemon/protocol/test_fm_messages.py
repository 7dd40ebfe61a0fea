"""What FM frames say; the vectors hold most examples."""

from __future__ import annotations

import pytest

from seedance.daemon.protocol.fm_frame import MIN_PAYLOAD_BYTES, UNNUMBERED, frame
from seedance.daemon.protocol.fm_messages import (
    KINDS,
    Ack,
    Error,
    Hello,
    Infer,
    Message,
    Nack,
    Note,
    Pong,
    Tokens,
    decode_payload,
    encode_payload,
    is_numbered,
    parse_ack,
)
from seedance.errors import RemoteProtocolError


def again(message: Message) -> Message:
    payload = encode_payload(message)
    return decode_payload(b"??" + payload, 2, 2 + len(payload))


def test_a_default_takes_no_bytes() -> None:
    assert encode_payload(Note(stream=1, note="n")) == b"\x09\x82\xa6stream\x01\xa4note\xa1n"
    assert len(encode_payload(Infer(stream=1, model="m", sampling={}, more=False))) < 20


def test_messages_come_back() -> None:
    asked = Infer(stream=2, model="m", messages=[{"role": "user", "content": [{"type": "text"}]}], deadline_ms=0)
    for message in (asked, Tokens(9, 1, b"\xff"), Ack(seq=2**63 - 1, credit=0)):
        assert again(message) == message


def test_what_a_body_owns_outlives_the_message() -> None:
    data = bytearray(encode_payload(Hello(client_id="client")))
    decoded = decode_payload(bytes(data), 0, len(data))
    data[:] = bytes(len(data))
    assert decoded == Hello(client_id="client")


def test_a_body_nested_too_deep_is_refused() -> None:
    body = b"\x83\xa6stream\x01\xa5model\xa1m\xa8sampling\x81\xa1a" + b"\x91" * 200_000 + b"\xc0"
    with pytest.raises(RemoteProtocolError, match="^cannot read an FM frame: the body of INFER: "):
        decode_payload(b"\x03" + body, 0, 1 + len(body))


def test_which_are_numbered() -> None:
    assert not is_numbered(Error(stream=0, code="gone", message=""))
    assert is_numbered(Error(stream=1, code="gone", message=""))
    assert not is_numbered(Ack(seq=1, credit=1))
    assert is_numbered(Tokens(1, 0, b""))
    assert len(UNNUMBERED) == 6
    assert len(KINDS) == len(set(KINDS.values())) == 14


def test_what_is_about_the_connection_fits_the_least_payload() -> None:
    far = 2**63 - 200
    ranges = [(far + 2 * index, far + 2 * index) for index in range(64)]
    for message in (Nack(ranges=ranges), Error(stream=0, code="x" * 256, message="\U0001f600" * 512)):
        assert len(encode_payload(message)) <= MIN_PAYLOAD_BYTES


def test_a_message_that_is_one_ack_is_known_as_such() -> None:
    ack = Ack(seq=2**40, credit=7)
    message = frame(0, encode_payload(ack))
    assert parse_ack(message) == ack
    others = [message + message, message[:-1], message[:11], b"", frame(1, encode_payload(ack)), frame(0, b"\x0b\xc0")]
    others += [frame(0, encode_payload(Pong(opaque=b"12345678"))), b"\x81" + message[1:]]
    assert [parse_ack(other) for other in others] == [None] * len(others)
