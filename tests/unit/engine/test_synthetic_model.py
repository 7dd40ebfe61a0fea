from __future__ import annotations

import json
from pathlib import Path

import pytest

from seedance.engine.settings import EngineSettings, SyntheticSettings
from seedance.engine.synthetic_model import playing, vocab_size_of
from seedance.engine.synthetic_vocabulary import VOCAB_SIZE
from seedance.errors import EngineDead


def model(folder: Path, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_model_gives_its_seed_and_bounds_the_context(tmp_path: Path) -> None:
    directory = model(tmp_path, seed=7, max_position_embeddings=1000)
    settings = EngineSettings(
        kind="synthetic", name="m", model=directory, max_model_len=4096, synthetic=SyntheticSettings(tokens_per_s=3.0)
    )
    played = playing(settings)
    assert (played.max_model_len, played.synthetic.seed, played.synthetic.tokens_per_s) == (1000, 7, 3.0)


def test_a_tokenizer_says_how_many_tokens_there_are(tmp_path: Path) -> None:
    assert vocab_size_of("") == VOCAB_SIZE
    assert vocab_size_of(model(tmp_path, vocab_size=4096)) == 4096


@pytest.mark.parametrize("config", [{"vocab_size": VOCAB_SIZE - 1}, {}])
def test_one_with_fewer_tokens_than_the_engine_makes_is_of_no_use(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(EngineDead, match=f"it needs {VOCAB_SIZE} tokens"):
        vocab_size_of(model(tmp_path, **config))


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineDead, match="cannot use the tokenizer"):
        vocab_size_of(str(tmp_path))
    with pytest.raises(EngineDead, match="cannot play the model"):
        playing(EngineSettings(kind="synthetic", name="m", model=str(tmp_path), max_model_len=10))
