"""Events in columns, beside what a template makes of each text by itself."""

from __future__ import annotations

import httptools
import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seedance.daemon.event_columns import END_BYTES, HEAD_BYTES, KINDS, EventColumns
from seedance.daemon.protocol.sse import EventTemplate
from seedance.daemon.stream_columns import ROWS

encode = msgspec.json.Encoder().encode
TEXTS = [" the", '"', "\n", "é", "中", "%d", "\\", "x" * (END_BYTES - 40), "x" * END_BYTES]


def made(token_ids: int = len(TEXTS)) -> EventColumns:
    columns = EventColumns()
    columns.use_vocabulary(token_ids)
    return columns


def add(columns: EventColumns, number: int, template: EventTemplate, texts: list[str] = TEXTS) -> bool:
    """Take a stream in whose tokens are all plain and known."""
    if not columns.add_stream(number, 1000 + number, template.before, template.behind):
        return False
    columns.set_plain(number, True)
    for token_id, text in enumerate(texts):
        columns.learn(number, token_id, text)
    return True


def taken(columns: EventColumns, pairs: dict[int, int]) -> tuple[list[tuple[int, bytes]], dict[int, int]]:
    sends, numbers, token_ids = columns.take(
        np.array(list(pairs), np.uint32), np.array(list(pairs.values()), np.uint32)
    )
    left = dict(zip(numbers.tolist(), token_ids.tolist(), strict=True))
    return [] if sends is None else list(sends.frames.to(sends.fds)), left


def read(chunks: bytes) -> bytes:
    """Return the body in HTTP chunks, as another parser reads it."""
    parts: list[bytes] = []

    class Reader:
        def on_body(self, data: bytes) -> None:
            parts.append(data)

    parser = httptools.HttpResponseParser(Reader())
    parser.feed_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    return b"".join(parts)


@given(
    st.dictionaries(st.integers(1, 300), st.tuples(st.integers(0, HEAD_BYTES - 12), st.integers(0, KINDS - 1))),
    st.lists(st.dictionaries(st.integers(1, 300), st.integers(0, len(TEXTS) + 1), min_size=1), max_size=4),
)
def test_frames_are_the_templates(streams: dict[int, tuple[int, int]], steps: list[dict[int, int]]) -> None:
    columns = made()
    templates = {n: EventTemplate(b"h" * length, b"t" * kind) for n, (length, kind) in streams.items()}
    for number, template in templates.items():
        assert add(columns, number, template)
    assert len(columns) == len(streams)
    counts = dict.fromkeys(streams, 0)
    for pairs in steps:
        straight = {n: t for n, t in pairs.items() if n in streams and t < len(TEXTS) - 1}
        frames, left = taken(columns, pairs)
        assert left == {n: t for n, t in pairs.items() if n not in straight}
        assert [fd for fd, _ in frames] == [1000 + n for n in straight]
        for (number, token_id), (_, frame) in zip(straight.items(), frames, strict=True):
            counts[number] += 1
            assert int(frame[:3], 16) == len(frame) - 7
            assert read(frame) == templates[number].event(encode(TEXTS[token_id]))
    assert {number: columns.remove(number) for number in streams} == counts
    assert not len(columns)


def test_who_does_not_fit_stays_outside() -> None:
    columns = made()
    before = HEAD_BYTES - len(b"fff\r\n")
    assert not columns.add_stream(1, 10, b"x" * (before + 1), b"")
    assert columns.add_stream(1, 10, b"x" * before, b"")
    assert not columns.add_stream(1 + ROWS, 11, b"", b""), "its row is taken"
    for kind in range(1, KINDS):
        assert columns.add_stream(1 + kind, 20 + kind, b"", b"%d" % kind)
    assert not columns.add_stream(50, 50, b"", b"one more")
    assert [columns.remove(1 + kind) for kind in range(KINDS)] == [0] * KINDS
    assert columns.add_stream(1 + ROWS, 11, b"", b"")


def test_seats_are_taken_again() -> None:
    columns = made()
    for number in range(1, 1000):
        template = EventTemplate(b"%d" % number, b"")
        assert add(columns, number, template)
        [(_, frame)], _ = taken(columns, {number: 0})
        assert read(frame) == template.event(encode(TEXTS[0]))
        assert columns.remove(number) == 1
    assert len(columns._heads) < 100


def test_another_vocabulary_has_other_texts() -> None:
    columns = made()
    template = EventTemplate(b"<", b">")
    assert add(columns, 7, template)
    [(_, old)], _ = taken(columns, {7: 0})
    columns.use_vocabulary(1)
    assert taken(columns, {7: 0}) == ([], {7: 0})
    columns.learn(7, 0, "new")
    [(_, new)], _ = taken(columns, {7: 0})
    assert (read(old), read(new)) == (template.event(b'" the"'), template.event(b'"new"'))
    assert taken(columns, {7: 1}) == ([], {7: 1}), "it is not in this vocabulary"


def test_more_tokens_than_there_was_room_for() -> None:
    texts = [f" {token_id}" for token_id in range(2000)]
    columns = made(len(texts))
    template = EventTemplate(b"<", b">")
    assert add(columns, 7, template, texts)
    for token_id in (0, 255, 256, 1999):
        [(_, frame)], _ = taken(columns, {7: token_id})
        assert read(frame) == template.event(encode(texts[token_id]))
