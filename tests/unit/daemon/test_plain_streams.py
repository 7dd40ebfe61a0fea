"""Streams as columns, beside a table that a reader can follow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from seedance.daemon.plain_streams import FEWEST, ROWS, PlainStreams

TOKENS = 50
SENT = st.dictionaries(st.integers(1, 200), st.integers(0, 2 * TOKENS), min_size=FEWEST, max_size=150)


def columns(pairs: dict[int, int]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    return np.array(list(pairs), np.uint32), np.array(list(pairs.values()), np.uint32)


def made(token_ids: int = TOKENS) -> PlainStreams:
    plain = PlainStreams(lambda text: f"<{text}>".encode())
    plain.use_vocabulary(token_ids)
    return plain


def taken(plain: PlainStreams, pairs: dict[int, int]) -> tuple[list[tuple[int, bytes]], dict[int, int]]:
    sends, numbers, token_ids = plain.take(*columns(pairs))
    left = dict(zip(numbers.tolist(), token_ids.tolist(), strict=True))
    return [] if sends is None else list(sends.frames.to(sends.fds)), left


@given(st.sets(st.integers(1, 200)), st.sets(st.integers(0, TOKENS - 1)), st.lists(SENT, max_size=4))
def test_what_is_known_and_plain_goes_straight(
    known: set[int], tokens: set[int], batches: list[dict[int, int]]
) -> None:
    plain = made()
    for number in known:
        assert plain.add(number, 1000 + number)
        plain.set_plain(number, number % 3 != 0)
    for token_id in tokens:
        plain.learn(token_id, f"text {token_id}")
    counts = dict.fromkeys(known, 0)
    for pairs in batches:
        straight = {n: t for n, t in pairs.items() if n in known and n % 3 and t in tokens}
        for number in straight:
            counts[number] += 1
        expected = [(1000 + n, f"<text {t}>".encode()) for n, t in straight.items()]
        assert taken(plain, pairs) == (expected, {n: t for n, t in pairs.items() if n not in straight})
    assert {number: plain.remove(number) for number in known} == counts


def test_a_row_has_one_stream() -> None:
    plain = made()
    assert plain.add(5, 10)
    assert not plain.add(5 + ROWS, 11)
    plain.set_plain(5, True)
    plain.learn(1, "x")
    others = dict.fromkeys(range(5 + ROWS, 5 + ROWS + FEWEST), 1)
    assert taken(plain, others) == ([], others), "another stream's tokens, on the same row"
    assert plain.remove(5) == 0
    assert plain.add(5 + ROWS, 11)


def test_a_row_begins_anew() -> None:
    plain = made()
    plain.learn(1, "x")
    pairs = dict.fromkeys(range(1, FEWEST + 1), 1)
    for number in pairs:
        plain.add(number, number)
        plain.set_plain(number, True)
    assert len(taken(plain, pairs)[0]) == FEWEST
    assert [plain.remove(number) for number in pairs] == [1] * FEWEST
    assert taken(plain, pairs) == ([], pairs)
    plain.add(1, 7)
    assert plain.remove(1) == 0


def test_another_vocabulary_has_other_frames() -> None:
    plain = made()
    pairs = {number: number % 3 for number in range(1, FEWEST + 1)}
    for number in pairs:
        plain.add(number, number)
        plain.set_plain(number, True)
    for token_id in range(3):
        plain.learn(token_id, "old")
    sends, *_ = plain.take(*columns(pairs))
    plain.use_vocabulary(2)
    assert taken(plain, pairs) == ([], pairs)
    plain.learn(0, "new")
    assert taken(plain, pairs)[0] == [(number, b"<new>") for number in pairs if number % 3 == 0]
    assert sends is not None, "what was taken before stays as it was"
    assert {frame for _, frame in sends.frames.to(sends.fds)} == {b"<old>"}


def test_a_frame_is_made_once() -> None:
    texts: list[str] = []
    plain = PlainStreams(lambda text: texts.append(text) or text.encode())  # type: ignore[func-returns-value]
    plain.use_vocabulary(2)
    plain.learn(1, "x")
    plain.learn(1, "x")
    assert texts == ["x"]
    with pytest.raises(IndexError):
        plain.learn(3, "not in the vocabulary")
