"""What frames ask for, in the terms of the other doors, and what they tell."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest

from seedance.daemon import tokenizer
from seedance.daemon.doors import fm
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.doors.openai_response import Usage
from seedance.daemon.protocol.fm_logprobs import Candidate, ScoredText, decode_scored
from seedance.daemon.protocol.fm_messages import Error, Infer, decode_payload, encode_payload
from seedance.daemon.session_log import Absent
from seedance.engine.request import FinishReason, TokenLogprobs


def infer(**fields: Any) -> Infer:
    """Return an INFER as it comes off the wire."""
    data = encode_payload(Infer(**{"stream": 1, "model": "m", **fields}))
    message = decode_payload(data, 0, len(data))
    assert isinstance(message, Infer)
    return message


def test_a_request_has_the_parameters_of_the_other_doors() -> None:
    sampling = {"max_tokens": 5, "temperature": 0, "stop": ["x"], "logit_bias": {5: 1.5}}
    request = fm.parse(infer(prompt="Hi", sampling=sampling, deadline_ms=300))
    assert (request.model, request.prompt, request.messages) == ("m", "Hi", None)
    assert (request.max_tokens, request.temperature, request.stop_strings()) == (5, 0, ("x",))
    assert (request.logit_bias, request.deadline_ms, request.streams()) == ({5: 1.5}, 300, True)


def test_a_prompt_may_be_token_ids_or_messages_and_the_model_left_out() -> None:
    assert fm.parse(infer(token_ids=[1, 2], model="")).prompt == [1, 2]
    assert fm.parse(infer(token_ids=[1, 2], model="")).model is None
    assert fm.parse(infer(messages=[{"role": "user", "content": "Hi"}])).template_messages() == [
        {"role": "user", "content": "Hi"}
    ]


def test_of_a_prompt_in_parts_all_else_is_there_at_once() -> None:
    for fields in ({}, {"prompt": "Hi"}, {"token_ids": [1]}, {"messages": [{"role": "user", "content": ""}]}):
        assert fm.parse(infer(more=True, sampling={"max_tokens": 3, "logprobs": 2}, **fields)).max_tokens == 3
    with pytest.raises(ApiError):
        fm.parse(infer(more=True, sampling={"temperature": "hot"}))


def test_log_probabilities_name_the_tokens_and_are_numbers_that_json_has() -> None:
    vocabulary = tokenizer.synthetic().vocabulary
    a, b = tokenizer.synthetic().encode("ab")
    positions = [TokenLogprobs([a, b], [-0.5, -math.inf], 1), TokenLogprobs([b, a], [-1.0, -2.0], 1)]
    (data,) = fm.scored("ab", positions, vocabulary, 1000)
    expected = [
        [Candidate(a, -0.5, b"a"), Candidate(b, -9999.0, b"b")],
        [Candidate(b, -1.0, b"b"), Candidate(a, -2.0, b"a")],
    ]
    assert decode_scored(data) == ScoredText("ab", expected)
    assert len(fm.scored("ab", positions, vocabulary, 40)) == 3
    with pytest.raises(ApiError, match="^cannot "):
        fm.scored("ab", positions, vocabulary, 20)


def test_a_schema_stays_as_it_is() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert fm.parse(infer(prompt="Hi", sampling={"response_format": wanted})).response_format is not None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "Hi", "token_ids": [1]},
        {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]},
        {"prompt": "Hi", "token_ids": [1], "more": True},
        {"prompt": "Hi", "deadline_ms": 0},
        {"token_ids": []},
        {"token_ids": [2**31]},
        {"messages": [{"role": "nobody"}]},
        {"prompt": "Hi", "sampling": {"logprobs": 21}},
        {"prompt": "Hi", "sampling": {"n": 2}},
        {"prompt": "Hi", "sampling": {"temperature": "hot"}},
        {"prompt": "Hi", "sampling": {"temperature": datetime.datetime.now(tz=datetime.UTC)}},
        {"prompt": "Hi", "sampling": {"stop": {b"\xff": 1}}},
        {"sampling": {"prompt": "Hi"}},
    ],
)
def test_what_cannot_be_served_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        fm.parse(infer(**fields))
    assert caught.value.code == "invalid_request"
    assert caught.value.message.startswith("cannot ")


def test_errors_fit_into_a_frame() -> None:
    error = fm.error(ApiError("rate_limited", "cannot " + "x" * 1000, retry_after_s=1.5), 3)
    data = encode_payload(error)
    assert decode_payload(data, 0, len(data)) == error
    assert (error.stream, error.code, error.retry_after_ms) == (3, "rate_limited", 1500)


def test_an_end_that_a_quota_made_says_when_to_come_back() -> None:
    end = fm.end(2, FinishReason.QUOTA_EXCEEDED, Usage(3, 4, 1), {"total_ms": 5.0}, 0.25)
    assert (end.finish_reason, end.retry_after_ms, end.slo) == ("quota_exceeded", 250, {"total_ms": 5.0})
    assert end.usage == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "cached_tokens": 1}
    assert fm.end(2, FinishReason.STOP, Usage(3, 4), {}).retry_after_ms is None


def test_an_absent_session_is_gone_or_unknown() -> None:
    assert fm.absent(Absent("gone", 7)) == Error(
        stream=0,
        code="gone",
        message="cannot go on with this session: it is not kept any more; begin a new one",
        oldest_seq=7,
    )
    assert fm.absent(Absent("not_found")).code == "not_found"
