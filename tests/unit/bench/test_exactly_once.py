from __future__ import annotations

import pytest

from bench.exactly_once import Expected, NotOnce, differences

TEXT = "one two three ü four"


def taken(*pieces: str) -> Expected:
    expected = Expected("a stream", TEXT)
    for piece in pieces:
        expected.advance(piece.encode())
    return expected


def test_a_text_in_pieces_is_whole() -> None:
    taken("one ", "", "two th", "ree ü", " four").end()


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        (("one ", "three "), r"a stream: lost \(4 bytes\) at byte 4: b'three ' came where b'two th' was due"),
        (("one ", "one "), r"doubled \(4 bytes\) at byte 4"),
        (("one two ", "two three "), r"doubled \(4 bytes\) at byte 8"),
        (("one ", "2"), "wrong at byte 4"),
        ((TEXT, "!"), "more than all at byte 21"),
    ],
)
def test_the_first_wrong_byte_is_told(pieces: tuple[str, ...], says: str) -> None:
    with pytest.raises(NotOnce, match=says):
        taken(*pieces)


def test_an_end_that_comes_early_is_a_loss() -> None:
    with pytest.raises(NotOnce, match="lost: it ended at byte 8 of 21"):
        taken("one two ").end()


@pytest.mark.parametrize(
    ("came", "lost", "doubled"),
    [([1, 2, 3, 4], 0, 0), ([1, 2, 4], 1, 0), ([1, 2, 2, 3, 4], 0, 1), ([], 4, 0), ([1, 2, 9, 4, 4], 1, 2)],
)
def test_differences_are_counted(came: list[int], lost: int, doubled: int) -> None:
    assert differences([1, 2, 3, 4], came) == (lost, doubled)
