"""WebSocket under arbitrary cuts, arbitrary bytes, and with the `websockets` library as the peer."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.protocol_drive import client_frame, converse, cut, head_of
from support.protocol_invariants import check_websocket
from websockets.client import ClientProtocol
from websockets.frames import Frame
from websockets.frames import Opcode as PeerOpcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from seedance.daemon.protocol.frame import Opcode, close_payload
from seedance.daemon.protocol.http import HttpServer
from seedance.daemon.protocol.websocket import (
    BinaryReceived,
    CloseReceived,
    Event,
    PingReceived,
    PongReceived,
    TextReceived,
    WebSocketServer,
    accept_response_headers,
)

# No deadline per example: other work on the machine says nothing about the code.
CALM = settings(deadline=None)
MASKS = st.binary(min_size=4, max_size=4)
PLACES = st.lists(st.integers(1, 700), max_size=12)
MESSAGES = st.text(max_size=150).map(TextReceived) | st.binary(max_size=300).map(BinaryReceived)
CONTROLS = st.binary(max_size=125).map(PingReceived) | st.binary(max_size=125).map(PongReceived)


def control_frame(draw: st.DrawFn, event: PingReceived | PongReceived) -> bytes:
    opcode = Opcode.PING if isinstance(event, PingReceived) else Opcode.PONG
    return client_frame(opcode, event.payload, mask=draw(MASKS))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, list[Event]]:
    """Return what a right client sends, in fragments with control frames between them, and the events it makes."""
    data, events = b"", list[Event]()
    for message in draw(st.lists(MESSAGES, max_size=4)):
        text = isinstance(message, TextReceived)
        payload = message.text.encode() if isinstance(message, TextReceived) else message.data
        pieces = cut(payload, draw(st.lists(st.integers(1, 300), max_size=3)))
        for index, piece in enumerate(pieces):
            for control in draw(st.lists(CONTROLS, max_size=1)):
                data += control_frame(draw, control)
                events.append(control)
            opcode = Opcode.CONTINUATION if index else Opcode.TEXT if text else Opcode.BINARY
            data += client_frame(opcode, piece, fin=index == len(pieces) - 1, mask=draw(MASKS))
        events.append(message)
    code, reason = draw(st.sampled_from([(1000, ""), (1001, "é"), (4999, "x" * 123)]))
    return data + client_frame(Opcode.CLOSE, close_payload(code, reason)), [*events, CloseReceived(code, reason)]


@CALM
@given(conversations(), PLACES)
def test_right_frames_come_back_however_cut(conversation: tuple[bytes, list[Event]], places: list[int]) -> None:
    data, expected = conversation
    events, _, closes = converse(cut(data, places))
    assert (events, closes) == (expected, True)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Return a conversation with some bytes changed."""
    data = bytearray(draw(conversations())[0])
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(data)


@CALM
@given(damaged() | st.binary(max_size=200), PLACES)
def test_any_cut_gives_the_same(data: bytes, places: list[int]) -> None:
    check_websocket(data, places)


@CALM
@given(damaged())
def test_byte_by_byte_gives_the_same(data: bytes) -> None:
    check_websocket(data, range(len(data)))


@CALM
@given(st.binary(max_size=64), st.booleans(), MASKS)
def test_text_is_taken_when_python_takes_it(payload: bytes, fin: bool, mask: bytes) -> None:
    data = client_frame(Opcode.TEXT, payload, fin=fin, mask=mask)
    if not fin:
        data += client_frame(Opcode.CONTINUATION)
    try:
        expected: Event | None = TextReceived(payload.decode())
    except UnicodeDecodeError:
        expected = None
    events, _, _ = converse([data])
    assert (events[0] == expected) if expected else not isinstance(events[0], TextReceived)


@CALM
@given(st.lists(MESSAGES, max_size=5), PLACES)
def test_websockets_is_a_peer(messages: list[TextReceived | BinaryReceived], places: list[int]) -> None:
    """Handshake, messages both ways and the closing handshake with a client that we did not write."""
    client = ClientProtocol(parse_uri("ws://host/v2/infer"))
    client.send_request(client.connect())
    opening = b"".join(client.data_to_send())
    http = HttpServer()
    http.receive_data(opening)
    http.events_received()
    left_over = http.switch_protocols(accept_response_headers(head_of(opening)))
    assert left_over == b""
    client.receive_data(http.data_to_send())
    (response,) = client.events_received()
    assert isinstance(response, Response)
    assert response.status_code == 101

    server = WebSocketServer()
    for message in messages:
        if isinstance(message, TextReceived):
            client.send_text(message.text.encode())
            server.send_text(message.text)
        else:
            client.send_binary(message.data)
            server.send_binary(message.data)
    client.send_close(1000, "bye")
    for piece in cut(b"".join(client.data_to_send()), places):
        server.receive_data(piece)
    assert server.events_received() == [*messages, CloseReceived(1000, "bye")]
    client.receive_data(server.data_to_send())
    echoed = [frame for frame in client.events_received() if isinstance(frame, Frame)]
    assert [(frame.opcode, bytes(frame.data)) for frame in echoed] == [
        *(
            (PeerOpcode.TEXT, message.text.encode())
            if isinstance(message, TextReceived)
            else (PeerOpcode.BINARY, message.data)
            for message in messages
        ),
        (PeerOpcode.CLOSE, b"\x03\xe8"),
    ]
