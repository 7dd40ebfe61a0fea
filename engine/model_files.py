"""A model's directory, judged before an engine sees it: whole, as its manifest says, and its parts fit together.

`inspect` reads heads, configuration and tokenizer, which takes moments with a model of any size. `verify` then reads
all weights once: it compares them with the manifest, and leaves them in the page cache for the engine that is started
next. Both read through mappings, so that nothing is copied; a file that is cut off meanwhile ends the process that
reads it by SIGBUS, which is why `model_check` is one of its own.

The manifest is what `sha256sum` writes and reads: SHA256SUMS, a line for each file.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from seedance.engine import safetensors
from seedance.engine.model_shapes import ModelConfig, layout, misfit, parse_config
from seedance.engine.safetensors import Tensor
from seedance.errors import ConfigError

MANIFEST: Final = "SHA256SUMS"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
INDEX: Final = "model.safetensors.index.json"
WINDOW_BYTES: Final = 16 << 20
"""So much is asked for, and read, at a time; the window after the one that is read is under way meanwhile."""

_PAGE: Final = mmap.PAGESIZE
_LINE: Final = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")

Progress = Callable[[int, int], None]
"""Told how many bytes have been read, and of how many."""


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's directory holds.

    `weights` are the files with its tensors. `checksums` is what the manifest says of files in the directory, by name;
    empty without one. `tokens_digest` is the same for two models whose token ids mean the same, and empty where no
    tokenizer was asked for. `layout` is the same for two models that differ in the numbers of their tensors alone.
    """

    path: str
    weights: tuple[str, ...]
    weight_bytes: int
    parameters: int
    dtypes: tuple[str, ...]
    config: ModelConfig
    tokens_digest: str
    layout: str
    checksums: Mapping[str, str]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _TokenizerModel(msgspec.Struct):
    vocab: msgspec.Raw


class _TokenizerFile(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[dict[str, Any]] = []
    decoder: Any = None


def inspect(path: Path, *, needs_tokenizer: bool = True, needs_manifest: bool = False) -> ModelFiles:
    """Return what is in a model's directory. Raises ConfigError saying which file, why, and what would be right."""
    if not path.is_dir():
        raise ConfigError(str(path), "", "there is no such directory; give that of a model in the hub's format")
    config = _read_config(path / "config.json")
    checksums = read_manifest(path) if needs_manifest or (path / MANIFEST).exists() else {}
    weights, tensors = _read_weights(path)
    if (reason := misfit(config, tensors)) is not None:
        raise ConfigError(str(path / "config.json"), "", reason)
    files = ModelFiles(
        path=str(path),
        weights=tuple(weights),
        weight_bytes=sum((path / name).stat().st_size for name in weights),
        parameters=sum(tensor.count for tensor in tensors.values()),
        dtypes=tuple(sorted({tensor.dtype for tensor in tensors.values()})),
        config=config,
        tokens_digest=tokens_digest(path) if needs_tokenizer else "",
        layout=_layout(path, tensors),
        checksums=checksums,
    )
    if checksums:
        _require_listed(path, [*weights, "config.json", *(["tokenizer.json"] if needs_tokenizer else [])], checksums)
    return files


def check_weights(path: Path) -> None:
    """Look whether a directory's safetensors files are all there and whole, by their heads; other formats are not seen.

    Raises ConfigError.
    """
    for name in _weight_names(path, _read_index(path / INDEX)):
        read_tensors(path / name)


def verify(files: ModelFiles, progress: Progress) -> None:
    """Read all that counts: compare it with the manifest, where there is one, and leave it in the page cache.

    Raises ConfigError on the first file that differs.
    """
    names = list(files.checksums) if files.checksums else list(files.weights)
    sizes = {name: _size(Path(files.path, name)) for name in names}
    total, done = sum(sizes.values()), 0
    progress(0, total)
    for name in names:
        path, wanted = Path(files.path, name), files.checksums.get(name)
        digest, begun = hashlib.sha256(), done
        for window in _windows(path):
            if wanted is None:
                bytes(window[::_PAGE])  # waits until its pages are there
            else:
                digest.update(window)
            done += len(window)
            progress(done, total)
        if done - begun != sizes[name]:
            raise ConfigError(str(path), "", "it was changed while it was read; load the model when it is all there")
        if wanted is not None and digest.hexdigest() != wanted:
            text = f"it is not the file that {MANIFEST} was made of; fetch the model again, or write a new manifest"
            raise ConfigError(str(path), "", text)


def make_manifest(path: Path, progress: Progress) -> str:
    """Return the manifest of a model's directory as text. Raises ConfigError when a file cannot be read."""
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file() and _is_listed(entry.name))
    sizes = {name: _size(path / name) for name in names}
    total, done, lines = sum(sizes.values()), 0, []
    for name in names:
        digest = hashlib.sha256()
        for window in _windows(path / name):
            digest.update(window)
            done += len(window)
            progress(done, total)
        lines.append(f"{digest.hexdigest()}  {name}\n")
    return "".join(lines)


def _is_listed(name: str) -> bool:
    return name != MANIFEST and not name.startswith(".") and "\n" not in name and "\\" not in name


def read_manifest(path: Path) -> dict[str, str]:
    """Return the checksums of a directory's manifest by file name. Raises ConfigError."""
    manifest = path / MANIFEST
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as exc:
        raise ConfigError(str(manifest), "", "it is not there; `seedancectl model manifest` writes one") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(str(manifest), "", str(exc)) from exc
    checksums = {}
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line)
        name = found[2].removeprefix("./") if found else ""
        if found is None or name.startswith("/") or ".." in Path(name).parts:
            raise ConfigError(str(manifest), "", f"line {number} is none of `sha256sum`'s for a file of this directory")
        checksums[name] = found[1].lower()
    if not checksums:
        raise ConfigError(str(manifest), "", "it is empty; `seedancectl model manifest` writes one")
    return checksums


def tokens_digest(path: Path) -> str:
    """Return a digest of what the token ids of a model mean. Raises ConfigError when its tokenizer cannot be read."""
    file = path / "tokenizer.json"
    try:
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
        vocabulary = msgspec.json.decode(tokenizer.model.vocab)
    except FileNotFoundError as exc:
        raise ConfigError(str(file), "", "it is not there, so no text can be made of tokens") from exc
    except (OSError, msgspec.DecodeError) as exc:
        raise ConfigError(str(file), "", f"it cannot be read ({exc})") from exc
    means = [vocabulary, tokenizer.added_tokens, tokenizer.decoder]
    return hashlib.sha256(msgspec.json.encode(means, order="sorted")).hexdigest()


def _read_config(path: Path) -> ModelConfig:
    try:
        return parse_config(path.read_bytes())
    except FileNotFoundError as exc:
        raise ConfigError(str(path), "", "it is not there, so this is no model that can be loaded") from exc
    except OSError as exc:
        raise ConfigError(str(path), "", exc.strerror or str(exc)) from exc
    except ValueError as exc:
        raise ConfigError(str(path), "", str(exc)) from exc


def _layout(path: Path, tensors: Mapping[str, Tensor]) -> str:
    try:
        tokenizer_config = (path / TOKENIZER_CONFIG).read_bytes() if (path / TOKENIZER_CONFIG).exists() else b""
        return layout((path / "config.json").read_bytes(), tokenizer_config, tensors)
    except (OSError, ValueError) as exc:
        raise ConfigError(str(path / TOKENIZER_CONFIG), "", str(exc)) from exc


def _read_weights(path: Path) -> tuple[list[str], dict[str, Tensor]]:
    """Return the names of the files with weights, and all their tensors by name."""
    index = _read_index(path / INDEX)
    names = _weight_names(path, index)
    if not names:
        raise ConfigError(str(path), "", "it has no *.safetensors; other formats cannot be checked, convert it")
    place: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name in names:
        for tensor_name, tensor in read_tensors(path / name).items():
            if tensor_name in place:
                raise ConfigError(str(path / name), "", f"tensor '{tensor_name}' is in '{place[tensor_name]}' too")
            place[tensor_name], tensors[tensor_name] = name, tensor
    for tensor_name, name in index.items():
        if place.get(tensor_name) != name:
            raise ConfigError(str(path / name), "", f"it lacks tensor '{tensor_name}', which {INDEX} says is in it")
    return names, tensors


def _weight_names(path: Path, index: Mapping[str, str]) -> list[str]:
    return sorted(set(index.values())) if index else sorted(file.name for file in path.glob("*.safetensors"))


def _read_index(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        weight_map = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError) as exc:
        raise ConfigError(str(path), "", f"it cannot be read ({exc})") from exc
    for name in weight_map.values():
        if "/" in name or not name.endswith(".safetensors"):
            raise ConfigError(str(path), "weight_map", f"'{name}' is no safetensors file of this directory")
    return weight_map


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return what a safetensors file says of its tensors. Raises ConfigError when it is not whole."""
    try:
        with _mapped(path) as (data, _):
            length = safetensors.head_bytes(bytes(data[: safetensors.LENGTH_BYTES]), len(data))
            head = bytes(data[safetensors.LENGTH_BYTES : safetensors.LENGTH_BYTES + length])
            return safetensors.parse_head(head, len(data))
    except ValueError as exc:
        raise ConfigError(str(path), "", str(exc)) from exc


def _require_listed(path: Path, names: list[str], checksums: Mapping[str, str]) -> None:
    for name in names:
        if name not in checksums:
            text = f"it does not list '{name}'; `seedancectl model manifest` writes one that is whole"
            raise ConfigError(str(path / MANIFEST), "", text)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as exc:
        raise ConfigError(str(path), "", exc.strerror or str(exc)) from exc


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[tuple[memoryview, mmap.mmap | None]]:
    """Give the bytes of a file. Raises ConfigError when it cannot be read."""
    try:
        with path.open("rb") as file:
            # Zero bytes cannot be mapped.
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if os.fstat(file.fileno()).st_size else None
    except OSError as exc:
        raise ConfigError(str(path), "", exc.strerror or str(exc)) from exc
    with contextlib.ExitStack() as stack:
        if mapped is not None:
            stack.enter_context(mapped)
        yield stack.enter_context(memoryview(mapped if mapped is not None else b"")), mapped


def _windows(path: Path) -> Iterator[memoryview]:
    """Yield a file piece by piece, having asked for the next piece before."""
    with _mapped(path) as (data, mapped):
        if mapped is None:
            return
        for begin in range(0, len(data), WINDOW_BYTES):
            ahead = begin + WINDOW_BYTES
            if not begin:
                mapped.madvise(mmap.MADV_WILLNEED, 0, min(WINDOW_BYTES, len(data)))
            if ahead < len(data):
                mapped.madvise(mmap.MADV_WILLNEED, ahead, min(WINDOW_BYTES, len(data) - ahead))
            with data[begin:ahead] as window:
                yield window
