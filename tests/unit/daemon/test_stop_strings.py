from __future__ import annotations

from seedance.daemon.detokenizer import table_vocabulary
from seedance.daemon.stop_strings import StopDetokenizer, StopMatcher

TOKENS = [b"a", b"b", b"END", b"\xc3", b"\xa9", b"E", b"N"]


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.feed(text) for text in ("aE", "N", "b", "E")] == ["a", "", "ENb", ""]
    assert (matcher.finish(), matcher.stopped) == ("E", None)


def test_the_text_ends_before_the_stop_string_or_after_it() -> None:
    for include, expected in ((False, "ab"), (True, "abEND")):
        matcher = StopMatcher(["END"], include)
        assert matcher.feed("abE") + matcher.feed("NDxx") + matcher.feed("yy") + matcher.finish() == expected
        assert matcher.stopped == "END"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    matcher = StopMatcher(["abc", "b"])
    assert (matcher.feed("xabc"), matcher.stopped) == ("xa", "b")
    tie = StopMatcher(["bc", "abc"])
    assert (tie.feed("xabc"), tie.stopped) == ("xa", "bc")


def test_tokens_after_the_stop_string_are_surplus() -> None:
    stream = StopDetokenizer(table_vocabulary(TOKENS).detokenizer(), ["END"])
    assert stream.feed([0, 1]) == "ab"
    assert stream.surplus_tokens == 0
    assert stream.feed([5, 2, 0, 1]) == "E"
    assert (stream.stopped, stream.surplus_tokens) == ("END", 2)
    assert stream.finish() == ""


def test_the_first_tokens_are_not_searched() -> None:
    stream = StopDetokenizer(table_vocabulary(TOKENS).detokenizer(), ["END"], min_tokens=2)
    assert stream.feed([2]) + stream.feed([2]) == "ENDEND"
    assert stream.feed([2]) == ""
    assert stream.stopped == "END"


def test_what_comes_at_the_end_may_still_be_a_stop_string() -> None:
    stream = StopDetokenizer(table_vocabulary(TOKENS).detokenizer(), ["\ufffd"])
    assert stream.feed([0, 3]) == "a"
    assert (stream.finish(), stream.stopped) == ("", "\ufffd")


def test_held_text_comes_at_the_end() -> None:
    stream = StopDetokenizer(table_vocabulary(TOKENS).detokenizer(), ["END"])
    assert stream.feed([0, 5, 6]) == "a"
    assert (stream.finish(), stream.stopped) == ("EN", None)
