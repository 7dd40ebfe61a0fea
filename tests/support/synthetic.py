"""What the synthetic engine must give for a prompt, as a client sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seedance.daemon import tokenizer
from seedance.engine.synthetic_stream import expected_token_ids
from seedance.engine.synthetic_vocabulary import decode_bytes, decode_text, encode_text

MODEL = "synthetic"
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or a conversation."""

_TOKENIZER = tokenizer.synthetic()


def prompt_ids(prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt."""
    if isinstance(prompt, str):
        return encode_text(prompt)
    token_ids = [entry for entry in prompt if isinstance(entry, int)]
    messages = [entry for entry in prompt if not isinstance(entry, int)]
    return token_ids or _TOKENIZER.encode_chat(_TOKENIZER.render_chat(messages))


def expected_ids(prompt: Prompt, tokens: int, seed: int = 0) -> list[int]:
    """Return the tokens after a prompt."""
    return expected_token_ids(seed, prompt_ids(prompt), tokens)


def expected_text(prompt: Prompt, tokens: int, seed: int = 0) -> str:
    """Return the text after a prompt."""
    return decode_text(expected_ids(prompt, tokens, seed))


def whole_tokens(prompt: Prompt, at_least: int, seed: int = 0) -> int:
    """Return the least number of tokens, from `at_least` on, whose text ends with a whole character."""
    token_ids = expected_ids(prompt, at_least + 8, seed)
    for count in range(at_least, at_least + 8):
        try:
            decode_bytes(token_ids[:count]).decode()
        except UnicodeDecodeError:
            continue
        return count
    raise AssertionError("no character is that long")
