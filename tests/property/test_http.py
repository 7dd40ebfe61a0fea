"""HTTP/1.1 under arbitrary cuts, arbitrary bytes, and beside h11 and llhttp."""

from __future__ import annotations

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.http_heads import SLOTS, head, pairs
from support.protocol_drive import SMALL_LIMITS, serve
from support.protocol_invariants import check_bodies, check_head, check_http

from seedance.daemon.protocol.chunked import chunk
from seedance.daemon.protocol.http import HeadReceived, HttpServer, RequestReceived

# No deadline per example: other work on the machine says nothing about the code.
CALM = settings(deadline=None)


def heads() -> st.SearchStrategy[bytes]:
    """Return heads with something unusual in up to four slots."""
    slot = st.sampled_from(list(SLOTS))
    choice = slot.flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(SLOTS[name])))
    return st.lists(choice, max_size=4).map(lambda choices: head(dict(choices)))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Return one right request with a body of any framing."""
    target = draw(st.sampled_from([b"/a", b"/stream", b"/a?b"]))
    close = draw(st.sampled_from([b""] * 4 + [b"Connection: close\r\n", b"Expect: 100-continue\r\n"]))
    line = draw(st.sampled_from([b"POST ", b"GET ", b"HEAD "])) + target + b" HTTP/1.1\r\nHost: a\r\n" + close
    body = draw(st.binary(max_size=40))
    if draw(st.booleans()):
        return line + b"Content-Length: %d\r\n\r\n" % len(body) + body
    size = draw(st.integers(1, 41))
    chunks = b"".join(chunk(body[at : at + size]) for at in range(0, len(body), size))
    extension = draw(st.sampled_from([b"", b";a", b';a="b"']))
    trailer = draw(st.sampled_from([b"", b"X: a\r\n", b"X: a\r\nY:\r\n"]))
    return line + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0" + extension + b"\r\n" + trailer + b"\r\n"


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Return pipelined requests with some bytes replaced, removed or added."""
    data = bytearray(b"".join(draw(st.lists(requests(), min_size=1, max_size=3))))
    bytes_ = st.sampled_from(
        [b"", b"\r", b"\n", b"\r\n", b" ", b"\t", b"\0", b":", b",", b";", b"0", b"f", b"\xff", b"a"]
    )
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 2))] = draw(bytes_)
    return bytes(data)


PLACES = st.lists(st.integers(1, 400), max_size=12)


@CALM
@given(damaged() | heads() | st.binary(max_size=60), PLACES)
@example(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", [15, 16, 17, 25, 26, 27])
def test_any_cut_gives_the_same(data: bytes, places: list[int]) -> None:
    check_http(data, places)


@CALM
@given(damaged())
def test_byte_by_byte_gives_the_same(data: bytes) -> None:
    check_http(data, range(len(data)))


@CALM
@given(st.lists(requests(), min_size=1, max_size=4))
def test_right_requests_are_all_taken(data: list[bytes]) -> None:
    closing = [b"Connection: close" in request.partition(b"\r\n\r\n")[0] for request in data]
    last = closing.index(True) if any(closing) else len(data) - 1
    events, _, closes = serve([b"".join(data)])
    assert [type(event) for event in events] == [HeadReceived, RequestReceived] * (last + 1)
    assert closes


@CALM
@given(heads())
@example(b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n")
@example(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
@example(b"POST http://a/ HTTP/1.1\r\nhost:\r\nContent-Length: 05\r\nX:\xe9\xff\t\r\n\r\n")
def test_heads_mean_the_same_to_others(data: bytes) -> None:
    check_head(data)


def test_heads_unusual_in_any_two_parts_mean_the_same_to_others() -> None:
    taken = sum(check_head(data) is not None for data in pairs())
    assert taken > len(SLOTS)


@CALM
@given(st.lists(requests(), min_size=1, max_size=3))
def test_bodies_are_the_same_to_h11(data: list[bytes]) -> None:
    assert check_bodies(b"".join(data)) > 0


@CALM
@given(damaged())
def test_damaged_bodies_are_the_same_to_h11(data: bytes) -> None:
    check_bodies(data)


def test_the_comparison_can_fail() -> None:
    """h11 takes a bare LF for a line end: one of the reasons why it is a judge here and not the parser."""
    data = b"GET / HTTP/1.1\nHost: a\n\n"
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(data)
    assert isinstance(peer.next_event(), h11.Request)
    assert check_head(data) is None


@CALM
@given(st.lists(requests(), min_size=1, max_size=2), st.data())
def test_rewinding_loses_nothing(data: list[bytes], draw: st.DataObject) -> None:
    """The process that gets the connection sees what this one would have seen."""
    stream = b"".join(data)
    server = HttpServer(SMALL_LIMITS)
    received = 0
    while not server.events_received():
        received += 1
        server.receive_data(stream[received - 1 : received])
    more = draw.draw(st.integers(received, len(stream)))
    server.receive_data(stream[received:more])
    given_back = server.rewind()
    assert given_back == stream[:more]
    assert serve([given_back, stream[more:]]) == serve([stream])


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_a_large_chunked_body_comes_back(size: int) -> None:
    body = bytes(range(256)) * 64
    data = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    data += b"".join(chunk(body[at : at + size]) for at in range(0, len(body), size)) + b"0\r\n\r\n"
    for step in (1000, len(data)):
        server = HttpServer()
        events = []
        for at in range(0, len(data), step):
            server.receive_data(data[at : at + step])
            news = server.events_received()
            events += news
            if news and isinstance(news[0], HeadReceived):
                server.accept_body()
        events += server.events_received()
        assert isinstance(events[1], RequestReceived)
        assert events[1].body == body
