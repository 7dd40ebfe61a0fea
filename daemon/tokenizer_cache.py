"""The tokenizers of the models that are served, loaded once: by the zygote, so that its forks have them already.

What is kept goes by the files' content: a new version of a model mostly has the tokenizer of the last one, and then
nothing is loaded. There are two models while one takes the place of another.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from seedance.daemon import tokenizer
from seedance.daemon.tokenizer import Tokenizer

_KEPT: Final = 2
_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

_Stamp = tuple[str, tuple[tuple[int, int, int] | None, ...]]

_tokenizers: Final[dict[str, Tokenizer]] = {}
_digests: Final[dict[_Stamp, str]] = {}


def tokenizer_in(tokenizer_dir: str) -> Tokenizer:
    """Return a model's tokenizer, or for "" the synthetic one. Raises ValueError or OSError when it cannot be read."""
    digest = _digest(tokenizer_dir)
    found = _tokenizers.pop(digest, None)
    if found is None:
        found = tokenizer.load(tokenizer_dir) if tokenizer_dir else tokenizer.synthetic()
    _tokenizers[digest] = found  # the last one used is the last one
    while len(_tokenizers) > _KEPT:
        del _tokenizers[next(iter(_tokenizers))]
    return found


def _digest(tokenizer_dir: str) -> str:
    """Return a digest of the files that make a tokenizer; they are read again only when they have changed."""
    if not tokenizer_dir:
        return ""
    folder = Path(tokenizer_dir)
    stamp = tokenizer_dir, tuple(_stamp(folder / name) for name in _FILES)
    found = _digests.get(stamp)
    if found is None:
        parts = (hashlib.sha256(_content(folder / name)).digest() for name in _FILES)
        found = hashlib.sha256(b"".join(parts)).hexdigest()
        while len(_digests) >= _KEPT:
            del _digests[next(iter(_digests))]
        _digests[stamp] = found
    return found


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
