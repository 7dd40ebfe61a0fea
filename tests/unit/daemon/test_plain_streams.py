"""Streams as columns, beside a table that a reader can follow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from numpy.typing import NDArray

from seedance.daemon.plain_streams import PlainStreams
from seedance.daemon.stream_columns import FEWEST, ROWS

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
        plain.learn(0, token_id, f"text {token_id}")
    counts = dict.fromkeys(known, 0)
    for pairs in batches:
        straight = {n: t for n, t in pairs.items() if n in known and n % 3 and t in tokens}
        for number in straight:
            counts[number] += 1
        expected = [(1000 + n, f"<text {t}>".encode()) for n, t in straight.items()]
        assert taken(plain, pairs) == (expected, {n: t for n, t in pairs.items() if n not in straight})
    assert {number: plain.remove(number) for number in known} == counts


NUMBERS = st.integers(1, FEWEST)


class SameStreams(RuleBasedStateMachine):
    """The same streams in step after step, and changes of them in between."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = made()
        self.is_plain: dict[int, bool] = {}
        self.counts: dict[int, int] = {}
        self.known: set[int] = set()
        for number in range(1, FEWEST + 1):
            self.add(number)
            self.set_plain(number, True)
        for token_id in range(1, TOKENS):
            self.learn(token_id)

    @rule(number=NUMBERS)
    def add(self, number: int) -> None:
        assert self.plain.add(number, 1000 + number) == (number not in self.counts)
        self.counts.setdefault(number, 0)

    @rule(number=NUMBERS, is_plain=st.booleans())
    def set_plain(self, number: int, is_plain: bool) -> None:
        if number in self.counts:
            self.plain.set_plain(number, is_plain)
            self.is_plain[number] = is_plain

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        if number in self.counts:
            assert self.plain.remove(number) == self.counts.pop(number)
            self.is_plain.pop(number, None)

    @rule(token_id=st.just(0))
    def learn(self, token_id: int) -> None:
        self.plain.learn(0, token_id, f"text {token_id}")
        self.known.add(token_id)

    @rule(
        first_id=st.integers(1, TOKENS - 1), others=st.dictionaries(NUMBERS, st.sampled_from([0, TOKENS]), max_size=2)
    )
    def step(self, first_id: int, others: dict[int, int]) -> None:
        pairs = {number: 1 + (first_id + number) % (TOKENS - 1) for number in range(1, FEWEST + 1)} | others
        straight = {n: t for n, t in pairs.items() if self.is_plain.get(n) and t in self.known}
        for number in straight:
            self.counts[number] += 1
        expected = [(1000 + n, f"<text {t}>".encode()) for n, t in straight.items()]
        assert taken(self.plain, pairs) == (expected, {n: t for n, t in pairs.items() if n not in straight})

    def teardown(self) -> None:
        assert {number: self.plain.remove(number) for number in self.counts} == self.counts


TestSameStreams = SameStreams.TestCase


def test_a_row_has_one_stream() -> None:
    plain = made()
    assert plain.add(5, 10)
    assert not plain.add(5 + ROWS, 11)
    plain.set_plain(5, True)
    plain.learn(0, 1, "x")
    others = dict.fromkeys(range(5 + ROWS, 5 + ROWS + FEWEST), 1)
    assert taken(plain, others) == ([], others), "another stream's tokens, on the same row"
    assert plain.remove(5) == 0
    assert plain.add(5 + ROWS, 11)


def test_a_row_begins_anew() -> None:
    plain = made()
    plain.learn(0, 1, "x")
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
        plain.learn(0, token_id, "old")
    sends, *_ = plain.take(*columns(pairs))
    plain.use_vocabulary(2)
    assert taken(plain, pairs) == ([], pairs)
    plain.learn(0, 0, "new")
    assert taken(plain, pairs)[0] == [(number, b"<new>") for number in pairs if number % 3 == 0]
    assert sends is not None, "what was taken before stays as it was"
    assert {frame for _, frame in sends.frames.to(sends.fds)} == {b"<old>"}


def test_a_frame_is_made_once() -> None:
    texts: list[str] = []
    plain = PlainStreams(lambda text: texts.append(text) or text.encode())  # type: ignore[func-returns-value]
    plain.use_vocabulary(2)
    plain.learn(0, 1, "x")
    plain.learn(0, 1, "x")
    assert texts == ["x"]
    with pytest.raises(IndexError):
        plain.learn(0, 3, "not in the vocabulary")
