from __future__ import annotations

import json
from typing import Any

import pytest

from seedance.daemon.detokenizer import table_vocabulary
from seedance.daemon.doors import infer
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.doors.openai_response import Usage, chat_logprobs
from seedance.engine.request import FinishReason, TokenLogprobs

USAGE = Usage(prompt_tokens=3, completion_tokens=4)
USER = [{"role": "user", "content": "Hi"}]


def parsed(**fields: Any) -> infer.InferRequest:
    request = infer.parse(json.dumps(fields))
    assert isinstance(request, infer.InferRequest), request
    return request


def rejected(message: str | bytes) -> infer.Rejected:
    result = infer.parse(message)
    assert isinstance(result, infer.Rejected)
    assert result.error.message.startswith("cannot ")
    return result


def test_a_request_with_a_prompt() -> None:
    request = parsed(model="m", prompt="Hi", stream=True, max_tokens=5, temperature=0, id="a", logprobs=0)
    assert (request.id, request.model, request.prompt, request.max_tokens) == ("a", "m", "Hi", 5)
    assert (request.streams(), request.wanted_logprobs()) == (True, 0)
    assert parsed(prompt=[1, 2]).prompt == [1, 2]
    assert (parsed(prompt="x").streams(), parsed(prompt="x", stream=False).streams()) == (True, False)
    assert parsed(prompt="x", stream_options={"include_usage": True}).streams()


def test_a_request_with_a_deadline() -> None:
    assert parsed(prompt="x", deadline_ms=250).deadline_ms == 250
    assert parsed(prompt="x").deadline_ms is None


def test_a_request_with_messages() -> None:
    content = [{"type": "text", "text": "Hi"}]
    request = parsed(messages=[{"role": "user", "content": content}], chat_template_kwargs={"x": 1})
    assert request.template_messages() == USER
    assert request.template_variables() == {"x": 1}


def test_cancel() -> None:
    assert infer.parse(b'{"cancel":"a"}') == infer.Cancel("a")
    assert infer.parse('{"cancel":null}') == infer.Cancel(None)


def test_resume() -> None:
    assert infer.parse('{"resume":"t","last_seq":7,"id":"a"}') == infer.Resume("a", "t", 7)
    assert infer.parse(b'{"resume":"t"}') == infer.Resume(None, "t", 0)
    for bad in ('{"resume":1}', '{"resume":"t","last_seq":-1}', '{"resume":"t","last_seq":"1"}'):
        assert rejected(bad).error.code == "invalid_request"


def test_the_messages_of_a_kept_stream_are_numbered() -> None:
    record = infer.InferStream().delta('a "b"')
    for id, around in ((None, {}), ("x", {"id": "x"})):
        messages = infer.NumberedMessages(id)
        assert json.loads(messages.message(12, record)) == {**around, "seq": 12, "delta": 'a "b"'}
        welcome = {"stream_id": "n", "resume": "n.t", "resume_for_ms": 5}
        assert json.loads(messages.welcome("n", "n.t", 5)) == {**around, **welcome}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "stream": False, "resumable": True}, "resumable"),
        ({"prompt": "x", "idempotency_key": "k"}, "idempotency_key"),
        ({"prompt": "a", "messages": USER}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "deadline_ms": 0}, "deadline_ms"),
        ({"prompt": "a", "deadline_ms": 1.5}, "deadline_ms"),
        ({"prompt": "a", "deadline_ms": 86_400_001}, "deadline_ms"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "temperature": "x"}, "temperature"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"messages": USER, "tools": [{}]}, "tools"),
        ({"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
    ],
)
def test_a_wrong_request_is_rejected_under_its_id(fields: dict[str, Any], param: str) -> None:
    result = rejected(json.dumps({"id": "a", **fields}))
    assert (result.id, result.error.param) == ("a", param)
    assert json.loads(result.message())["id"] == "a"
    assert json.loads(result.message())["error"]["code"] == "invalid_request"


@pytest.mark.parametrize(
    "message",
    ["", "{", "[]", "7", b"\xff", b'{"id":"\xff"}', '{"id":7}', '{"cancel":7}', json.dumps({"id": "x" * 129})],
)
def test_what_is_no_request_is_rejected_without_id(message: str | bytes) -> None:
    assert rejected(message).id is None


def test_the_messages_of_a_stream() -> None:
    stream = infer.InferStream()
    assert stream.delta('a"\n東') == '{"delta":"a\\"\\n東"}'.encode()
    assert json.loads(stream.finish(FinishReason.STOP, USAGE)) == {"finish_reason": "stop", "usage": USAGE.as_json()}
    assert json.loads(stream.whole("x", "length", USAGE))["text"] == "x"
    assert "id" not in json.loads(stream.error(ApiError("overloaded", "x")))


def test_a_quota_s_end_tells_when_to_come_back() -> None:
    stream = infer.InferStream()
    for last in (
        stream.finish(FinishReason.QUOTA_EXCEEDED, USAGE, 1.5),
        stream.whole("x", FinishReason.QUOTA_EXCEEDED, USAGE, None, 1.5),
    ):
        told = json.loads(last)
        assert (told["finish_reason"], told["usage"], told["retry_after_ms"]) == (
            "quota_exceeded",
            USAGE.as_json(),
            1500,
        )


def test_the_messages_of_a_named_stream_carry_its_id() -> None:
    stream = infer.InferStream('a"')
    logprobs = chat_logprobs([TokenLogprobs([0], [-1.0], 1)], table_vocabulary([b"x"]))
    messages = [
        stream.delta("x"),
        stream.delta_logprobs("x", logprobs),
        stream.finish("stop", USAGE),
        stream.whole("x", "stop", USAGE, logprobs),
        stream.error(ApiError("overloaded", "x", retry_after_s=2)),
    ]
    decoded = [json.loads(message) for message in messages]
    assert [message["id"] for message in decoded] == ['a"'] * 5
    assert decoded[0] == {"id": 'a"', "delta": "x"}
    assert decoded[1]["logprobs"][0]["token"] == decoded[3]["logprobs"][0]["token"] == "x"
    assert decoded[4]["error"]["retry_after_ms"] == 2000
