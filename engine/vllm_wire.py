"""What vLLM's EngineCore says and understands on its sockets, without importing vllm: pure, no I/O.

The core connects a DEALER to our ROUTER (requests) and a PUSH to our PULL (one message per engine step). A request is
the frames (identity, type, msgpack); structs travel as arrays in field order, sampling parameters as a map by name.
The layout is vLLM's own affair: ours is that of vLLM 0.32, `vllm_zygote` compares it with the installed one at start.
"""

from __future__ import annotations

import array
from collections.abc import Collection
from typing import Any, Final, NamedTuple

import msgspec

from seedance.engine.vllm_sampling import SamplingParams

ENGINE_IDENTITY: Final = b"\0\0"  # the core's data-parallel rank, two bytes, little-endian
ENGINE_DEAD: Final = b"ENGINE_CORE_DEAD"
ADD: Final = b"\0"
ABORT: Final = b"\1"
UTILITY: Final = b"\3"

FINISH_REASONS: Final = ("stop", "length", "abort", "error", "repetition")  # vLLM's, by number
ERROR_KEY: Final = "seedance.error"
QUOTA_KEY: Final = "seedance.quota"
"""In the trace headers of a request's last output: why it failed, and that its tenant's quota is used up."""

Frames = list[bytes]


class EngineCoreRequest(msgspec.Struct, array_like=True):
    """The first fields of vLLM's struct of the same name; what follows them keeps its default."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: None
    sampling_params: SamplingParams
    pooling_params: None
    arrival_time: float
    lora_request: None
    cache_salt: str | None
    data_parallel_rank: None


class PrefillStats(msgspec.Struct):
    """The one figure of vLLM's struct that we use."""

    num_cached_tokens: int = 0


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """The first fields of vLLM's struct of the same name: one generation's part of a step."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: Any = None
    events: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None


class UtilityOutput(msgspec.Struct, array_like=True):
    """The answer to a utility call; `result` is [type information, value]."""

    call_id: int
    failure_message: str | None = None
    result: Any = None


class EngineCoreOutputs(msgspec.Struct, array_like=True):
    """The first fields of vLLM's struct of the same name: one message of the core."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: Any = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None


class Ready(msgspec.Struct):
    """What the core says of itself, first thing on the request socket (vLLM's `EngineCoreReadyResponse`)."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dtype: str
    vllm_version: str
    max_num_seqs: int
    max_num_batched_tokens: int


class Singles(NamedTuple):
    """The generations that got one token and nothing else in a step, which are nearly all of nearly every step.

    Our scheduler sends them as one output, in a field that vLLM has for others. `pairs` are keys and token ids, of 32
    bits, `serials` of 64, as they are in the generations' names.
    """

    pairs: bytes
    serials: bytes


def pack_singles(singles: Collection[tuple[tuple[int, int], int]]) -> Singles:
    """Pack key and serial number, and token id, of generations."""
    pairs = array.array("I", [number for (key, _), token_id in singles for number in (key, token_id)])
    serials = array.array("Q", [serial for (_, serial), _ in singles])
    return Singles(pairs.tobytes(), serials.tobytes())


def parse_name(name: str) -> tuple[int, int]:
    """Return the key and the serial number of a generation by its name on the wire."""
    key, _, serial = name.partition(".")
    return int(key), int(serial)


def layout_difference(ours: type[msgspec.Struct], theirs: type[msgspec.Struct]) -> str | None:
    """Say how vLLM's struct differs from ours, or None: arrays by position, maps by name and default."""
    mine = {field.name: field for field in msgspec.structs.fields(ours)}
    found = {field.name: field for field in msgspec.structs.fields(theirs)}
    if ours.__struct_config__.array_like:
        expected, actual = list(mine), list(found)[: len(mine)]
        return None if expected == actual else f"{theirs.__name__} begins with {actual} instead of {expected}"
    for name, field in mine.items():
        if name not in found:
            return f"{theirs.__name__} has no field '{name}'"
        default = getattr(found[name].default, "value", found[name].default)
        if default != field.default and field.default is not msgspec.NODEFAULT:
            return f"{theirs.__name__}.{name} defaults to {default!r} instead of {field.default!r}"
    return None
