from __future__ import annotations

import pytest
from support import tiny_tokenizers

from seedance.daemon.decoder_table import decoder_table
from seedance.daemon.detokenizer import StreamDetokenizer, Vocabulary, hf_vocabulary, table_vocabulary


def byte_ids(*values: int) -> list[int]:
    tokenizer = tiny_tokenizers.byte_fallback()
    return [tiny_tokenizers.id_of(tokenizer, f"<0x{value:02X}>") for value in values]


def llama() -> Vocabulary:
    return hf_vocabulary(tiny_tokenizers.byte_fallback("llama"))


def test_a_character_is_told_once_all_its_bytes_are_here() -> None:
    vocabulary = table_vocabulary([b"a", b"\xf0\x9f", b"\x8c", b"\x8a!"])
    stream = vocabulary.detokenizer()
    assert [stream.feed([token_id]) for token_id in (0, 1, 2, 3, 0)] == ["a", "", "", "🌊!", "a"]
    assert stream.finish() == ""


def test_bytes_left_at_the_end_become_one_replacement_character() -> None:
    stream = table_vocabulary([b"a", b"\xf0\x9f"]).detokenizer()
    assert stream.feed([0, 1]) == "a"
    assert stream.finish() == "\ufffd"


def test_unknown_and_special_ids_have_no_text() -> None:
    vocabulary = table_vocabulary([b"a", b"", b"b"])
    stream = vocabulary.detokenizer()
    assert stream.feed([0, 1, 99, 2]) + stream.feed([99]) + stream.feed([]) == "ab"
    assert (vocabulary.token_bytes(99), vocabulary.token_text(99)) == (b"", "")


def test_the_prompt_keeps_its_own_characters_and_lends_its_bytes() -> None:
    vocabulary = table_vocabulary([b"a", b"\xc3", b"\xa9"])
    assert vocabulary.detokenizer([0, 1, 2]).feed([0]) == "a"
    assert vocabulary.detokenizer([0, 1]).feed([2]) == "é"


def test_only_the_first_space_of_the_whole_text_is_stripped() -> None:
    tokenizer, vocabulary = tiny_tokenizers.byte_fallback("llama"), llama()
    the, special = tiny_tokenizers.id_of(tokenizer, "▁the"), tiny_tokenizers.id_of(tokenizer, "<s>")
    assert [vocabulary.detokenizer().feed([the, the]), vocabulary.detokenizer([special]).feed([the])] == [
        "the the",
        "the",
    ]
    assert vocabulary.detokenizer([special, the]).feed([the]) == " the"


def test_a_byte_run_that_ends_the_prompt_is_not_told_again() -> None:
    stream = llama().detokenizer(byte_ids(0x68, 0x0A))
    tokenizer = tiny_tokenizers.byte_fallback()
    assert stream.feed([tiny_tokenizers.id_of(tokenizer, "▁the")]) == " the"
    assert stream.finish() == ""


def test_a_byte_run_is_judged_as_a_whole() -> None:
    stream = llama().detokenizer()
    er = tiny_tokenizers.id_of(tiny_tokenizers.byte_fallback(), "er")
    assert stream.feed([er, *byte_ids(0xC3, 0xA9, 0xE2)]) == "er"
    assert stream.feed([er]) == "\ufffd" * 3 + "er"


@pytest.mark.parametrize(
    ("tokenizer", "has_table"),
    [
        (tiny_tokenizers.byte_level(), True),
        (tiny_tokenizers.byte_fallback("llama"), True),
        (tiny_tokenizers.byte_fallback("gemma"), True),
        (tiny_tokenizers.metaspace(), True),
        (tiny_tokenizers.word_piece(), False),
    ],
)
def test_a_table_is_used_where_one_can_express_the_decoder(tokenizer, has_table) -> None:  # type: ignore[no-untyped-def]
    vocabulary = hf_vocabulary(tokenizer)
    assert vocabulary.has_table is has_table
    assert isinstance(vocabulary.detokenizer(), StreamDetokenizer) is not has_table
    assert vocabulary.size == tokenizer.get_vocab_size()


def test_a_table_that_disagrees_with_the_library_is_not_used() -> None:
    class Disagreeing:
        """A tokenizer whose decoding is not what its file says, as a later library version might have it."""

        def __init__(self) -> None:
            self.inner = tiny_tokenizers.byte_level()

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return self.inner.decode(ids, skip_special_tokens=skip_special_tokens).upper()

    assert not hf_vocabulary(Disagreeing()).has_table  # type: ignore[arg-type]


def test_a_tokenizer_without_decoder_uses_the_library() -> None:
    tokenizer = tiny_tokenizers.metaspace()
    tokenizer.decoder = None
    vocabulary = hf_vocabulary(tokenizer)
    stream = vocabulary.detokenizer()
    ids = [4, 5, 8]
    assert decoder_table(tokenizer) is None
    assert "".join([stream.feed([token_id]) for token_id in ids]) + stream.finish() == tokenizer.decode(ids)


def test_the_library_s_decoder_flushes_what_it_holds() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    half = tokenizer.encode("🌊", add_special_tokens=False).ids[:1]
    stream = StreamDetokenizer(tokenizer)
    assert stream.feed(half) == ""
    assert stream.finish() == tokenizer.decode(half) != ""


def test_tokens_by_themselves() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    vocabulary = hf_vocabulary(tokenizer)
    space = tiny_tokenizers.id_of(tokenizer, "Ġ")
    assert vocabulary.token_text(space) == " "
    assert vocabulary.token_text(tiny_tokenizers.id_of(tokenizer, "</s>")) == "</s>"
    assert vocabulary.token_bytes(tiny_tokenizers.id_of(tokenizer, "Ã")) == b"\xc3"
    assert vocabulary.token_text(tiny_tokenizers.id_of(tokenizer, "Ã")) == "\ufffd"
    assert vocabulary.token_bytes(tiny_tokenizers.id_of(tokenizer, "<tool é>")) == "<tool é>".encode()
    pieces = hf_vocabulary(tiny_tokenizers.word_piece())
    assert (pieces.token_text(3), pieces.token_text(1)) == ("the", "[CLS]")


def test_the_longest_token() -> None:
    assert table_vocabulary([b"a", b"\xf0\x9f\x8c\x8a\x80", "日本".encode()]).longest_token_bytes() == len(
        "日本".encode()
    )
    assert hf_vocabulary(tiny_tokenizers.word_piece()).longest_token_bytes() == len("stream")
