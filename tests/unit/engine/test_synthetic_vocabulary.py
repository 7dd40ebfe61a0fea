"""The synthetic vocabulary: texts come back exactly, and some characters are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.engine.synthetic_vocabulary import (
    EOS_ID,
    FOLLOWERS,
    STARTERS,
    TOKEN_BYTES,
    VOCAB_SIZE,
    decode_bytes,
    decode_text,
    encode_text,
    synthetic_token_text,
)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text: str) -> None:
    assert decode_bytes(encode_text(text)) == text.encode()


@pytest.mark.parametrize("text", ["", " the river", "the café", "🌲🌙 水 €", "\x00\xff", " me\n\nyou"])
def test_texts_around_the_words(text: str) -> None:
    assert decode_text(encode_text(text)) == text


def test_words_are_single_tokens_and_bytes_are_their_own() -> None:
    assert len(encode_text(" the water")) == 2
    assert [encode_text(chr(value)) for value in range(128) if chr(value) not in ".,;:?!\n"] == [
        [value] for value in range(128) if chr(value) not in ".,;:?!\n"
    ]


def test_lone_surrogate_becomes_a_question_mark() -> None:
    assert decode_text(encode_text("a\ud800b")) == "a?b"


def test_cut_words_are_whole_only_together() -> None:
    heads = set(STARTERS) & set(FOLLOWERS)
    assert heads
    for head in heads:
        chain = [head]
        while chain[-1] in FOLLOWERS:
            chain.append(FOLLOWERS[chain[-1]])
        assert "\ufffd" in synthetic_token_text(head)
        assert "\ufffd" not in decode_text(chain)


def test_tables_fit_together() -> None:
    assert len(TOKEN_BYTES) == VOCAB_SIZE
    assert TOKEN_BYTES[EOS_ID] == b""
    assert EOS_ID not in STARTERS
    assert max(STARTERS) < VOCAB_SIZE
    assert max(FOLLOWERS.values()) == VOCAB_SIZE - 1
