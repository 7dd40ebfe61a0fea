from __future__ import annotations

from typing import Any

import msgspec
import pytest

from seedance.daemon.doors import parameters
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.doors.openai_request import parse_chat
from seedance.daemon.sampling_defaults import SamplingDefaults
from seedance.engine.request import Sampling


def sampling(choice: int = 0, prompt_tokens: int = 10, context_tokens: int = 100, **fields: Any) -> Sampling:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    request = parse_chat(msgspec.json.encode(body))
    return parameters.sampling(
        request, prompt_tokens=prompt_tokens, context_tokens=context_tokens, vocab_size=50, choice=choice
    )


def test_defaults_are_the_engine_s_own_and_all_the_room_there_is() -> None:
    assert sampling() == Sampling(max_tokens=90)


def test_a_model_s_defaults_fill_in_what_is_left_out() -> None:
    request = parse_chat(b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"top_p":1,"temperature":0}')
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=64, min_p=0.1, repetition_penalty=1.1)
    made = parameters.sampling(request, prompt_tokens=1, context_tokens=9, vocab_size=9, defaults=defaults)
    assert made == Sampling(max_tokens=8, temperature=0, top_p=1, top_k=64, min_p=0.1, repetition_penalty=1.1)


def test_everything_is_passed_on() -> None:
    assert sampling(
        max_tokens=5,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        seed=7,
        stop_token_ids=[4],
        ignore_eos=True,
        logit_bias={"3": 5},
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "json_object"},
    ) == Sampling(
        max_tokens=5,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        seed=7,
        stop_token_ids=(4,),
        ignore_eos=True,
        logit_bias={3: 5},
        logprobs=2,
        json_object=True,
    )


def test_a_schema_stays_json_text() -> None:
    schema = {"type": "object", "properties": {"ä": {"type": "string"}}}
    made = sampling(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    )
    assert made.json_schema is not None
    assert msgspec.json.decode(made.json_schema) == schema
    assert sampling(response_format={"type": "text"}).json_schema is None


def test_top_k_off_in_both_spellings() -> None:
    assert (sampling(top_k=-1).top_k, sampling(top_k=0).top_k) == (0, 0)


def test_choices_of_one_seed_differ() -> None:
    assert [sampling(seed=5, n=2, choice=choice).seed for choice in (0, 1)] == [5, 6]
    assert sampling(seed=2**63 - 1, n=2, choice=1).seed == -(2**63)


def test_the_output_is_cut_to_the_room() -> None:
    made = sampling(max_tokens=500, min_tokens=400)
    assert (made.max_tokens, made.min_tokens) == (90, 90)
    assert sampling(prompt_tokens=99).max_tokens == 1


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(ApiError, match="cannot take a prompt of 100 tokens") as caught:
        sampling(prompt_tokens=100)
    assert (caught.value.code, caught.value.status) == ("context_too_long", 413)


@pytest.mark.parametrize(
    ("field", "value"), [("logit_bias", {"50": 1}), ("logit_bias", {"-1": 1}), ("stop_token_ids", [50])]
)
def test_ids_outside_the_vocabulary_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ApiError, match="is not in 0 … 49") as caught:
        sampling(**{field: value})
    assert caught.value.param == field


def test_long_text_is_refused_by_its_bytes() -> None:
    parameters.refuse_long_text(iter(["é" * 10, "a" * 20]), context_tokens=10, longest_token_bytes=4)
    with pytest.raises(ApiError) as caught:
        parameters.refuse_long_text(iter(["é" * 10, "a" * 21]), context_tokens=10, longest_token_bytes=4)
    assert caught.value.code == "context_too_long"


def test_an_unknown_model_is_not_found() -> None:
    parameters.require_model("m", "m")
    with pytest.raises(ApiError, match="this server has 'm'") as caught:
        parameters.require_model("x" * 10_000, "m")
    assert (caught.value.status, caught.value.openai_code, caught.value.param) == (404, "model_not_found", "model")
    assert len(caught.value.message) < 300
