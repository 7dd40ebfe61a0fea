"""Small model directories for tests: safetensors files, configuration, and a tokenizer of a few words."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, Sequence[int]] = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.mlp.weight": (4, 4),
    "model.layers.1.mlp.weight": (4, 4),
    "lm_head.weight": (8, 4),
}


def head_of(shapes: Mapping[str, Sequence[int]], dtype: str = "F32") -> dict[str, Any]:
    """Return the head of a safetensors file with these tensors, one after the other."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * BYTES[dtype]
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return head


def data_bytes(head: Mapping[str, Any]) -> int:
    return max((entry["data_offsets"][1] for name, entry in head.items() if name != "__metadata__"), default=0)


def file_of(head: Mapping[str, Any], fill: int = 0) -> bytes:
    """Return the safetensors file of a head."""
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + bytes([fill]) * data_bytes(head)


def write_tokenizer(path: Path, words: Sequence[str] = ("a", "b", "c")) -> None:
    vocabulary = {word: number for number, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": words[0]}
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def write_model(
    path: Path,
    *,
    shapes: Mapping[str, Sequence[int]] = SHAPES,
    config: Mapping[str, Any] | None = None,
    words: Sequence[str] = ("a", "b", "c"),
    fill: int = 0,
) -> Path:
    """Write a model that fits together; `config` are keys that differ from CONFIG, None for one that is left out."""
    path.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in {**CONFIG, **(config or {})}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(values))
    (path / "model.safetensors").write_bytes(file_of(head_of(shapes), fill))
    write_tokenizer(path, words)
    return path


def write_manifest(path: Path) -> None:
    """Write what `sha256sum * > SHA256SUMS` would."""
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(path.iterdir())
        if file.name != "SHA256SUMS"
    ]
    (path / "SHA256SUMS").write_text("".join(lines))


def synthetic_model(path: Path, seed: int, **config: Any) -> Path:
    """Write a model of the synthetic engine: its tokens depend on the seed, and its weights on nothing."""
    model_type = {"architectures": None, "model_type": "synthetic", "vocab_size": None, "seed": seed}
    return write_model(path, config={**model_type, **config})
