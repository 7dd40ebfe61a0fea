"""For any token ids, cut in any way: the text told equals the library's own, and nothing told is taken back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_tokenizers
from tokenizers import Tokenizer

from seedance.daemon.detokenizer import LONGEST_RUN, Detokenizer, Vocabulary, hf_vocabulary
from seedance.daemon.stop_strings import StopDetokenizer, StopMatcher

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": tiny_tokenizers.byte_level,
    "llama": functools.partial(tiny_tokenizers.byte_fallback, "llama"),
    "gemma": functools.partial(tiny_tokenizers.byte_fallback, "gemma"),
    "metaspace_always": functools.partial(tiny_tokenizers.metaspace, "always"),
    "metaspace_first": functools.partial(tiny_tokenizers.metaspace, "first"),
    "metaspace_never": functools.partial(tiny_tokenizers.metaspace, "never"),
    "word_piece": tiny_tokenizers.word_piece,
}


@functools.cache
def made(kind: str) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = KINDS[kind]()
    return tokenizer, hf_vocabulary(tokenizer)


def token_ids(kind: str, max_size: int) -> st.SearchStrategy[list[int]]:
    # A few ids beyond the vocabulary: engines pad theirs, and decoding skips what it does not know.
    return st.lists(st.integers(0, made(kind)[1].size + 2), max_size=max_size)


def cut(ids: Sequence[int], sizes: list[int]) -> list[Sequence[int]]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(ids[at : at + size])
        at += size
    return [*pieces, ids[at:]]


def told(stream: Detokenizer, pieces: list[Sequence[int]]) -> str:
    return "".join([stream.feed(piece) for piece in pieces]) + stream.finish()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(st.data())
def test_text_equals_decoding_in_one_go(kind: str, data: st.DataObject) -> None:
    tokenizer, vocabulary = made(kind)
    ids = data.draw(token_ids(kind, LONGEST_RUN - 1))
    pieces = cut(ids, data.draw(st.lists(st.integers(0, 5), max_size=40)))
    assert told(vocabulary.detokenizer(), pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(st.data())
def test_text_continues_the_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer, vocabulary = made(kind)
    prompt = data.draw(token_ids(kind, 48))
    # A prompt that ends inside a character, or inside bytes that are none, has no text of its own to continue.
    while prompt and tokenizer.decode(prompt).endswith("\ufffd"):
        prompt.pop()
    whole = tokenizer.decode(prompt)
    ids = data.draw(token_ids(kind, 14))
    if not whole:
        # The bytes of a space have no text at the beginning, and so would not show that new ones made them invalid.
        prompt = [token_id for token_id in prompt if not str(tokenizer.id_to_token(token_id)).startswith("<0x")]
    everything = tokenizer.decode(prompt + ids)
    pieces = cut(ids, data.draw(st.lists(st.integers(0, 3), max_size=14)))
    if everything.startswith(whole):  # else the new tokens made bytes of the prompt invalid, in a decoder's eyes
        assert told(vocabulary.detokenizer(prompt), pieces) == everything[len(whole) :]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12), max_size=30), st.sampled_from(["byte_level", "gemma"]))
def test_never_half_a_character(chunks: list[bytes], kind: str) -> None:
    """Bytes that are UTF-8 in the end never show a replacement character on the way."""
    tokenizer, vocabulary = made(kind)
    text = b"".join(chunks).decode("utf-8", "ignore").replace("\ufffd", "")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = vocabulary.detokenizer()
    parts = [stream.feed([token_id]) for token_id in ids]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) + stream.finish() == tokenizer.decode(ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), min_size=LONGEST_RUN, max_size=3 * LONGEST_RUN))
def test_long_runs_are_told_in_bounded_time(run: list[int]) -> None:
    tokenizer, vocabulary = made("gemma")
    stream = vocabulary.detokenizer()
    ids = [tiny_tokenizers.id_of(tokenizer, f"<0x{value:02X}>") for value in run]
    held, text = 0, ""
    for token_id in ids:
        part = stream.feed([token_id])
        held = 0 if part else held + 1
        assert held < LONGEST_RUN
        text += part
    text += stream.finish()
    try:
        assert text == bytes(run).decode()
    except UnicodeDecodeError:
        assert "\ufffd" in text


def expected_stop(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Take the text a character at a time, as the definition of stop strings says."""
    for end in range(1, len(text) + 1):
        for string in stop:
            if text[:end].endswith(string):
                return text[: end if include else end - len(string)], string
    return text, None


TEXT = st.text("ab\n", max_size=30)


@given(TEXT, st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4), st.booleans(), st.data())
def test_stop_matcher_ends_at_the_first_stop_string(
    text: str, stop: list[str], include: bool, data: st.DataObject
) -> None:
    matcher = StopMatcher(stop, include)
    out, at = "", 0
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        out += matcher.feed(text[at : at + size])
        assert expected_stop(text, tuple(stop), include)[0].startswith(out)  # told text is never taken back
        at += size
    out += matcher.finish()
    expected, stopped = expected_stop(text, tuple(stop), include)
    assert out == expected
    assert (matcher.stopped is None) == (stopped is None)


@settings(deadline=None)
@given(st.lists(st.integers(0, 420), max_size=40), st.data())
def test_stop_detokenizer_does_not_depend_on_the_cuts(ids: list[int], data: st.DataObject) -> None:
    tokenizer, vocabulary = made("byte_level")
    stop = ["e", "th", "\ufffd"]
    stream = StopDetokenizer(vocabulary.detokenizer(), stop)
    text, used = "", 0
    for piece in cut(ids, data.draw(st.lists(st.integers(1, 5), max_size=20))):
        text += stream.feed(piece)
        used += len(piece) - stream.surplus_tokens
        if stream.stopped is not None:
            break
    text += stream.finish()
    assert text == expected_stop(tokenizer.decode(ids), tuple(stop), False)[0]
    if stream.stopped is not None and used:
        before = tokenizer.decode(ids[: used - 1])
        assert expected_stop(before.rstrip("\ufffd"), tuple(stop), False)[1] is None
