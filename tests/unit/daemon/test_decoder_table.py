from __future__ import annotations

import pytest
from support import tiny_tokenizers
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from seedance.daemon.decoder_table import decoder_table


def test_every_byte_has_its_stand_in() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    table = decoder_table(tokenizer)
    assert table is not None
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    entries = [table.entries[tiny_tokenizers.id_of(tokenizer, character)] for character in alphabet]
    data = [entry if isinstance(entry, bytes) else entry.encode() for entry in entries]
    assert sorted(data) == [bytes([value]) for value in range(256)]


@pytest.mark.parametrize("token", ["a b", "tab\t", "Ġa b", "é\u00adx", "<é>", "Ġ\n"])
def test_a_token_outside_the_alphabet_stands_for_itself(token: str) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    table = decoder_table(tokenizer)
    assert table is not None
    expected = tokenizer.decoder.decode([token])
    entry = table.convert(token)
    assert (entry if isinstance(entry, str) else entry.decode("utf-8", "replace")) == expected


def test_special_tokens_have_no_text() -> None:
    tokenizer = tiny_tokenizers.byte_fallback()
    table = decoder_table(tokenizer)
    assert table is not None
    assert [table.entries[token_id] for token_id in (0, 1, 2)] == ["", "", ""]
    assert table.entries[tiny_tokenizers.id_of(tokenizer, "<tool x>")] == "<tool x>"


def with_decoder(decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = tiny_tokenizers.byte_fallback()
    tokenizer.decoder = decoder
    return tokenizer


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")]),
        decoders.Sequence([]),
    ],
)
def test_what_no_table_can_express_gives_none(decoder: decoders.Decoder) -> None:
    assert decoder_table(with_decoder(decoder)) is None


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Fuse(),
        decoders.Replace("▁", " "),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", "_"), decoders.Replace("_", " "), decoders.ByteFallback()]),
        decoders.Sequence([decoders.ByteLevel()]),
        decoders.Sequence([decoders.Metaspace()]),
    ],
)
def test_what_a_table_can_express_gives_one(decoder: decoders.Decoder) -> None:
    assert decoder_table(with_decoder(decoder)) is not None
