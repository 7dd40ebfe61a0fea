"""The tokenizer of the model that is served, loaded once: by the zygote, so that its forks have it already."""

from __future__ import annotations

import functools

from seedance.daemon import tokenizer
from seedance.daemon.tokenizer import Tokenizer
from seedance.engine.request import ModelInfo


def tokenizer_of(model: ModelInfo) -> Tokenizer:
    """Return the model's tokenizer. Raises ValueError or OSError when it cannot be read."""
    return _load(model.tokenizer_dir)


@functools.lru_cache(maxsize=1)
def _load(tokenizer_dir: str) -> Tokenizer:
    return tokenizer.load(tokenizer_dir) if tokenizer_dir else tokenizer.synthetic()
