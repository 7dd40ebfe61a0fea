"""What the synthetic engine, which has no model, takes of a model's directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from seedance.engine.model_shapes import parse_config
from seedance.engine.settings import EngineSettings
from seedance.engine.synthetic_vocabulary import VOCAB_SIZE
from seedance.errors import EngineDead


def playing(settings: EngineSettings) -> EngineSettings:
    """Return the settings with what a model's configuration says: its seed, and its longest context.

    So that one model can take the place of another without any, as a real one does; its weights are not looked at.
    Raises EngineDead.
    """
    path = Path(settings.model, "config.json")
    try:
        config = parse_config(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise EngineDead(f"cannot play the model in '{path}': {exc}") from exc
    limit = min(settings.max_model_len, config.max_positions or settings.max_model_len)
    synthetic = msgspec.structs.replace(settings.synthetic, seed=config.seed)
    return msgspec.structs.replace(settings, max_model_len=limit, synthetic=synthetic)


def vocab_size_of(tokenizer_dir: str) -> int:
    """Return how many tokens a model has, which must be more than the engine makes; by its configuration.

    Raises EngineDead.
    """
    if not tokenizer_dir:
        return VOCAB_SIZE
    path = Path(tokenizer_dir, "config.json")
    try:
        size = parse_config(path.read_bytes()).vocab_size or 0
    except (OSError, ValueError) as exc:
        raise EngineDead(f"cannot use the tokenizer of the model in '{path}': {exc}") from exc
    if size < VOCAB_SIZE:
        raise EngineDead(f"cannot use the tokenizer of the model in '{path}': it needs {VOCAB_SIZE} tokens, not {size}")
    return size
