"""Whether the tensors of a model fit what its configuration says: embeddings, output layer, number of layers.

An engine finds that out too, after seconds and in words of its own; here it takes no time, and the reason is one line.
What an architecture names otherwise is not judged. And whether two models differ in nothing but numbers: their layout.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec

from seedance.engine.safetensors import Tensor

_NO_LAYOUT: Final = ("_name_or_path", "transformers_version", "seed")
"""Of `config.json`: where a model is from, and by what a model of the synthetic engine differs from others."""
_FLOATS: Final = frozenset(("F16", "BF16", "F32", "F64"))
_EMBEDDING: Final = re.compile(r"(.*\.)?(embed_tokens|wte)\.weight")
_OUTPUT: Final = re.compile(r"((model|language_model|transformer)\.)*(lm_head|embed_out|output)\.weight")
_LAYER: Final = re.compile(r"(?:.*\.)?(?:model|transformer)\.(?:layers|h)\.(\d+)\..*")
# Towers for pictures and sound have embeddings and layers of their own.
_OTHER_TOWER: Final = re.compile(r"vision|visual|audio|image|mtp|draft")

_Count = Annotated[int, msgspec.Meta(gt=0)]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `config.json` says, as far as it is compared; None for what it does not say.

    `ties_embeddings` is None where that is left to the architecture. `seed` is a model's of the synthetic engine.
    """

    architectures: tuple[str, ...] = ()
    model_type: str = ""
    vocab_size: _Count | None = None
    hidden_size: _Count | None = None
    layers: _Count | None = None
    max_positions: _Count | None = None
    ties_embeddings: bool | None = None
    embedding_size: _Count | None = None
    seed: int = 0


class _Text(msgspec.Struct):
    vocab_size: _Count | None = None
    hidden_size: _Count | None = None
    num_hidden_layers: _Count | None = None
    max_position_embeddings: _Count | None = None
    tie_word_embeddings: bool | None = None
    word_embed_proj_dim: _Count | None = None


class _File(_Text):
    architectures: list[str] | None = None
    model_type: str = ""
    text_config: dict[str, Any] | None = None
    seed: int = 0


def parse_config(data: bytes) -> ModelConfig:
    """Return what a `config.json` says. Raises ValueError when it is none."""
    try:
        file = msgspec.json.decode(data, type=_File)
        text = msgspec.convert(file.text_config or {}, _Text)
    except msgspec.DecodeError as exc:
        raise ValueError(f"it cannot be read ({exc})") from exc

    def said(name: str) -> Any:
        inner = getattr(text, name)
        return getattr(file, name) if inner is None else inner

    return ModelConfig(
        architectures=tuple(file.architectures or ()),
        model_type=file.model_type,
        vocab_size=said("vocab_size"),
        hidden_size=said("hidden_size"),
        layers=said("num_hidden_layers"),
        max_positions=said("max_position_embeddings"),
        ties_embeddings=said("tie_word_embeddings"),
        embedding_size=said("word_embed_proj_dim"),
        seed=file.seed,
    )


def layout(config: bytes, tokenizer_config: bytes, tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of all that makes an engine but the numbers in its tensors, and the meaning of its tokens.

    Of the tokenizer's configuration that is the token that ends a text. Raises ValueError when a file cannot be read.
    """
    try:
        means: dict[str, Any] = msgspec.json.decode(config, type=dict[str, Any])
        end = msgspec.json.decode(tokenizer_config or b"{}", type=dict[str, Any]).get("eos_token")
    except msgspec.DecodeError as exc:
        raise ValueError(f"it cannot be read ({exc})") from exc
    for name in _NO_LAYOUT:
        means.pop(name, None)
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return hashlib.sha256(msgspec.json.encode([means, end, shapes], order="sorted")).hexdigest()


def misfit(config: ModelConfig, tensors: Mapping[str, Tensor]) -> str | None:
    """Say what of the configuration the tensors contradict, None when they fit."""
    names = [name for name in tensors if not _OTHER_TOWER.search(name)]
    embeddings = [name for name in names if _EMBEDDING.fullmatch(name)]
    outputs = [name for name in names if _OUTPUT.fullmatch(name)]
    width = config.embedding_size or config.hidden_size
    for name in (*embeddings, *(outputs if embeddings else [])):
        if (reason := _matrix_misfit(name, tensors[name], config.vocab_size, width)) is not None:
            return reason
    if config.ties_embeddings is False and embeddings and not outputs and _is_causal(config):
        return f"'tie_word_embeddings' is false, and there is no output layer beside '{embeddings[0]}'"
    return _layers_misfit(config.layers, names)


def _is_causal(config: ModelConfig) -> bool:
    return any(name.endswith("ForCausalLM") for name in config.architectures)


def _matrix_misfit(name: str, tensor: Tensor, rows: int | None, columns: int | None) -> str | None:
    if tensor.dtype not in _FLOATS or len(tensor.shape) != 2:  # packed by a quantization
        return None
    for key, wanted, there in (("vocab_size", rows, tensor.shape[0]), ("hidden_size", columns, tensor.shape[1])):
        if wanted is not None and wanted != there:
            return f"'{key}' is {wanted}, and tensor '{name}' is made for {there}"
    return None


def _layers_misfit(layers: int | None, names: Iterable[str]) -> str | None:
    numbers = {int(found[1]) for name in names if (found := _LAYER.fullmatch(name)) is not None}
    missing = set(range(layers or 0)) - numbers
    if not numbers or not missing:
        return None
    return f"'num_hidden_layers' is {layers}, and there are no weights of layer {min(missing)}"
