"""The FM door: what frames ask for as requests, and what becomes of them as frames.

A request's `sampling` holds the parameters that the other doors have, by the same names; `logprobs` is the number of
alternatives at each position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from seedance.daemon.detokenizer import Vocabulary
from seedance.daemon.doors import infer
from seedance.daemon.doors.errors import ApiError, invalid
from seedance.daemon.doors.infer import InferRequest
from seedance.daemon.doors.openai_response import LEAST_LOGPROB, Usage
from seedance.daemon.protocol.fm_logprobs import Candidate, encode_scored
from seedance.daemon.protocol.fm_messages import End, Error, Infer
from seedance.daemon.session_log import Absent
from seedance.engine.request import FinishReason, TokenLogprobs

_MESSAGE_CHARACTERS: Final = 512
_encode: Final = msgspec.json.Encoder().encode


def parse(message: Infer) -> InferRequest:
    """Return what an INFER asks for; of a prompt that more of is to come, what there is. Raises ApiError."""
    prompts = [each for each in (message.prompt, message.token_ids, message.messages) if each is not None]
    if message.more and not prompts:
        prompts = [""]
    if len(prompts) != 1:
        raise invalid("cannot serve the request: send one of 'prompt', 'messages' and 'token_ids'", "prompt")
    fields = message.sampling | {
        "id": None,
        "model": message.model or None,
        "prompt": None if message.messages is not None else prompts[0],
        "messages": message.messages,
        "deadline_ms": message.deadline_ms,
        "stream": True,
    }
    return infer.read(_json(fields))


def scored(text: str, positions: Sequence[TokenLogprobs], vocabulary: Vocabulary, most_bytes: int) -> list[bytes]:
    """Return text with log probabilities as the data of frames, each of at most so many bytes. Raises ApiError."""
    found = [
        [
            Candidate(token_id, max(logprob, LEAST_LOGPROB), vocabulary.token_bytes(token_id))
            for token_id, logprob in zip(position.token_ids, position.logprobs, strict=True)
        ]
        for position in positions
    ]
    try:
        return encode_scored(text, found, most_bytes)
    except ValueError as exc:
        raise invalid(str(exc), "logprobs") from exc


def error(error: ApiError, stream: int) -> Error:
    """Return the frame that tells an error of a stream."""
    return Error(
        stream=stream,
        code=error.code,
        message=error.message[:_MESSAGE_CHARACTERS],
        retry_after_ms=_milliseconds(error.retry_after_s),
    )


def absent(absent: Absent) -> Error:
    """Return the frame that tells that there is no such session."""
    if absent.code == "gone":
        message = "cannot go on with this session: it is not kept any more; begin a new one"
    else:
        message = "cannot find this session; begin a new one"
    return Error(stream=0, code=absent.code, message=message, oldest_seq=absent.oldest_seq)


def end(
    stream: int, reason: FinishReason, usage: Usage, slo: dict[str, float], retry_after_s: float | None = None
) -> End:
    """Return the last frame of a stream; `retry_after_s` when a quota has ended it."""
    counts = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    return End(
        stream=stream,
        finish_reason=reason.value,
        usage=counts,
        slo=slo,
        retry_after_ms=_milliseconds(retry_after_s),
    )


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else math.ceil(seconds * 1000)


def _json(fields: dict[str, Any]) -> bytes:
    """Return what came as msgpack as the JSON that the other doors read."""
    try:
        return _encode(fields)
    except (TypeError, ValueError, RecursionError) as exc:
        raise invalid(f"cannot read the request as JSON: {exc}") from exc
