"""What a model's authors sample with: defaults for what a request leaves out, as vLLM's server has them."""

from __future__ import annotations

import pathlib
from typing import Annotated, Final

import msgspec
from msgspec import Meta

_FILE: Final = "generation_config.json"


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of a model; without a file of its own, OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class _File(msgspec.Struct):
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None


def load_sampling_defaults(tokenizer_dir: str) -> SamplingDefaults:
    """Return the defaults that a model directory's `generation_config.json` names.

    Raises ValueError when the file is wrong, OSError when it is there and cannot be read.
    """
    path = pathlib.Path(tokenizer_dir) / _FILE
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return SamplingDefaults()
    except msgspec.DecodeError as exc:
        raise ValueError(f"cannot read '{path}': {exc}") from exc
    named = {name: value for name, value in msgspec.structs.asdict(file).items() if value is not None}
    if "top_k" in named:
        named["top_k"] = max(named["top_k"], 0)
    return SamplingDefaults(**named)
