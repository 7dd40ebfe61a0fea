"""Tiny tokenizers of each kind that models have, made in memory."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SAMPLE_TEXT = (
    "The gateway finds the tenant, the worker frames the stream. Größe, naïveté, привет, 東京 and 🌊 take more bytes.\n"
    "def feed(self, token_ids):\n    return ''.join(self.entries)\n"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def byte_level() -> Tokenizer:
    """Return a byte-level BPE tokenizer, with special tokens, and added ones that are none."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE_TEXT] * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool é>"), AddedToken("\u00ad"), AddedToken("plain")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def byte_fallback(decoder: str = "llama") -> Tokenizer:
    """Return a sentencepiece-like tokenizer; the decoder is that of `llama` (strips one space), or of `gemma`."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words = ["▁", "▁▁", "▁▁▁", "▁the", "▁stream", "er", "s", "é", "東", "京", "<0xZZ>", "<0x4", "▁a▁b"]
    for token in [*(f"<0x{value:02X}>" for value in range(256)), *words]:
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if decoder == "llama":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool x>")])
    return tokenizer


def metaspace(prepend_scheme: str = "always") -> Tokenizer:
    """Return a tokenizer with the Metaspace decoder."""
    words = ["<unk>", "<s>", "▁", "▁▁", "▁the", "▁stream", "er", "s", "é", "▁東", "a▁b", "."]
    tokenizer = Tokenizer(models.WordLevel(vocab={word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.add_tokens([AddedToken("<tool x>")])
    return tokenizer


def word_piece() -> Tokenizer:
    """Return a WordPiece tokenizer, whose decoder no table can express."""
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "stream", "##er", "##s", "do", "n't", ".", ",", "'", "é", "東"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that the tokenizer has."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def write_model(
    directory: pathlib.Path,
    tokenizer: Tokenizer | None = None,
    config: dict[str, Any] | None = None,
    jinja: str | None = None,
) -> str:
    """Write a tokenizer's files as a model directory has them; return the directory as text."""
    (tokenizer or byte_level()).save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (directory / "chat_template.jinja").write_text(jinja)
    return str(directory)
