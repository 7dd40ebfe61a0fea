"""The tokenizer of the model that is served, loaded once: by the zygote, so that its forks have it already."""

from __future__ import annotations

import functools

from seedance.daemon import tokenizer
from seedance.daemon.tokenizer import Tokenizer


@functools.lru_cache(maxsize=1)
def tokenizer_in(tokenizer_dir: str) -> Tokenizer:
    """Return a model's tokenizer, or for "" the synthetic one. Raises ValueError or OSError when it cannot be read."""
    return tokenizer.load(tokenizer_dir) if tokenizer_dir else tokenizer.synthetic()
