"""What may be asked of vLLM, and how it is written: checks and sampling parameters, pure.

Two traps of the EngineCore's sockets, seen in `v1/engine/core.py` of vLLM 0.32. A request that the core cannot decode
kills its input thread, so whatever `SamplingParams` would refuse must be refused here first. And what arrives there has
bypassed vLLM's input processor, so the end-of-sequence ids are set here, as its
`SamplingParams.update_from_generation_config` would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from seedance.engine.request import NOT_URGENT, ModelInfo, Sampling, TenantContext, Urgency
from seedance.errors import EngineError

OUTPUT_KIND_DELTA: Final = 1
URGENCY_KEY: Final = "urgency"
EMITTED_KEY: Final = "emitted"
CLAIM_KEY: Final = "claim"
_MAX_JSON_NESTING: Final = 64  # vLLM's own bound; grammar conversion grows steeply with depth
_RANGES: Final = (
    ("temperature", 0.0, 2.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
_INT64: Final = range(-(1 << 63), 1 << 63)


class StructuredOutputs(msgspec.Struct, omit_defaults=True):
    """vLLM's `StructuredOutputsParams`; `_backend` is what its validation would have chosen."""

    json: str | None = None
    json_object: bool | None = None
    _backend: str | None = None


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """The fields of vLLM's `SamplingParams` that we set; names and defaults are vLLM's, left out when default."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    output_kind: int = 0
    skip_clone: bool = False
    _eos_token_id: int | None = None
    _all_stop_token_ids: list[int] = []
    structured_outputs: StructuredOutputs | None = None
    logit_bias: dict[int, float] | None = None
    extra_args: dict[str, Any] | None = None


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the wire side must know of the model to build and refuse requests.

    `eos_token_id` is the tokenizer's, `generation_eos_ids` are those of generation_config.json; vLLM treats them
    differently. `structured_backend` is None when the engine cannot constrain its output.
    """

    max_model_len: int
    vocab_size: int
    max_logprobs: int
    eos_token_id: int | None
    generation_eos_ids: tuple[int, ...]
    structured_backend: str | None


def model_info(facts: ModelFacts, name: str, model_dir: str, now_s: float) -> ModelInfo:
    """Return what workers must know of a model that is served from now on; `now_s` is wall time."""
    eos_ids = [*([] if facts.eos_token_id is None else [facts.eos_token_id]), *facts.generation_eos_ids]
    return ModelInfo(
        name=name,
        tokenizer_dir=model_dir,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        created=int(now_s),
        engine="vllm",
    )


def check_request(prompt: Sequence[int], sampling: Sampling, facts: ModelFacts, emitted: Sequence[int] = ()) -> None:
    """Raise EngineError for what vLLM would refuse, or what would harm the core: it checks nothing on this path."""
    if not prompt:
        raise invalid_request("cannot generate from an empty prompt: send at least one token")
    length = len(prompt) + len(emitted)
    if length >= facts.max_model_len:
        raise EngineError(
            "context_too_long",
            f"cannot take a prompt of {length} tokens: the model's context is {facts.max_model_len} tokens "
            "and one of them must be left for the output",
        )
    _check_token_ids("prompt", prompt, facts)
    _check_token_ids("emitted_token_ids", emitted, facts)
    _check_token_ids("stop_token_ids", sampling.stop_token_ids, facts)
    for name, ok, right in _rules(sampling, facts):
        if not ok:
            raise invalid_request(f"cannot use {name} {getattr(sampling, name)!r}: it must be {right}")
    if sampling.logit_bias:
        _check_token_ids("logit_bias", list(sampling.logit_bias), facts)
        if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
            raise invalid_request("cannot use logit_bias: every bias must be a finite number")
    _check_structure(sampling, facts)


def _rules(sampling: Sampling, facts: ModelFacts) -> list[tuple[str, bool, str]]:
    """Return (field, whether it holds, what would be right), after `SamplingParams._verify_args` and `verify`."""
    s = sampling
    ranges = [(name, low <= getattr(s, name) <= high, f"between {low:g} and {high:g}") for name, low, high in _RANGES]
    return [
        *ranges,
        ("max_tokens", s.max_tokens >= 1, "at least 1"),
        ("min_tokens", 0 <= s.min_tokens <= s.max_tokens, f"between 0 and max_tokens ({s.max_tokens})"),
        ("top_p", 0.0 < s.top_p <= 1.0, "over 0 and at most 1"),
        ("top_k", -1 <= s.top_k < 1 << 31, "0 for off, or at least 1"),
        ("repetition_penalty", 0.0 < s.repetition_penalty < math.inf, "a finite number over 0"),
        ("seed", s.seed is None or s.seed in _INT64, "a 64-bit integer"),
        (
            "logprobs",
            s.logprobs is None or 0 <= s.logprobs <= facts.max_logprobs,
            f"between 0 and {facts.max_logprobs}",
        ),
    ]


def _check_token_ids(name: str, token_ids: Sequence[int], facts: ModelFacts) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < facts.vocab_size):
        raise invalid_request(f"cannot use {name}: token ids must be between 0 and {facts.vocab_size - 1}")


def _check_structure(sampling: Sampling, facts: ModelFacts) -> None:
    if sampling.json_schema is None and not sampling.json_object:
        return
    if facts.structured_backend is None:
        raise invalid_request("cannot constrain the output: this engine has no structured output")
    if sampling.json_schema is None:
        return
    if sampling.json_object:
        raise invalid_request("cannot use json_schema and json_object together: choose one")
    try:
        schema = msgspec.json.decode(sampling.json_schema)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise invalid_request(f"cannot use json_schema: it is not JSON ({exc})") from exc
    if not isinstance(schema, dict | bool):
        raise invalid_request("cannot use json_schema: a schema is a JSON object")
    if _nesting(schema) > _MAX_JSON_NESTING:
        raise invalid_request(f"cannot use json_schema: it may nest at most {_MAX_JSON_NESTING} deep")


def _nesting(value: Any) -> int:
    depth, level = 0, [value]
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return depth


def invalid_request(message: str) -> EngineError:
    """Return the error of a request that is wrong in itself."""
    return EngineError("invalid_request", message)


def sampling_params(
    sampling: Sampling,
    tenant: TenantContext,
    facts: ModelFacts,
    urgency: Urgency = NOT_URGENT,
    emitted: Sequence[int] = (),
    claim: str = "",
) -> SamplingParams:
    """Return vLLM's parameters for a checked `sampling`.

    Tenant and urgency go along for the scheduler, what was emitted elsewhere for `vllm_continue`, and the claim for
    `survivors`.
    """
    s = sampling
    stop_ids = list(dict.fromkeys(s.stop_token_ids))
    eos_ids = [] if facts.eos_token_id is None else [facts.eos_token_id]
    further_eos_ids = [token_id for token_id in facts.generation_eos_ids if token_id not in eos_ids]
    all_stop_ids = list(dict.fromkeys((*stop_ids, *eos_ids, *further_eos_ids)))
    if not s.ignore_eos:
        stop_ids = list(dict.fromkeys((*further_eos_ids, *stop_ids)))
    structured = None
    if s.json_schema is not None or s.json_object:
        structured = StructuredOutputs(s.json_schema, s.json_object or None, facts.structured_backend)
    bias = s.logit_bias and {token_id: min(100.0, max(-100.0, value)) for token_id, value in s.logit_bias.items()}
    extra_args: dict[str, Any] = {"row": tenant.row}
    extra_args[URGENCY_KEY] = [urgency.deadline_s, urgency.rtt_s, urgency.rtt_variance_s]
    if emitted:
        extra_args[EMITTED_KEY] = list(emitted)
    if claim:
        extra_args[CLAIM_KEY] = claim
    return SamplingParams(
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=max(s.top_k, 0),
        min_p=s.min_p,
        seed=s.seed,
        stop_token_ids=stop_ids or None,
        ignore_eos=s.ignore_eos,
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        logprobs=s.logprobs,
        detokenize=False,
        output_kind=OUTPUT_KIND_DELTA,
        skip_clone=True,
        _eos_token_id=None if s.ignore_eos else facts.eos_token_id,
        _all_stop_token_ids=all_stop_ids,
        structured_outputs=structured,
        logit_bias=bias or None,
        extra_args=extra_args,
    )
