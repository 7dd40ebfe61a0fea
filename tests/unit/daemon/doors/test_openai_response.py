from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from openai.types import CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion

from seedance.daemon.detokenizer import table_vocabulary
from seedance.daemon.doors import openai_response as response
from seedance.daemon.doors.errors import invalid
from seedance.engine.request import FinishReason, ModelInfo, TokenLogprobs

VOCABULARY = table_vocabulary([b"a", b" b", b"\xc3", b"", "é".encode()])
POSITIONS = [
    TokenLogprobs([1, 0, 1], [-0.5, -0.1, -0.5], 2),
    TokenLogprobs([2, 4, 2], [-math.inf, -0.2, -math.inf], 9),
]
USAGE = response.Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2)
NASTY = 'q"\\\n\x00\x7f 東京 🌊 </script> \u2028'


def data(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event[6:-2])


def chunk(event: bytes) -> ChatCompletionChunk:
    return ChatCompletionChunk.model_validate(data(event), strict=True)


def text_chunk(event: bytes) -> Completion:
    # The client's type has no null here, though OpenAI's own server sends it until the last chunk, as we do.
    return Completion.model_validate(
        data(event.replace(b'"finish_reason":null', b'"finish_reason":"stop"')), strict=True
    )


def test_a_chat_stream_as_openai_s_client_reads_it() -> None:
    stream = response.ChatStream("chatcmpl-1", 'm"x', 1700000000, index=1)
    first, middle = chunk(stream.role()), chunk(stream.delta(NASTY))
    last, usage = chunk(stream.finish(FinishReason.LENGTH)), chunk(stream.usage(USAGE))
    assert first.choices[0].delta.role == "assistant"
    assert middle.choices[0].delta.content == NASTY
    assert (middle.id, middle.model, middle.created, middle.choices[0].index) == ("chatcmpl-1", 'm"x', 1700000000, 1)
    assert middle.choices[0].finish_reason is None
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
    assert usage.choices == []
    assert usage.usage is not None
    assert (usage.usage.total_tokens, usage.usage.prompt_tokens_details.cached_tokens) == (7, 2)  # type: ignore[union-attr]


def test_a_completion_stream_as_openai_s_client_reads_it() -> None:
    stream = response.CompletionStream("cmpl-1", "m", 1700000000)
    assert text_chunk(stream.delta(NASTY)).choices[0].text == NASTY
    assert data(stream.delta("x"))["choices"][0]["finish_reason"] is None
    assert text_chunk(stream.finish("stop")).choices[0].finish_reason == "stop"
    assert text_chunk(stream.usage(USAGE)).usage == CompletionUsage.model_validate(USAGE.as_json())


@pytest.mark.parametrize("kind", [response.ChatStream, response.CompletionStream])
def test_fields_are_in_openai_s_order_and_the_fast_path_equals_the_plain_one(kind: Any) -> None:
    stream = kind("x-1", "m", 5, include_usage=True)
    fast, slow = data(stream.delta("hi")), data(stream.finish("stop"))
    assert list(fast) == list(slow) == ["id", "object", "created", "model", "choices", "usage"]
    assert list(fast["choices"][0]) == list(slow["choices"][0])
    assert fast["usage"] is None
    assert "usage" not in data(kind("x-1", "m", 5).delta("hi"))
    assert data(stream.usage(USAGE))["usage"]["completion_tokens"] == 4


def test_a_quota_s_end_keeps_its_word() -> None:
    stream = response.ChatStream("chatcmpl-1", "m", 1)
    assert data(stream.finish(FinishReason.QUOTA_EXCEEDED))["choices"][0]["finish_reason"] == "quota_exceeded"


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("kind", [response.ChatStream, response.CompletionStream])
def test_a_quota_s_end_tells_the_usage_and_when_to_come_back(kind: Any, include_usage: bool) -> None:
    last = data(kind("x-1", "m", 1, include_usage=include_usage).quota_exceeded(USAGE, 1.0004))
    assert last["choices"][0]["finish_reason"] == "quota_exceeded"
    assert (last["usage"], last["retry_after_ms"]) == (None if include_usage else USAGE.as_json(), 1001)
    for respond in (response.chat_response, response.completion_response):
        choice = response.Choice(0, "a", FinishReason.QUOTA_EXCEEDED)
        whole = json.loads(respond("x-1", "m", 1, [choice], USAGE, 2.0))
        assert (whole["usage"], whole["retry_after_ms"]) == (USAGE.as_json(), 2000)


def test_log_probabilities_put_together_equal_those_made_at_once() -> None:
    def completion(positions: Any, offset: int) -> dict[str, Any]:
        return response.completion_logprobs(positions, VOCABULARY, offset)

    chat = response.chat_logprobs(POSITIONS[:1], VOCABULARY)
    response.extend_logprobs(chat, response.chat_logprobs(POSITIONS[1:], VOCABULARY))
    assert chat == response.chat_logprobs(POSITIONS, VOCABULARY)
    text = completion(POSITIONS[:1], 0)
    response.extend_logprobs(text, completion(POSITIONS[1:], len(text["tokens"][0])))
    assert text == completion(POSITIONS, 0)


def test_whole_answers_as_openai_s_client_reads_them() -> None:
    choices = [response.Choice(0, NASTY, FinishReason.STOP), response.Choice(1, "b", "length")]
    body = response.chat_response("chatcmpl-1", "m", 1, choices, USAGE)
    chat = ChatCompletion.model_validate_json(body, strict=True)
    assert [choice.message.content for choice in chat.choices] == [NASTY, "b"]
    assert [choice.finish_reason for choice in chat.choices] == ["stop", "length"]
    assert list(json.loads(body)) == ["id", "object", "created", "model", "choices", "usage"]
    text = Completion.model_validate_json(response.completion_response("cmpl-1", "m", 1, choices, USAGE), strict=True)
    assert [choice.text for choice in text.choices] == [NASTY, "b"]
    assert (text.object, chat.object) == ("text_completion", "chat.completion")


def test_chat_logprobs() -> None:
    logprobs = response.chat_logprobs(POSITIONS, VOCABULARY)
    event = response.ChatStream("chatcmpl-1", "m", 1).delta_logprobs(" b", logprobs)
    content = chunk(event).choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert [(entry.token, entry.logprob, entry.bytes) for entry in content] == [
        (" b", -0.5, [32, 98]),
        ("\ufffd", -9999.0, [0xC3]),
    ]
    assert [top.token for top in content[0].top_logprobs] == ["a", " b"]
    body = response.chat_response("c", "m", 1, [response.Choice(0, "x", "stop", logprobs)], USAGE)
    assert ChatCompletion.model_validate_json(body, strict=True).choices[0].logprobs is not None


def test_completion_logprobs() -> None:
    logprobs = response.completion_logprobs(POSITIONS, VOCABULARY, first_offset=10)
    event = response.CompletionStream("cmpl-1", "m", 1).delta_logprobs(" b", logprobs)
    read = text_chunk(event).choices[0].logprobs
    assert read is not None
    assert (read.tokens, read.text_offset, read.token_logprobs) == ([" b", "\ufffd"], [10, 12], [-0.5, -9999.0])
    assert read.top_logprobs == [{" b": -0.5, "a": -0.1}, {"\ufffd": -9999.0, "é": -0.2}]


def test_an_error_in_a_stream_is_an_event() -> None:
    assert data(response.error_event(invalid("x", "n")))["error"]["param"] == "n"
    assert response.DONE == b"data: [DONE]\n\n"


def test_models() -> None:
    info = ModelInfo(
        name="m",
        tokenizer_dir="",
        max_model_len=99,
        vocab_size=5,
        eos_token_ids=(2,),
        created=1700000000,
        engine="synthetic",
    )
    listed = msgspec.json.decode(response.models_body([info]))
    assert listed["object"] == "list"
    model = Model.model_validate(listed["data"][0], strict=True)
    assert (model.id, model.created, model.object) == ("m", 1700000000, "model")
    assert msgspec.json.decode(response.model_body(info)) == listed["data"][0]
