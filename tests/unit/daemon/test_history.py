"""The last records of a stream."""

from __future__ import annotations

import pytest

from seedance.daemon.history import RECORD_COST_BYTES, History


def filled(records: int, kept: int) -> History:
    """Return a history of records of 10 bytes that has room for `kept` of them."""
    history = History(kept * (10 + RECORD_COST_BYTES))
    for number in range(1, records + 1):
        assert history.append(b"%010d" % number) == number
    return history


def test_nothing_yet() -> None:
    history = History(100)
    assert (history.oldest_seq, history.next_seq, history.held_bytes) == (1, 1, 0)
    assert history.after(0) == []
    assert history.after(1) is None


def test_the_oldest_goes_first() -> None:
    history = filled(5, kept=3)
    assert (history.oldest_seq, history.next_seq, history.held_bytes) == (3, 6, 3 * (10 + RECORD_COST_BYTES))


@pytest.mark.parametrize(
    ("seq", "expected"),
    [(0, None), (1, None), (2, [3, 4, 5]), (3, [4, 5]), (4, [5]), (5, []), (6, None), (-1, None)],
)
def test_what_follows(seq: int, expected: list[int] | None) -> None:
    found = filled(5, kept=3).after(seq)
    assert (None if found is None else [int(each) for each in found]) == expected


def test_the_newest_is_kept_however_long() -> None:
    history = filled(3, kept=3)
    assert history.append(b"x" * 10_000) == 4
    assert (history.oldest_seq, history.after(3)) == (4, [b"x" * 10_000])
    history.append(b"y")
    assert history.after(4) == [b"y"]


def test_what_is_needed_still_is_kept_over_the_bound() -> None:
    history = filled(3, kept=3)
    for number in range(3):
        history.append(b"y" * 10, needed_from=2)
        assert (history.oldest_seq, history.next_seq) == (2, 5 + number)
    history.append(b"y" * 10, needed_from=6)
    assert history.oldest_seq == 5
    history.bound_bytes = 10 + RECORD_COST_BYTES
    history.append(b"y" * 10)
    assert history.oldest_seq == history.next_seq - 1
