"""Events read back as the WHATWG algorithm reads them."""

from __future__ import annotations

import pytest

from seedance.daemon.protocol import sse
from seedance.daemon.protocol.chunked import chunk
from seedance.errors import LocalProtocolError


def read(stream: bytes) -> list[tuple[str, str]]:
    """Return (last event id, data) of each event; a plain reading of the standard's parsing rules."""
    events: list[tuple[str, str]] = []
    last_id, data = "", ""
    for line in stream.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line and data:
            events.append((last_id, data.removesuffix("\n")))
            data = ""
        elif name == "data":
            data += value + "\n"
        elif name == "id" and "\0" not in value:
            last_id = value
    return events


def test_writes_events() -> None:
    assert sse.event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert sse.event(b"x", id="s-1:7") == b"id: s-1:7\ndata: x\n\n"
    assert sse.event(b"[DONE]") == sse.DONE


def test_lines_come_back() -> None:
    stream = sse.event(b"a\nb\r\nc\rd", "1") + sse.comment("ping\nevent: x") + sse.event(b" e") + sse.event(b"\nf")
    assert read(stream) == [("1", "a\nb\nc\nd"), ("1", " e"), ("1", "\nf")]


def test_comments_are_no_events() -> None:
    assert sse.comment("ping") == b": ping\n\n"
    assert read(sse.comment("a\n\ndata: b\r\rdata: c")) == []


@pytest.mark.parametrize("id", ["a\n", "\r", "a\0b"])
def test_refuses_ids_that_a_reader_would_ignore(id: str) -> None:
    with pytest.raises(LocalProtocolError):
        sse.event(b"", id)


@pytest.mark.parametrize("text", [b'""', b'"100%"', '"é"'.encode(), b'"' + b"a" * 5000 + b'"'])
def test_template_equals_event_and_chunk(text: bytes) -> None:
    template = sse.EventTemplate(b'{"id":"50%b","delta":', b',"x":"%"}')
    event = sse.event(b'{"id":"50%b","delta":' + text + b',"x":"%"}')
    assert template.event(text) == event
    assert template.chunk(text) == chunk(event)


def test_template_refuses_line_breaks() -> None:
    with pytest.raises(LocalProtocolError):
        sse.EventTemplate(b"{\n", b"}")


def test_a_comment_beside_ids_has_no_empty_line() -> None:
    assert sse.comment_line("ping") == b": ping\n"
    assert sse.comment_line("a\nb") == b": a\n: b\n"


def test_a_ping_is_no_event_and_splits_as_events_do() -> None:
    stream = sse.event(b"a") + sse.PING + sse.event(b"b")
    assert read(stream) == [("", "a"), ("", "b")]
    assert [part for part in stream.split(b"\n\n") if part] == [b"data: a", b"data: b"]


def test_a_time_to_connect_again_is_no_event() -> None:
    line = sse.retry_line(2000)
    assert line == b"retry: 2000\n"
    assert read(sse.comment_line("draining") + line + sse.event(b"x", "1")) == [("1", "x")]
