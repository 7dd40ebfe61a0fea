"""The channel's messages and their framing."""

from __future__ import annotations

import math
import struct
import time
from typing import Any

import pytest

from seedance.engine import adapter, channel
from seedance.engine.channel import (
    Abort,
    Batch,
    Delta,
    EngineChanged,
    QueueBound,
    Receiver,
    Refused,
    SetPaused,
    Submit,
    encode,
    pack_singles,
)
from seedance.engine.request import FinishReason, ModelInfo, Sampling, TokenLogprobs, Urgency
from seedance.errors import RemoteProtocolError

MODEL = ModelInfo(
    name="m", tokenizer_dir="/t", max_model_len=10, vocab_size=5, eos_token_ids=(1, 2), created=3, engine="vllm"
)
TO_HOST: list[channel.ToHost] = [
    Submit(1, [5, 6, 1 << 31], Sampling(max_tokens=5)),
    Submit(
        2**32 - 1,
        [],
        Sampling(max_tokens=1, seed=-5, stop_token_ids=(3, 4), logit_bias={7: -1.5}, logprobs=0, json_schema="{}"),
    ),
    Submit(3, [1], Sampling(max_tokens=5), Urgency(12.5, 0.25, 0.125)),
    Abort([1, 2, 3]),
    SetPaused([1, 2], True),
]
TO_WORKER: list[channel.ToWorker] = [
    Batch([Delta(1, [2, 3]), Delta(2, [], FinishReason.ERROR, None, 16, "cannot go on")]),
    Batch([], pack_singles([5, 10, 2**32 - 1, 0])),
    Batch([Delta(1, [2], FinishReason.STOP, [TokenLogprobs([2, 9], [-0.5, -1.0], 1)])]),
    EngineChanged("ready", "", MODEL),
    EngineChanged("dead", "killed", None),
    Refused(9, "context_too_long", "cannot take so long a prompt"),
    Refused(9, "overloaded", "cannot take this request", 2.5),
    QueueBound(12, 3.5),
    QueueBound(None, 0.0),
]


@pytest.mark.parametrize(
    ("kind", "messages"), [(channel.ToHost, TO_HOST), (channel.ToWorker, TO_WORKER)], ids=["to host", "to worker"]
)
def test_messages_come_back_whole(kind: Any, messages: list[Any]) -> None:
    receiver: Receiver[Any] = Receiver(kind)
    assert receiver.receive_data(b"".join(map(encode, messages))) == messages
    for message in messages:
        assert receiver.receive_data(encode(message)) == [message]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_urgency_that_cannot_be_put_in_order_is_no_message(wrong: float) -> None:
    for urgency in (Urgency(wrong), Urgency(None, wrong), Urgency(None, 0.0, wrong)):
        message = encode(Submit(1, [1], Sampling(max_tokens=1), urgency))
        with pytest.raises(RemoteProtocolError, match="cannot read a channel message"):
            Receiver(channel.ToHost).receive_data(message)


def test_singles_are_pairs_of_stream_and_token() -> None:
    assert list(Batch([], pack_singles([5, 10, 2**32 - 1, 0])).pairs()) == [(5, 10), (2**32 - 1, 0)]


def test_a_stream_number_over_32_bits_is_no_message() -> None:
    with pytest.raises(RemoteProtocolError):
        Receiver(channel.ToHost).receive_data(encode(Submit(2**32, [1], Sampling(max_tokens=1))))


def test_a_large_message_in_small_pieces_is_copied_once() -> None:
    data = encode(Submit(1, list(range(3_000_000)), Sampling(max_tokens=1)))
    receiver: Receiver[channel.ToHost] = Receiver(channel.ToHost)
    started = time.process_time()
    messages: list[channel.ToHost] = []
    for at in range(0, len(data), 4096):
        messages += receiver.receive_data(data[at : at + 4096])
    assert len(messages) == 1
    # Copying all that is there at every piece would be 25 GB.
    assert time.process_time() - started < 3


def test_message_arrives_byte_by_byte() -> None:
    receiver: Receiver[channel.ToHost] = Receiver(channel.ToHost)
    data = encode(TO_HOST[0])
    assert [receiver.receive_data(data[i : i + 1]) for i in range(len(data) - 1)] == [[]] * (len(data) - 1)
    assert receiver.receive_data(data[-1:]) == [TO_HOST[0]]


def test_delta_has_the_fields_of_an_output() -> None:
    assert channel.Delta.__struct_fields__[1:] == adapter.Output.__struct_fields__[1:]
    assert channel.Delta.__struct_defaults__ == adapter.Output.__struct_defaults__


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (struct.pack("<I", channel.MAX_MESSAGE_BYTES + 1), 1009),
        (struct.pack("<I", 0), 1002),
        (struct.pack("<I", 1) + b"\xc1", 1002),
        (encode(Batch([])), 1002),
        (struct.pack("<I", 4) + b"\x93\x01\x01\x90", 1002),
    ],
    ids=["too long", "empty", "no msgpack", "wrong direction", "field missing"],
)
def test_what_is_no_message_is_the_peers_fault(data: bytes, code: int) -> None:
    receiver: Receiver[channel.ToHost] = Receiver(channel.ToHost)
    with pytest.raises(RemoteProtocolError) as error:
        receiver.receive_data(data)
    assert error.value.code == code


def test_length_at_the_limit_is_waited_for() -> None:
    receiver: Receiver[channel.ToHost] = Receiver(channel.ToHost)
    assert receiver.receive_data(struct.pack("<I", channel.MAX_MESSAGE_BYTES)) == []


@pytest.mark.parametrize("extension", [b"\xc7\x05\x01abcde", b"\xd6\x02abcd", b"\x91\x01"])
def test_token_ids_that_are_none(extension: bytes) -> None:
    body = b"\x94\x01\x01" + extension + b"\x81\xaamax_tokens\x01"
    with pytest.raises(RemoteProtocolError, match=r"^cannot read a channel message: "):
        Receiver(channel.ToHost).receive_data(len(body).to_bytes(4, "little") + body)


def test_a_token_id_has_32_bits() -> None:
    for token_id in (-1, 1 << 32):
        with pytest.raises(OverflowError):
            Submit(1, [token_id], Sampling(max_tokens=1))
