"""A model's directory: what is found in it, and everything for which it is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.model_dir import file_of, head_of, write_manifest, write_model, write_tokenizer

from seedance.engine.model_files import INDEX, MANIFEST, check_weights, inspect, make_manifest, tokens_digest, verify
from seedance.errors import ConfigError


def nobody(done_bytes: int, total_bytes: int) -> None:
    assert 0 <= done_bytes <= total_bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def shards(model: Path) -> None:
    """Make two files and an index of the one with the weights."""
    (model / "model.safetensors").unlink()
    parts = [{"model.embed_tokens.weight": (8, 4), "model.layers.0.mlp.weight": (4, 4)},
             {"model.layers.1.mlp.weight": (4, 4), "lm_head.weight": (8, 4)}]  # fmt: skip
    names = [f"model-{number}.safetensors" for number in range(len(parts))]
    for name, shapes in zip(names, parts, strict=True):
        (model / name).write_bytes(file_of(head_of(shapes)))
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_what_is_found(model: Path) -> None:
    files = inspect(model)
    assert files.weights == ("model.safetensors",)
    assert files.weight_bytes == (model / "model.safetensors").stat().st_size
    assert (files.parameters, files.dtypes) == (8 * 4 * 2 + 4 * 4 * 2, ("F32",))
    assert files.config.vocab_size == 8
    assert not files.checksums


def test_weights_are_looked_at_without_the_rest(model: Path) -> None:
    shards(model)
    (model / "left-over.safetensors").write_bytes(b"half")
    check_weights(model)
    whole = (model / "model-1.safetensors").read_bytes()
    (model / "model-1.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=r"model-1.safetensors': it is cut off: tensor 'lm_head.weight'"):
        check_weights(model)
    (model / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-1.safetensors': No such file"):
        check_weights(model)
    (model / INDEX).unlink()
    for file in model.glob("*.safetensors"):
        file.unlink()
    check_weights(model)  # another format


def test_weights_in_several_files(model: Path) -> None:
    shards(model)
    files = inspect(model)
    assert files.weights == ("model-0.safetensors", "model-1.safetensors")
    assert files.parameters == 96


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (shutil.rmtree, "there is no such directory"),
        (lambda model: (model / "config.json").unlink(), r"config.json': it is not there"),
        (lambda model: (model / "config.json").write_text("{"), r"config.json': it cannot be read"),
        (lambda model: (model / "tokenizer.json").unlink(), r"tokenizer.json': it is not there"),
        (lambda model: (model / "tokenizer.json").write_text("{}"), r"tokenizer.json': it cannot be read"),
        (lambda model: (model / "model.safetensors").unlink(), r"it has no \*\.safetensors"),
        (lambda model: (model / "model.safetensors").write_bytes(b""), r"model.safetensors': it has 0 bytes"),
        (lambda model: (model / "model.safetensors").write_bytes(b"GGUF" * 9), "it is no safetensors file"),
        (lambda model: write_model(model, config={"vocab_size": 9}), r"config.json': 'vocab_size' is 9"),
        (lambda model: (model / MANIFEST).write_text(""), "it is empty"),
        (lambda model: (model / MANIFEST).write_text("x y\n"), "line 1 is none of `sha256sum`'s"),
        (lambda model: (model / MANIFEST).write_text("0" * 64 + "  ../x\n"), "line 1 is none of `sha256sum`'s"),
        (lambda model: (model / MANIFEST).write_text("0" * 64 + "  config.json\n"), "it does not list 'model.safet"),
        (
            lambda model: (model / INDEX).write_text('{"weight_map": {"a": "../a.safetensors"}}'),
            "no safetensors file of",
        ),
        (lambda model: (model / INDEX).write_text('{"weight_map": {"a": "model.safetensors"}}'), "it lacks tensor 'a'"),
        (lambda model: (model / INDEX).write_text('{"weight_map": {"a": "a.safetensors"}}'), "No such file"),
        (lambda model: shutil.copy(model / "model.safetensors", model / "x.safetensors"), "is in 'model.safet.*' too"),
    ],
)
def test_what_is_refused(model: Path, spoil: Callable[[Path], object], reason: str) -> None:
    spoil(model)
    with pytest.raises(ConfigError, match=reason):
        inspect(model)


def test_a_manifest_can_be_asked_for(model: Path) -> None:
    with pytest.raises(ConfigError, match="seedancectl model manifest"):
        inspect(model, needs_manifest=True)
    write_manifest(model)
    assert set(inspect(model, needs_manifest=True).checksums) == {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_bit_of_any_file_counts(model: Path, name: str) -> None:
    write_manifest(model)
    verify(inspect(model), nobody)
    files = inspect(model)
    flip(model / name, at=-1 if name == "model.safetensors" else 1)
    with pytest.raises(ConfigError, match=f"{name}': it is not the file that {MANIFEST} was made of"):
        verify(files, nobody)


def test_without_a_manifest_all_weights_are_read(model: Path) -> None:
    told: list[tuple[int, int]] = []
    files = inspect(model)
    verify(files, lambda *how: told.append(how))
    assert told[0] == (0, files.weight_bytes)
    assert told[-1] == (files.weight_bytes, files.weight_bytes)


def test_a_file_that_is_cut_off_before_it_is_read_is_noticed(model: Path) -> None:
    files = inspect(model)

    def cut_off(done_bytes: int, total_bytes: int) -> None:
        (model / "model.safetensors").write_bytes(b"x")

    with pytest.raises(ConfigError, match="it was changed while it was read"):
        verify(files, cut_off)


def test_the_manifest_is_sha256sums_own(model: Path) -> None:
    (model / ".hidden").write_text("x")
    (model / MANIFEST).write_text(make_manifest(model, nobody))
    done = subprocess.run(["sha256sum", "--check", "--strict", MANIFEST], cwd=model, capture_output=True, check=True)
    assert done.stdout.decode().split() == ["config.json:", "OK", "model.safetensors:", "OK", "tokenizer.json:", "OK"]
    verify(inspect(model, needs_manifest=True), nobody)


def test_tokens_mean_the_same_whatever_else_is_in_the_file(tmp_path: Path) -> None:
    first, second = (write_model(tmp_path / name) for name in ("a", "b"))
    values = json.loads((second / "tokenizer.json").read_text())
    (second / "tokenizer.json").write_text(json.dumps({**values, "truncation": {"max_length": 5}}, indent=1))
    assert tokens_digest(first) == tokens_digest(second)
    write_tokenizer(second, ("b", "a", "c"))
    assert tokens_digest(first) != tokens_digest(second)


def test_a_synthetic_model_needs_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert inspect(model, needs_tokenizer=False).tokens_digest == ""
