"""Whether tensors fit a configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.model_dir import CONFIG, SHAPES

from seedance.engine.model_shapes import layout, misfit, parse_config
from seedance.engine.safetensors import Tensor


def judged(config: dict[str, Any], shapes: dict[str, Any] | None = None, dtype: str = "BF16") -> str | None:
    tensors = {
        name: Tensor(dtype, list(shape), (0, 0)) for name, shape in {**SHAPES, **(shapes or {})}.items() if shape
    }
    return misfit(parse_config(json.dumps({**CONFIG, **config}).encode()), tensors)


def test_what_fits() -> None:
    assert judged({}) is None
    assert judged({"tie_word_embeddings": True}, {"lm_head.weight": None}) is None
    assert judged({"tie_word_embeddings": None}, {"lm_head.weight": None}) is None
    assert judged({"vocab_size": None, "hidden_size": None, "num_hidden_layers": None}) is None


@pytest.mark.parametrize(
    ("config", "shapes", "reason"),
    [
        ({"vocab_size": 9}, {}, "'vocab_size' is 9, and tensor 'model.embed_tokens.weight' is made for 8"),
        ({}, {"lm_head.weight": (7, 4)}, "'vocab_size' is 8, and tensor 'lm_head.weight' is made for 7"),
        ({"hidden_size": 5}, {}, "'hidden_size' is 5, and tensor 'model.embed_tokens.weight' is made for 4"),
        ({}, {"lm_head.weight": None}, "'tie_word_embeddings' is false, and there is no output layer"),
        ({"num_hidden_layers": 3}, {}, "'num_hidden_layers' is 3, and there are no weights of layer 2"),
        ({}, {"model.layers.0.mlp.weight": None}, "there are no weights of layer 0"),
        ({"text_config": {"vocab_size": 10}}, {}, "'vocab_size' is 10"),
    ],
)
def test_what_does_not_fit(config: dict[str, Any], shapes: dict[str, Any], reason: str) -> None:
    assert reason in (judged(config, shapes) or "")


def test_what_is_packed_or_named_otherwise_is_not_judged() -> None:
    assert judged({"vocab_size": 9}, dtype="I32") is None
    assert judged({}, {"vision_tower.embed_tokens.weight": (3, 3)}) is None
    assert judged({"word_embed_proj_dim": 4, "hidden_size": 16}) is None


@pytest.mark.parametrize("data", [b"", b"[]", b'{"vocab_size": 0}', b'{"vocab_size": "many"}', b'{"text_config": 1}'])
def test_what_is_no_configuration(data: bytes) -> None:
    with pytest.raises(ValueError, match="it cannot be read"):
        parse_config(data)


def layout_of(
    config: dict[str, Any] | None = None, end: str = "</s>", shapes: dict[str, tuple[int, ...]] | None = None
) -> str:
    tensors = {name: Tensor("BF16", list(shape), (0, 0)) for name, shape in {**SHAPES, **(shapes or {})}.items()}
    tokenizer = {"eos_token": end, "chat_template": "any"}
    return layout(json.dumps({**CONFIG, **(config or {})}).encode(), json.dumps(tokenizer).encode(), tensors)


def test_models_that_differ_in_numbers_alone() -> None:
    assert layout_of() == layout_of({"_name_or_path": "elsewhere", "transformers_version": "9", "seed": 3})
    backwards = dict(reversed({**CONFIG}.items()))
    assert layout(json.dumps(backwards).encode(), b"", {}) == layout(json.dumps(CONFIG).encode(), b"{}", {})


def test_models_that_differ_in_more() -> None:
    others = [
        layout_of({"rope_theta": 5.0}),
        layout_of(end="<|end|>"),
        layout_of(shapes={"lm_head.weight": (4, 8)}),
        layout_of(shapes={"another.weight": (1,)}),
        layout(json.dumps(CONFIG).encode(), b"", {}),
    ]
    assert len({layout_of(), *others}) == len(others) + 1


def test_a_layout_of_what_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        layout(b"{}", b"[]", {})
