from __future__ import annotations

from typing import Any

import msgspec
import pytest

from seedance.daemon.doors import openai_request
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.doors.openai_request import (
    MAX_PROMPTS,
    ChatRequest,
    check_prompt_ids,
    parse_chat,
    parse_completion,
)

USER = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(msgspec.json.encode({"model": "m", "messages": USER, **fields}))


def completion(**fields: Any) -> openai_request.CompletionRequest:
    return parse_completion(msgspec.json.encode({"model": "m", "prompt": "Hi", **fields}))


def refused(parse: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.code == "invalid_request"
    assert caught.value.message.startswith("cannot ")
    return caught.value


def test_a_plain_chat_request() -> None:
    request = chat()
    assert (request.model, request.stream, request.choices(), request.stop_strings()) == ("m", None, 1, ())
    assert request.template_messages() == USER
    assert (request.wanted_max_tokens(), request.wanted_logprobs()) == (None, None)
    assert request.template_variables() == {}


def test_all_that_is_supported_at_once() -> None:
    request = chat(
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=5,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.1,
        seed=-3,
        stop=["a", "b"],
        stop_token_ids=[1],
        ignore_eos=True,
        min_tokens=9,
        logit_bias={"17": -100},
        logprobs=True,
        top_logprobs=5,
        n=2,
        response_format={"type": "json_object"},
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="none",
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
    )
    assert request.include_usage()
    assert (request.wanted_max_tokens(), request.wanted_logprobs(), request.choices()) == (9, 5, 2)
    assert request.stop_strings() == ("a", "b")
    assert request.logit_bias == {17: -100}
    assert request.template_variables() == {"enable_thinking": False, "reasoning_effort": "low"}


def test_what_changes_nothing_is_ignored() -> None:
    harmless = {
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "no_such_field": [1],
        "modalities": ["text"],
        "functions": [],
        "best_of": 1,
        "tools": [],
    }
    assert chat(**harmless, temperature=None, stop=None).temperature is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("continue_final_message", True),
        ("chat_template", "x"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}),
        ("best_of", 2),
        ("use_beam_search", True),
        ("guided_regex", "a"),
        ("structured_outputs", {"choice": ["a"]}),
        ("bad_words", ["x"]),
        ("skip_special_tokens", False),
        ("prompt_logprobs", 1),
        ("truncate_prompt_tokens", 3),
        ("best_of", True),
    ],
)
def test_what_would_change_the_text_and_is_not_served_is_refused(field: str, value: Any) -> None:
    assert refused(chat, **{field: value}).param == field


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("model", 1, "expected `str`"),
        ("messages", "Hi", "expected `array`"),
        ("messages", [], "length >= 1"),
        ("stream", "yes", "`bool"),
        ("stream_options", True, "`object"),
        ("max_tokens", 0, ">= 1"),
        ("max_tokens", "9", "`int"),
        ("max_tokens", 1.5, "`int"),
        ("max_completion_tokens", -1, ">= 1"),
        ("temperature", 2.1, "<= 2"),
        ("temperature", "hot", "`float"),
        ("top_p", 0, "> 0"),
        ("top_p", 1.1, "<= 1"),
        ("top_k", -2, ">= -1"),
        ("min_p", 1.1, "<= 1"),
        ("presence_penalty", -2.1, ">= -2"),
        ("frequency_penalty", 2.1, "<= 2"),
        ("repetition_penalty", 0, "> 0"),
        ("seed", 2**63, "<="),
        ("seed", 1.5, "`int"),
        ("stop", "", "length >= 1"),
        ("stop", ["a"] * 17, "length <= 16"),
        ("stop_token_ids", [-1], ">= 0"),
        ("ignore_eos", 1, "`bool"),
        ("min_tokens", -1, ">= 0"),
        ("logit_bias", {"x": 1}, "`int`"),
        ("logit_bias", {"1": 101}, "<= 100"),
        ("logprobs", 3, "`bool"),
        ("top_logprobs", 21, "<= 20"),
        ("n", 0, ">= 1"),
        ("n", 17, "<= 16"),
        ("response_format", {"type": "xml"}, "xml"),
        ("response_format", {"type": "json_schema"}, "missing"),
        ("chat_template_kwargs", [], "`object"),
    ],
)
def test_wrong_types_and_ranges_name_the_field_and_what_is_right(field: str, value: Any, right: str) -> None:
    error = refused(chat, **{field: value})
    assert error.param is not None
    assert error.param.startswith(field)
    assert right in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 2, "temperature": 0}, "n"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields).param == param


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "expected `object`"),
        (b"null", "expected `object`"),
        (b'{"model":"\xff"}', "UTF-8"),
        (b'{"model":"m","temperature":NaN}', "JSON"),
        (b'{"model":"m","x":' + b"[" * 200_000, "nested too deeply"),
        (b'{"model":"m"}', "'messages' is missing"),
        (b'{"messages":[{"role":"user","content":"x"}]}', "'model' is missing"),
        (b'{"model":"m","temperature":1e999,"messages":[]}', "temperature"),
    ],
)
def test_bodies_that_are_no_request(body: bytes, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert (caught.value.code, caught.value.status) == ("invalid_request", 400)
    assert says in caught.value.message


def test_text_parts_are_joined() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": content}]).template_messages() == [
        {"role": "user", "content": "a\nb"}
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user", "content": 7}, "messages[1].content"),
        ("Hi", "messages[1]"),
    ],
)
def test_messages_that_cannot_be_served_are_named(message: Any, param: str) -> None:
    assert refused(chat, messages=[*USER, message]).param == param


def test_earlier_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "developer", "content": "Be brief.", "name": "dev"},
    ]
    assert chat(messages=messages).template_messages()[1:] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "system", "content": "Be brief.", "name": "dev"},
    ]
    call["function"] = {"name": "f", "arguments": "{"}
    request = chat(messages=[*USER, {"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(ApiError, match="must be JSON text"):
        request.template_messages()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("Hi", ["Hi"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([1, "a"], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([2**40], "prompt[0]"),
        (["a"] * (MAX_PROMPTS + 1), "prompt"),
        ({}, "prompt"),
        (None, "prompt"),
        ([True], "prompt[0]"),
        ([[-1]], "prompt"),
    ],
)
def test_prompts_that_are_none(prompt: Any, param: str) -> None:
    error = refused(completion, prompt=prompt)
    assert error.param is not None
    assert error.param.startswith(param)


def test_completions_have_openai_s_default_length() -> None:
    assert completion().wanted_max_tokens() == 16
    assert completion(max_tokens=None).wanted_max_tokens() is None
    assert completion(max_tokens=3, logprobs=0).wanted_logprobs() == 0


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("suffix", "x"), ("best_of", 3), ("logprobs", True)])
def test_completion_fields_that_are_refused(field: str, value: Any) -> None:
    assert refused(completion, **{field: value}).param == field


def test_the_number_of_texts_is_bounded() -> None:
    assert len(completion(prompt=["a"] * 8, n=16).prompts()) == 8
    assert refused(completion, prompt=["a"] * 9, n=16).param == "prompt"


def test_prompt_ids_must_be_in_the_vocabulary() -> None:
    check_prompt_ids([0, 9], 10)
    with pytest.raises(ApiError, match="token id 10 is not in 0 … 9"):
        check_prompt_ids([0, 10], 10)
