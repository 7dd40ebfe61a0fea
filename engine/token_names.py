"""What the token ids of models mean, by a name each: the same for all with whose ids the same text is meant.

A name is a digest of a tokenizer. A large one takes a second to read: that happens in a process of its own, and once.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from seedance.engine.check_process import tokens_of
from seedance.engine.request import ModelInfo
from seedance.errors import EngineError

log = logging.getLogger("seedance.engine.host")


class TokenNames:
    """The names that are known, by directory and by what was there."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], str] = {}

    async def named(self, model: ModelInfo) -> ModelInfo:
        """Return a model with the name of its tokens; it has one already, or has no tokenizer to look at, or gets it.

        Where the tokenizer cannot be read, the name is that of the directory and no other's.
        """
        if model.tokens or not model.tokenizer_dir:
            return model
        try:
            status = Path(model.tokenizer_dir, "tokenizer.json").stat()
            key = model.tokenizer_dir, status.st_ino, status.st_mtime_ns
            if key not in self._known:
                self._known[key] = await tokens_of(model.tokenizer_dir)
        except (OSError, EngineError) as exc:
            log.warning("cannot tell what the tokens of '%s' mean: %s, ignoring", model.tokenizer_dir, exc)
            return msgspec.structs.replace(model, tokens=model.tokenizer_dir)
        return msgspec.structs.replace(model, tokens=self._known[key])
