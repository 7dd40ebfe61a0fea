"""Channel framing under any cut of the bytes, and under any bytes."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from seedance.engine.channel import Abort, Receiver, SetPaused, Submit, ToHost, encode
from seedance.engine.request import Sampling, Urgency
from seedance.errors import RemoteProtocolError

numbers = st.integers(0, 2**32 - 1)
messages = st.lists(
    st.one_of(
        st.builds(
            Submit,
            numbers,
            st.lists(st.integers(0, 2**32 - 1), max_size=300),
            st.builds(Sampling, max_tokens=st.integers(1, 9), seed=st.none() | st.integers(0, 2**63 - 1)),
            st.builds(Urgency, st.none() | st.floats(0, 1e12), st.floats(0, 1e6), st.floats(0, 1e6)),
        ),
        st.builds(Abort, st.lists(numbers)),
        st.builds(SetPaused, st.lists(numbers), st.booleans()),
    ),
    max_size=8,
)


@given(messages, st.data())
def test_any_cut_gives_the_same_messages(sent: list[ToHost], data: st.DataObject) -> None:
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20), label="cuts"))
    receiver: Receiver[ToHost] = Receiver(ToHost)
    received: list[ToHost] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += receiver.receive_data(stream[begin:end])
    assert received == sent


@given(st.lists(st.binary(max_size=60), max_size=10))
def test_any_bytes_are_messages_or_the_peers_fault(pieces: list[bytes]) -> None:
    receiver: Receiver[ToHost] = Receiver(ToHost)
    with contextlib.suppress(RemoteProtocolError):
        for piece in pieces:
            for message in receiver.receive_data(piece):
                assert isinstance(message, ToHost)


@given(messages.filter(bool), st.data())
def test_damaged_bytes_are_messages_or_the_peers_fault(sent: list[ToHost], data: st.DataObject) -> None:
    stream = bytearray(b"".join(map(encode, sent)))
    stream[data.draw(st.integers(0, len(stream) - 1), label="place")] ^= data.draw(st.integers(1, 255), label="damage")
    receiver: Receiver[ToHost] = Receiver(ToHost)
    with contextlib.suppress(RemoteProtocolError):
        for message in receiver.receive_data(bytes(stream)):
            assert isinstance(message, ToHost)
