"""Sessions as columns, beside the frames that one after the other would be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seedance.daemon.decoder_table import Entry
from seedance.daemon.fm_columns import TEXT_BYTES, FmColumns, Frames
from seedance.daemon.protocol.fm_frame import tokens_frame, tokens_prefix
from seedance.daemon.protocol.fm_server import Lent
from seedance.daemon.protocol.frame import frame_binary
from seedance.daemon.ring.frame_store import StoredFrames
from seedance.daemon.stream_columns import ROWS

ENTRIES: list[Entry] = ["", b"\xf0\x9f", "x" * (TEXT_BYTES + 1), *(f"{'é' * (n % 9)}{n}" for n in range(3, 40))]
PLAIN = range(3, len(ENTRIES))
CREDIT = 6
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

    def enter(self, number: int, next_seq: int = 5) -> bool:
        lent = Lent(1, PREFIX, next_seq, next_seq - 1, CREDIT)
        return self.columns.enter(number, 1000 + number, 2000 + number, lent, Owner(self, number))

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
    """A session that takes its row back when it is told to."""

    def __init__(self, bench: Bench, number: int) -> None:
        self._bench, self._number = bench, number

    def take_back(self) -> None:
        self._bench.columns.leave(self._number, PREFIX)
        self._bench.back.append(self._number)

    def fell_behind(self, waiting_bytes: int) -> None:
        raise AssertionError("nothing waits here")


def text(token_id: int) -> bytes:
    entry = ENTRIES[token_id]
    assert isinstance(entry, str)
    return entry.encode()


def framed(seq: int, data: bytes) -> bytes:
    return tokens_frame(seq, PREFIX, data)


STEPS = st.lists(
    st.tuples(
        st.dictionaries(st.integers(1, 12), st.integers(0, len(ENTRIES) + 3), min_size=1),
        st.dictionaries(st.integers(1, 12), st.text(min_size=1, max_size=12)),
        st.integers(1, 12),
        st.integers(0, CREDIT),
    ),
    max_size=25,
)


class Model:
    """One session as a list of its frames."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.acked = self.tokens = self.text_bytes = 0

    def has_room(self) -> bool:
        return len(self.frames) - self.acked < CREDIT

    def add(self, data: bytes) -> bytes:
        self.frames.append(framed(5 + len(self.frames), data))
        self.text_bytes += len(data)
        return self.frames[-1]


def stepped(bench: Bench, models: dict[int, Model], token_ids: dict[int, int], texts: dict[int, str]) -> None:
    """Have a step bring tokens and texts, and compare what is sent and saved."""
    fit = {n: t for n, t in token_ids.items() if n in models and t in PLAIN and models[n].has_room()}
    assert bench.step(token_ids) == {n: t for n, t in token_ids.items() if n not in fit}
    expected = {number: text(token_id) for number, token_id in fit.items()}
    for number in fit:
        models[number].tokens += 1
    for number, more in ((n, t.encode()) for n, t in texts.items() if n in models and n not in fit):
        is_taken = models[number].has_room() and len(more) <= TEXT_BYTES
        assert bench.columns.send_text(number, more) == is_taken
        if is_taken:
            expected[number] = more
    acked = {number: 4 + models[number].acked for number in expected}
    made = {number: models[number].add(data) for number, data in expected.items()}
    assert dict(bench.flush()) == {2000 + number: frame_binary(frame) for number, frame in made.items()}
    saved, bench.saved = bench.saved, []
    assert {(session, seq, frame) for session, seq, _, frame in saved} == {
        (1000 + number, acked[number], frame) for number, frame in made.items()
    }


@given(STEPS)
def test_frames_are_those_that_one_after_the_other_would_be(
    steps: list[tuple[dict[int, int], dict[int, str], int, int]],
) -> None:
    bench = Bench()
    models = {number: Model() for number in range(1, 9)}
    assert all(bench.enter(number) for number in models)
    for token_ids, texts, who, frames in steps:
        stepped(bench, models, token_ids, texts)
        if (model := models.get(who)) is not None:
            can_be = model.acked + frames <= len(model.frames)
            assert bench.columns.acked(who, 4 + model.acked + frames, CREDIT) == can_be
            model.acked += frames if can_be else 0
    for number, model in models.items():
        left = bench.columns.leave(number, PREFIX)
        assert left == (model.frames[model.acked :], model.tokens, model.text_bytes)
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
    left = bench.columns.leave(1, PREFIX)
    assert left.frames == [framed(5, text(7))]
    assert bench.flush() == [(2001, frame_binary(left.frames[0]))]
    assert bench.enter(1, next_seq=6)


def test_what_was_not_sent_is_not_sent_to_the_next_owner_of_a_descriptor() -> None:
    bench = Bench()
    bench.enter(1)
    bench.enter(2)
    bench.step({1: 7, 2: 8})
    bench.columns.leave(1, PREFIX)
    bench.columns.drop(2001)
    assert [fd for fd, _ in bench.flush()] == [2002]


def test_a_row_has_one_session_and_another_vocabulary_sends_all_back() -> None:
    bench = Bench()
    assert bench.enter(5)
    assert not bench.enter(5 + ROWS)
    assert bench.step({5 + ROWS: 7}) == {5 + ROWS: 7}
    bench.columns.use_vocabulary(["a"] * 50)
    assert bench.back == [5]
    assert bench.enter(5)
    assert bench.step({5: 7}) == {}
    assert bench.flush() == [(2005, frame_binary(framed(5, b"a")))]


def test_more_tokens_than_there_were_slots_at_first() -> None:
    bench = Bench()
    bench.columns.use_vocabulary([f"<{number}>" for number in range(700)])
    bench.enter(1)
    for token_id in range(700):
        bench.step({1: token_id})
        assert bench.flush() == [(2001, frame_binary(framed(5 + token_id, b"<%d>" % token_id)))]
        assert bench.columns.acked(1, 5 + token_id, CREDIT)
