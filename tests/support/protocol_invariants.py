"""What must hold for every input of the protocol objects: the property tests and the fuzz targets check the same.

A head that we accept must mean the same to h11, and llhttp (through httptools) must take it. H11_REFUSES and
LLHTTP_REFUSES say what we accept and they refuse, each with the reason why that is no danger; a difference that is not
there fails the test until it is either mended or explained here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPMethod
from typing import Final

import h11
import httptools
from support.protocol_drive import SMALL_LIMITS, converse, cut, read_frames, serve

from seedance.daemon.protocol.frame import Opcode
from seedance.daemon.protocol.head import Limits, Request, parse_head
from seedance.daemon.protocol.http import ProtocolFailed, RequestReceived
from seedance.daemon.protocol.websocket import CloseReceived, Failed
from seedance.errors import RemoteProtocolError

H11_REFUSES: Final[dict[str, Callable[[Request], bool]]] = {}
LLHTTP_REFUSES: Final[dict[str, Callable[[Request], bool]]] = {
    "a method that no list knows: a method says nothing about framing, and the router answers 405": lambda request: (
        request.method not in HTTPMethod.__members__
    ),
}

_H11_BYTES: Final = 1 << 20


def check_http(data: bytes, places: Iterable[int]) -> None:
    """Any bytes give events and answers, the same however they are cut, and an end of the connection."""
    whole = serve([data])
    assert serve(cut(data, places)) == whole
    events, sent, closes = whole
    assert closes
    failures = [event for event in events if isinstance(event, ProtocolFailed)]
    assert failures in ([], events[-1:])
    answers = sum(isinstance(event, RequestReceived) for event in events) + len(failures)
    assert sent.startswith(b"HTTP/1.1 ") if answers else not sent


def check_head(data: bytes, limits: Limits = SMALL_LIMITS) -> Request | None:
    """A head is refused with a status, incomplete, or good to others, too; return it in the last case."""
    try:
        request = parse_head(data, limits)
    except RemoteProtocolError as error:
        assert error.code in (400, 413, 414, 417, 431, 501, 505)
        assert str(error).startswith("cannot ")
        return None
    if request is not None:
        _compare_with_h11(data[: request.head_bytes], request)
        _compare_with_llhttp(data[: request.head_bytes], request)
    return request


def _explained(reasons: dict[str, Callable[[Request], bool]], request: Request) -> bool:
    return any(explains(request) for explains in reasons.values())


def _compare_with_h11(head: bytes, request: Request) -> None:
    peer = h11.Connection(h11.SERVER, max_incomplete_event_size=_H11_BYTES)
    peer.receive_data(head)
    try:
        theirs = peer.next_event()
    except h11.RemoteProtocolError:
        assert _explained(H11_REFUSES, request), "we accept a head that h11 refuses"
        return
    assert isinstance(theirs, h11.Request)
    assert theirs.method.decode("ascii") == request.method
    assert theirs.http_version.decode("ascii") == request.http_version
    # h11 writes the length as it is in the message; the coding in lower case.
    ours = [(name.encode(), _as_h11(name, value)) for name, value in request.headers]
    assert list(theirs.headers) == ours


def _as_h11(name: str, value: str) -> bytes:
    return (value.lower() if name == "transfer-encoding" else value).encode("latin-1")


class _Head:
    """What llhttp says of a head, asked where it still knows: it forgets at the end of a message."""

    complete = False
    keep_alive = False
    parser: httptools.HttpRequestParser

    def on_headers_complete(self) -> None:
        self.complete = True
        self.keep_alive = self.parser.should_keep_alive()


def _compare_with_llhttp(head: bytes, request: Request) -> None:
    theirs = _Head()
    theirs.parser = httptools.HttpRequestParser(theirs)
    try:
        theirs.parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        assert request.get("upgrade") is not None
    except httptools.HttpParserError:
        theirs.complete = False
    if not theirs.complete:
        assert _explained(LLHTTP_REFUSES, request), "we accept a head that llhttp refuses"
        return
    assert theirs.keep_alive or not request.keep_alive


def check_bodies(data: bytes) -> int:
    """Each request that we take whole has the same body in h11; return how many there were."""
    events, _, _ = serve([data])
    ours = [event for event in events if isinstance(event, RequestReceived)]
    peer = h11.Connection(h11.SERVER, max_incomplete_event_size=_H11_BYTES)
    peer.receive_data(data)
    for event in ours:
        assert isinstance(peer.next_event(), h11.Request)
        body = b""
        while isinstance(piece := peer.next_event(), h11.Data):
            body += piece.data
        assert isinstance(piece, h11.EndOfMessage)
        assert body == event.body
        peer.send(h11.Response(status_code=204, headers=[]))
        peer.send(h11.EndOfMessage())
        if event is not ours[-1]:
            peer.start_next_cycle()
    return len(ours)


def check_websocket(data: bytes, places: Iterable[int]) -> None:
    """Any bytes give events, the same however they are cut, one last event, and at most one close frame, the last."""
    whole = converse([data])
    assert converse(cut(data, places)) == whole
    events, sent, closes = whole
    assert closes
    assert [isinstance(event, CloseReceived | Failed) for event in events] == [False] * (len(events) - 1) + [True]
    closing = [opcode is Opcode.CLOSE for opcode, _ in read_frames(sent)]
    assert not any(closing[:-1])


def check_http_input(data: bytes) -> None:
    """Check one input of the fuzz target: a connection's bytes, of which the first and last also say where to cut."""
    check_http(data, _places(data))
    check_head(data)


def check_websocket_input(data: bytes) -> None:
    """Check one input of the fuzz target: what a client sends after the handshake; cuts as over HTTP."""
    check_websocket(data, _places(data))


def _places(data: bytes) -> tuple[int, ...]:
    if not data:
        return ()
    first, last = data[0], data[-1]
    return tuple(place % len(data) for place in (first, last, first + last))
