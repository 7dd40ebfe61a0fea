"""What a generation is asked to do, in the terms that every engine adapter understands."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec


class FinishReason(enum.StrEnum):
    """Why a generation ended; the values are OpenAI's words where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    QUOTA_EXCEEDED = "quota_exceeded"


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one generation, already validated; the names are OpenAI's or else vLLM's.

    Stop *strings* and `n` are the worker's business (it sees text, and submits n generations) and do not appear
    here. `top_k` 0 means off. `logprobs` is the number of alternatives wanted beside the chosen token; None is off.
    `json_schema` holds a schema as JSON text; `json_object` asks for any JSON object; at most one of both.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    json_schema: str | None = None
    json_object: bool = False

    def end_of(self, emitted_token_ids: Sequence[int], room: int, eos_token_ids: Sequence[int]) -> FinishReason | None:
        """Return why a generation with this output has ended, None when it has not; `room` is its context's for output.

        A stop token within the first `min_tokens` is one like others.
        """
        count = len(emitted_token_ids)
        if count > self.min_tokens:
            last = emitted_token_ids[-1]
            if last in self.stop_token_ids or (not self.ignore_eos and last in eos_token_ids):
                return FinishReason.STOP
        return FinishReason.LENGTH if count >= min(self.max_tokens, room) else None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the chosen token first, then the alternatives, best first.

    `token_ids` and `logprobs` have the same length, 1 + the number asked for; `rank` is the chosen token's, from 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker must know of the model to tokenise for it.

    `tokenizer_dir` is a directory with `tokenizer.json` and optionally `tokenizer_config.json` and
    `generation_config.json`; empty for the synthetic engine. `max_model_len` counts prompt and output tokens.
    `eos_token_ids` end a generation unless it ignores them. `created` is in Unix seconds. `tokens` is the same for
    models whose token ids mean the same.
    """

    name: str
    tokenizer_dir: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created: int
    engine: str
    tokens: str = ""


class TenantContext(msgspec.Struct, frozen=True, kw_only=True):
    """Who a channel speaks for: bound by the supervisor when it makes the channel, never read from a message.

    `cache_salt` separates the prefix cache of tenants: an unguessable string per tenant. `row` is the tenant's in the
    ledger, 0 for somebody without limits.
    """

    name: str
    scheduling_class: str
    cache_salt: str
    row: int = 0
    settings: dict[str, Any] = {}


class Urgency(msgspec.Struct, frozen=True, array_like=True):
    """What may let a request go before others, beside its tenant's class.

    `deadline_s`, on CLOCK_MONOTONIC, is when its first token should be out; None for as soon as may be. `rtt_s` and
    `rtt_variance_s` are its client's round trip and how far that usually is off, 0 where they are not known. All have
    bounds, so that a channel carries no number that cannot be put in order.
    """

    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None = None
    rtt_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    rtt_variance_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0


NOT_URGENT: Final = Urgency()
"""A request of which nothing is known."""
