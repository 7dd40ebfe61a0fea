"""Sessions as columns, beside the frames that one after the other would be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seedance.daemon.decoder_table import Entry
from seedance.daemon.fm_columns import FmColumns, Frames, Member
from seedance.daemon.protocol.fm_frame import tokens_frame, tokens_prefix
from seedance.daemon.protocol.fm_messages import RING_FRAMES
from seedance.daemon.protocol.fm_server import Lent
from seedance.daemon.protocol.frame import frame_binary
from seedance.daemon.ring.frame_store import StoredFrames
from seedance.daemon.stream_columns import ROWS
from seedance.daemon.token_texts import TEXT_BYTES

ENTRIES: list[Entry] = ["", b"\xf0\x9f", "x" * (TEXT_BYTES + 1), *(f"{'é' * (n % 9)}{n}" for n in range(3, 40))]
PLAIN = range(3, len(ENTRIES))
CREDIT = 6
FIRST_SEQ = 5
PREFIX = tokens_prefix(300, 0)


class Bench:
    """Columns whose driver and journal are lists, and the sessions that are in them."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.saved: list[tuple[int, int, int, bytes]] = []
        self.columns = FmColumns(self._send_each)
        self.columns.journal = self._save
        self.columns.use_vocabulary(ENTRIES)
        self.back: list[int] = []

    def enter(self, *numbers: int, next_seq: int = FIRST_SEQ) -> bool:
        """Enter a session with these streams, of which the first is the session's own number here."""
        first = numbers[0]
        lent = Lent({}, next_seq, next_seq - 1, CREDIT)
        members = [Member(number, prefix_of(number, first)) for number in numbers]
        return self.columns.enter(1000 + first, 2000 + first, lent, members, Owner(self, first))

    def step(self, tokens: dict[int, int]) -> dict[int, int]:
        """Have a step bring tokens; returns what is left of them."""
        numbers, token_ids = np.array(list(tokens), np.uint32), np.array(list(tokens.values()), np.uint32)
        taken, numbers, token_ids = self.columns.take(numbers, token_ids)
        assert taken + len(numbers) == len(tokens)
        return dict(zip(numbers.tolist(), token_ids.tolist(), strict=True))

    def flush(self) -> list[tuple[int, bytes]]:
        self.columns.prepare()
        self.columns.flush()
        sent, self.sent = self.sent, []
        return sent

    def _send_each(self, fds: memoryview, frames: StoredFrames) -> list[tuple[int, int]]:
        self.sent += frames.to(fds)
        return []

    def _save(self, frames: Frames) -> None:
        kinds = np.uint32, np.int64, np.int64, np.uint32, np.uint32
        columns = [np.frombuffer(data, kind).tolist() for data, kind in zip(frames[:5], kinds, strict=True)]
        for session, acked_seq, seq, begin, length in zip(*columns, strict=True):
            self.saved.append((session, acked_seq, seq, frames.data[begin : begin + length]))


class Owner:
    """A session that takes its rows back when it is told to."""

    def __init__(self, bench: Bench, number: int) -> None:
        self._bench, self._number = bench, number

    def take_back(self) -> None:
        self._bench.columns.leave(self._number)
        self._bench.back.append(self._number)

    def fell_behind(self, waiting_bytes: int) -> None:
        raise AssertionError("nothing waits here")


def text(token_id: int) -> bytes:
    entry = ENTRIES[token_id]
    assert isinstance(entry, str)
    return entry.encode()


def framed(seq: int, data: bytes) -> bytes:
    return tokens_frame(seq, PREFIX, data)


def prefix_of(number: int, first: int) -> bytes:
    return PREFIX if number == first else tokens_prefix(number, 1)


SESSIONS = ((1,), (2, 3, 9), (4,), (6, 5))
ALL = range(1, 13)
STEPS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(ALL), st.integers(0, len(ENTRIES) + 3), min_size=1),
        st.dictionaries(st.sampled_from(ALL), st.text(min_size=1, max_size=12)),
        st.sampled_from(SESSIONS),
        st.integers(0, CREDIT),
    ),
    max_size=25,
)


class Model:
    """One session as a list of its frames."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers
        self.frames: list[bytes] = []
        self.acked = 0
        self.tokens = dict.fromkeys(numbers, 0)
        self.text_bytes = dict.fromkeys(numbers, 0)

    def has_room(self) -> bool:
        return len(self.frames) + len(self.numbers) <= self.acked + CREDIT

    def add(self, number: int, data: bytes) -> None:
        seq = FIRST_SEQ + len(self.frames)
        self.frames.append(tokens_frame(seq, prefix_of(number, self.numbers[0]), data))
        self.text_bytes[number] += len(data)


def stepped(bench: Bench, models: list[Model], token_ids: dict[int, int], texts: dict[int, str]) -> None:
    """Have a step bring tokens and texts, and compare what is sent and saved."""
    by_number = {number: model for model in models for number in model.numbers}
    before = [len(model.frames) for model in models]
    roomy = {number for number, model in by_number.items() if model.has_room()}
    fit = {n: t for n, t in token_ids.items() if n in roomy and t in PLAIN}
    assert bench.step(token_ids) == {n: t for n, t in token_ids.items() if n not in fit}
    for number, token_id in fit.items():
        by_number[number].tokens[number] += 1
        by_number[number].add(number, text(token_id))
    for number, more in ((n, t.encode()) for n, t in texts.items() if n in by_number and n not in fit):
        is_taken = number in roomy and len(more) <= TEXT_BYTES
        assert bench.columns.send_text(number, more) == is_taken
        if is_taken:
            by_number[number].add(number, more)
    made = {model: model.frames[count:] for model, count in zip(models, before, strict=True) if model.frames[count:]}
    assert dict(bench.flush()) == {2000 + each.numbers[0]: frame_binary(b"".join(made[each])) for each in made}
    saved, bench.saved = bench.saved, []
    assert sorted(saved) == sorted(
        (1000 + model.numbers[0], FIRST_SEQ - 1 + model.acked, FIRST_SEQ + len(model.frames) - left, frame)
        for model, frames in made.items()
        for left, frame in zip(range(len(frames), 0, -1), frames, strict=True)
    )


@given(STEPS)
def test_frames_are_those_that_one_after_the_other_would_be(
    steps: list[tuple[dict[int, int], dict[int, str], tuple[int, ...], int]],
) -> None:
    bench = Bench()
    models = [Model(numbers) for numbers in SESSIONS]
    assert all(bench.enter(*model.numbers) for model in models)
    for token_ids, texts, who, frames in steps:
        stepped(bench, models, token_ids, texts)
        model = models[SESSIONS.index(who)]
        can_be = model.acked + frames <= len(model.frames)
        assert bench.columns.acked(who[0], FIRST_SEQ - 1 + model.acked + frames, CREDIT) == can_be
        model.acked += frames if can_be else 0
    for model in models:
        left = bench.columns.leave(model.numbers[0])
        assert left.frames == model.frames[model.acked :]
        assert left.tokens == list(model.tokens.values())
        assert left.text_bytes == list(model.text_bytes.values())
    assert len(bench.columns) == 0


def test_a_stream_that_is_not_plain_keeps_its_row() -> None:
    bench = Bench()
    bench.enter(1)
    bench.columns.set_plain(1, False)
    assert bench.step({1: 7}) == {1: 7}
    assert bench.columns.send_text(1, "\U0001f600".encode())
    bench.columns.set_plain(1, True)
    assert bench.flush() == [(2001, frame_binary(framed(5, "\U0001f600".encode())))]
    assert bench.step({1: 7}) == {}
    assert bench.flush() == [(2001, frame_binary(framed(6, text(7))))]


def test_who_leaves_has_what_came_sent_first() -> None:
    bench = Bench()
    bench.enter(1)
    bench.step({1: 7})
    left = bench.columns.leave(1)
    assert left.frames == [framed(5, text(7))]
    assert bench.flush() == [(2001, frame_binary(left.frames[0]))]
    assert bench.enter(1, next_seq=6)


def test_what_was_not_sent_is_not_sent_to_the_next_owner_of_a_descriptor() -> None:
    bench = Bench()
    bench.enter(1)
    bench.enter(2)
    bench.step({1: 7, 2: 8})
    bench.columns.leave(1)
    bench.columns.drop(2001)
    assert [fd for fd, _ in bench.flush()] == [2002]


def test_a_row_has_one_stream_and_another_vocabulary_sends_all_back() -> None:
    bench = Bench()
    assert bench.enter(5)
    assert not bench.enter(5 + ROWS)
    assert not bench.enter(6, 5 + ROWS)
    assert not bench.enter(6, 6 + ROWS)
    assert bench.enter(6, 7)
    assert bench.step({5 + ROWS: 7}) == {5 + ROWS: 7}
    bench.columns.use_vocabulary(["a"] * 50)
    assert bench.back == [5, 6]
    assert bench.enter(5)
    assert bench.step({5: 7}) == {}
    assert bench.flush() == [(2005, frame_binary(framed(5, b"a")))]


def test_a_session_without_credit_for_a_token_of_each_stream_goes_another_way() -> None:
    bench = Bench()
    assert bench.enter(*range(1, CREDIT))
    assert bench.step(dict.fromkeys(range(1, CREDIT), 7)) == {}
    assert len(bench.flush()) == 1
    assert bench.step({1: 7}) == {1: 7}
    assert not bench.columns.send_text(2, b"more")
    assert bench.columns.acked(1, FIRST_SEQ + CREDIT - 2, CREDIT)
    assert bench.step({1: 7}) == {}


def test_frames_under_way_outlast_the_ring() -> None:
    bench = Bench()
    bench.enter(1, 2)
    seq = FIRST_SEQ
    for step in range(RING_FRAMES):
        bench.step({1: 3 + step % 30, 2: 4 + step % 30})
        bench.flush()
        assert bench.columns.acked(1, seq, CREDIT)
        seq += 2
    frames = [tokens_frame(seq - 1, tokens_prefix(2, 1), text(4 + (RING_FRAMES - 1) % 30))]
    assert bench.columns.leave(1).frames == frames
