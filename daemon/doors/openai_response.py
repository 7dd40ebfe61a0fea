"""OpenAI's answers: whole bodies, and the server-sent events of a stream.

A stream builder is made once for each choice of a request and holds the constant bytes around the text, so that an
event costs one string escape and one concatenation. Events are whole: `data: …` and the empty line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from seedance.daemon.detokenizer import Vocabulary
from seedance.daemon.doors.errors import ApiError, openai_error_body
from seedance.engine.request import FinishReason, ModelInfo, TokenLogprobs

DONE: Final = b"data: [DONE]\n\n"
# What OpenAI's clients expect where the probability is 0; JSON has no minus infinity.
LEAST_LOGPROB: Final = -9999.0

_encode: Final = msgspec.json.Encoder().encode


class Usage(msgspec.Struct):
    """The tokens of a request; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Choice(msgspec.Struct):
    """One finished text of a request; `logprobs` is what `chat_logprobs` or `completion_logprobs` gave."""

    index: int
    text: str
    finish_reason: FinishReason | str
    logprobs: dict[str, Any] | None = None


class _Stream:
    """What the streams of both kinds share; `_head` and `_tail` are the bytes around a delta's text."""

    __slots__ = ("_envelope", "_head", "_include_usage", "_index", "_tail", "_usage_null")

    def __init__(self, envelope: dict[str, Any], index: int, include_usage: bool) -> None:
        self._envelope = b"data: " + _encode(envelope)[:-1] + b',"choices":['
        self._index = index
        self._include_usage = include_usage
        self._usage_null = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._head, self._tail = b"", b""

    def delta(self, text: str) -> bytes:
        """Return the event for more text."""
        return b"".join((self._head, _encode(text), self._tail))

    def around_text(self) -> tuple[bytes, bytes]:
        """Return what stands before and after the text, as a JSON string, in a delta's data."""
        return self._head.removeprefix(b"data: "), self._tail.removesuffix(b"\n\n")

    def usage(self, usage: Usage) -> bytes:
        """Return the event that tells the usage of the whole request; it has no choice."""
        return self._envelope + b'],"usage":' + _encode(usage.as_json()) + b"}\n\n"

    def finish(self, finish_reason: FinishReason | str) -> bytes:
        """Return the last event of the choice."""
        raise NotImplementedError

    def quota_exceeded(self, usage: Usage, retry_after_s: float) -> bytes:
        """Return the last event of a choice that a quota has ended: with when to come back, and the usage.

        Where the usage has an event of its own, it is not told twice.
        """
        told = _told_of_quota(usage, retry_after_s)
        if self._include_usage:
            told["usage"] = None
        event = self.finish(FinishReason.QUOTA_EXCEEDED).removesuffix(self._usage_null)
        return event + b"]," + _encode(told)[1:] + b"\n\n"

    def _event(self, choice: dict[str, Any]) -> bytes:
        return self._envelope + _encode({"index": self._index, **choice}) + self._usage_null


class ChatStream(_Stream):
    """The events of one choice of a chat completion: `role` first, deltas, `finish`; once a request `usage`, DONE."""

    __slots__ = ()

    def __init__(
        self, response_id: str, model: str, created: int, index: int = 0, *, include_usage: bool = False
    ) -> None:
        super().__init__(_envelope("chat.completion.chunk", response_id, model, created), index, include_usage)
        self._head = self._envelope + b'{"index":%d,"delta":{"content":' % index
        self._tail = b'},"logprobs":null,"finish_reason":null}' + self._usage_null

    def role(self) -> bytes:
        """Return the first event of the choice."""
        return self._event({"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})

    def delta_logprobs(self, text: str, logprobs: dict[str, Any]) -> bytes:
        """Return the event for more text with the log probabilities of its tokens, made by `chat_logprobs`."""
        return self._event({"delta": {"content": text}, "logprobs": logprobs, "finish_reason": None})

    def finish(self, finish_reason: FinishReason | str) -> bytes:
        """Return the last event of the choice."""
        return self._event({"delta": {}, "logprobs": None, "finish_reason": finish_reason})


class CompletionStream(_Stream):
    """The events of one choice of a completion: deltas, `finish`; once a request `usage`, DONE."""

    __slots__ = ()

    def __init__(
        self, response_id: str, model: str, created: int, index: int = 0, *, include_usage: bool = False
    ) -> None:
        super().__init__(_envelope("text_completion", response_id, model, created), index, include_usage)
        self._head = self._envelope + b'{"index":%d,"text":' % index
        self._tail = b',"logprobs":null,"finish_reason":null}' + self._usage_null

    def delta_logprobs(self, text: str, logprobs: dict[str, Any]) -> bytes:
        """Return the event for more text with the log probabilities of its tokens, by `completion_logprobs`."""
        return self._event({"text": text, "logprobs": logprobs, "finish_reason": None})

    def finish(self, finish_reason: FinishReason | str) -> bytes:
        """Return the last event of the choice."""
        return self._event({"text": "", "logprobs": None, "finish_reason": finish_reason})


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a running stream with an error; nothing follows it."""
    return b"data: " + openai_error_body(error) + b"\n\n"


def chat_response(
    response_id: str,
    model: str,
    created: int,
    choices: Iterable[Choice],
    usage: Usage,
    retry_after_s: float | None = None,
) -> bytes:
    """Return the body of a chat completion that was not streamed; `retry_after_s` when a quota has ended it."""
    entries = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }
        for choice in choices
    ]
    return _response(_envelope("chat.completion", response_id, model, created), entries, usage, retry_after_s)


def completion_response(
    response_id: str,
    model: str,
    created: int,
    choices: Iterable[Choice],
    usage: Usage,
    retry_after_s: float | None = None,
) -> bytes:
    """Return the body of a completion that was not streamed; `retry_after_s` when a quota has ended it."""
    entries = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }
        for choice in choices
    ]
    return _response(_envelope("text_completion", response_id, model, created), entries, usage, retry_after_s)


def chat_logprobs(positions: Sequence[TokenLogprobs], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return chat's log probabilities: the chosen token of each position, and the alternatives that were asked for."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = vocabulary.token_bytes(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(data),
        }

    content = []
    for position in positions:
        chosen, *others = map(entry, position.token_ids, position.logprobs)
        content.append({**chosen, "top_logprobs": others})
    return {"content": content, "refusal": None}


def completion_logprobs(
    positions: Sequence[TokenLogprobs], vocabulary: Vocabulary, first_offset: int = 0
) -> dict[str, Any]:
    """Return completions' log probabilities; `first_offset` is the length of the text before, in characters.

    The length of the text of these tokens, which the next call's `first_offset` must add, is that of all `tokens`.
    """
    tokens, offsets, logprobs, tops = [], [], [], []
    offset = first_offset
    for position in positions:
        texts = [vocabulary.token_text(token_id) for token_id in position.token_ids]
        values = [max(value, LEAST_LOGPROB) for value in position.logprobs]
        tokens.append(texts[0])
        logprobs.append(values[0])
        offsets.append(offset)
        offset += len(texts[0])
        # The chosen token is always among them; of equal texts the likelier one stays.
        top: dict[str, float] = {}
        for text, value in zip(texts, values, strict=True):
            top[text] = max(value, top.get(text, LEAST_LOGPROB))
        tops.append(top)
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}


def extend_logprobs(logprobs: dict[str, Any], more: dict[str, Any]) -> None:
    """Append log probabilities to those of the tokens before; both of one of the two kinds."""
    for name, values in more.items():
        if values is not None:  # chat's refusal
            logprobs[name] += values


def models_body(models: Iterable[ModelInfo]) -> bytes:
    """Return the body of `GET /v1/models`."""
    return _encode({"object": "list", "data": [_model(model) for model in models]})


def model_body(model: ModelInfo) -> bytes:
    """Return the body of `GET /v1/models/<name>`."""
    return _encode(_model(model))


def _model(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "seedance",
        "max_model_len": model.max_model_len,
    }


def _envelope(kind: str, response_id: str, model: str, created: int) -> dict[str, Any]:
    return {"id": response_id, "object": kind, "created": created, "model": model}


def _response(
    envelope: dict[str, Any], choices: list[dict[str, Any]], usage: Usage, retry_after_s: float | None
) -> bytes:
    told = {"usage": usage.as_json()} if retry_after_s is None else _told_of_quota(usage, retry_after_s)
    return _encode({**envelope, "choices": choices, **told})


def _told_of_quota(usage: Usage, retry_after_s: float) -> dict[str, Any]:
    return {"usage": usage.as_json(), "retry_after_ms": math.ceil(retry_after_s * 1000)}
