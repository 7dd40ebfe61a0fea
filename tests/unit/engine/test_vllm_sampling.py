"""What vLLM is asked: the checks that it skips on this path, and the parameters as its own front end would set them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.engine.request import Sampling, TenantContext
from seedance.engine.vllm_sampling import ModelFacts, check_request, sampling_params
from seedance.errors import EngineError

TENANT = TenantContext(name="acme", scheduling_class="gold", cache_salt="s")
FACTS = ModelFacts(
    max_model_len=64,
    vocab_size=100,
    max_logprobs=20,
    eos_token_id=1,
    generation_eos_ids=(1, 2),
    structured_backend="xgrammar",
)


def wired(sampling: Sampling, facts: ModelFacts = FACTS) -> dict[str, Any]:
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(sampling_params(sampling, TENANT, facts)))
    assert isinstance(decoded, dict)
    return decoded


def refusal(prompt: list[int], sampling: Sampling, facts: ModelFacts = FACTS) -> EngineError:
    with pytest.raises(EngineError) as caught:
        check_request(prompt, sampling, facts)
    return caught.value


@pytest.mark.parametrize(
    ("summary", "eos", "generation_eos", "sampling", "expected"),
    [
        ("the tokenizer's eos and one more", 1, (1, 2), {}, {"stop": [2], "eos": 1, "all": [1, 2]}),
        (
            "with stop ids of the request",
            1,
            (1, 2),
            {"stop_token_ids": (9, 9)},
            {"stop": [2, 9], "eos": 1, "all": [9, 1, 2]},
        ),
        ("no generation config", 1, (), {}, {"stop": None, "eos": 1, "all": [1]}),
        ("a tokenizer without eos", None, (3,), {}, {"stop": [3], "eos": None, "all": [3]}),
        ("eos ignored", 1, (1, 2), {"ignore_eos": True}, {"stop": None, "eos": None, "all": [1, 2]}),
        (
            "eos ignored, stop ids kept",
            1,
            (),
            {"ignore_eos": True, "stop_token_ids": (4,)},
            {"stop": [4], "eos": None, "all": [4, 1]},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ends_of_sequence_are_set_as_vllms_front_end_does(
    summary: str, eos: int | None, generation_eos: tuple[int, ...], sampling: dict[str, Any], expected: dict[str, Any]
) -> None:
    facts = msgspec.structs.replace(FACTS, eos_token_id=eos, generation_eos_ids=generation_eos)
    params = wired(Sampling(max_tokens=4, **sampling), facts)
    assert params.get("stop_token_ids") == expected["stop"], summary
    assert params.get("_eos_token_id") == expected["eos"]
    assert params["_all_stop_token_ids"] == expected["all"]
    assert params.get("ignore_eos", False) == sampling.get("ignore_eos", False)


def test_every_field_reaches_vllm_under_vllms_name() -> None:
    sampling = Sampling(
        max_tokens=8,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.2,
        seed=7,
        logit_bias={5: 200.0, 6: -1.5},
        logprobs=4,
    )
    params = wired(sampling)
    same = ("max_tokens", "min_tokens", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    for name in (*same, "repetition_penalty", "seed", "logprobs"):
        assert params[name] == getattr(sampling, name), name
    assert "top_k" not in params  # off, which is vLLM's default
    assert params["logit_bias"] == {5: 100.0, 6: -1.5}
    assert params["detokenize"] is False


def test_what_is_not_asked_for_is_not_sent() -> None:
    optional = {"structured_outputs", "logit_bias", "logprobs", "seed", "top_k", "min_tokens", "ignore_eos"}
    assert optional.isdisjoint(wired(Sampling(max_tokens=16)))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(max_tokens=4, json_schema='{"type":"null"}'), {"json": '{"type":"null"}', "_backend": "xgrammar"}),
        (Sampling(max_tokens=4, json_object=True), {"json_object": True, "_backend": "xgrammar"}),
    ],
)
def test_structured_output_names_its_backend(sampling: Sampling, expected: dict[str, Any]) -> None:
    assert wired(sampling)["structured_outputs"] == expected


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": 0}, "cannot use max_tokens 0: it must be at least 1"),
        ({"max_tokens": 4, "min_tokens": 5}, "cannot use min_tokens 5: it must be between 0 and max_tokens (4)"),
        ({"temperature": 2.5}, "cannot use temperature 2.5: it must be between 0 and 2"),
        ({"temperature": math.nan}, "cannot use temperature nan: it must be between 0 and 2"),
        ({"top_p": 0.0}, "cannot use top_p 0.0: it must be over 0 and at most 1"),
        ({"top_k": -2}, "cannot use top_k -2: it must be 0 for off, or at least 1"),
        ({"min_p": 1.5}, "cannot use min_p 1.5: it must be between 0 and 1"),
        ({"presence_penalty": -3.0}, "cannot use presence_penalty -3.0: it must be between -2 and 2"),
        ({"frequency_penalty": math.inf}, "cannot use frequency_penalty inf: it must be between -2 and 2"),
        ({"repetition_penalty": math.inf}, "cannot use repetition_penalty inf: it must be a finite number over 0"),
        ({"seed": 1 << 63}, f"cannot use seed {1 << 63}: it must be a 64-bit integer"),
        ({"logprobs": 21}, "cannot use logprobs 21: it must be between 0 and 20"),
        ({"stop_token_ids": (100,)}, "cannot use stop_token_ids: token ids must be between 0 and 99"),
        ({"logit_bias": {-1: 1.0}}, "cannot use logit_bias: token ids must be between 0 and 99"),
        ({"logit_bias": {1: math.nan}}, "cannot use logit_bias: every bias must be a finite number"),
        ({"json_schema": "{"}, "cannot use json_schema: it is not JSON (Input data was truncated)"),
        ({"json_schema": "3"}, "cannot use json_schema: a schema is a JSON object"),
        ({"json_schema": "{}", "json_object": True}, "cannot use json_schema and json_object together: choose one"),
        ({"json_schema": "[" * 65 + "]" * 65}, "cannot use json_schema: a schema is a JSON object"),
        ({"json_schema": '{"a":' * 65 + "{}" + "}" * 65}, "cannot use json_schema: it may nest at most 64 deep"),
    ],
)
def test_what_vllm_would_refuse_is_refused_with_what_would_be_right(fields: dict[str, Any], text: str) -> None:
    error = refusal([5], Sampling(**{"max_tokens": 8, **fields}))
    assert (error.code, str(error)) == ("invalid_request", text)


def test_a_schema_nested_out_of_all_bounds_is_refused() -> None:
    error = refusal([5], Sampling(max_tokens=8, json_schema='{"a":' * 100_000))
    assert error.code == "invalid_request"


def test_structured_output_is_refused_where_there_is_none() -> None:
    facts = msgspec.structs.replace(FACTS, structured_backend=None)
    error = refusal([5], Sampling(max_tokens=8, json_object=True), facts)
    assert str(error) == "cannot constrain the output: this engine has no structured output"


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "invalid_request"),
        ([5] * 64, "context_too_long"),
        ([5] * 1000, "context_too_long"),
        ([100], "invalid_request"),
        ([-1], "invalid_request"),
    ],
)
def test_prompts_that_can_never_run(prompt: list[int], code: str) -> None:
    assert refusal(prompt, Sampling(max_tokens=8)).code == code


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    check_request([5] * 63, Sampling(max_tokens=8), FACTS)


@given(
    st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 1 << 20)},
        optional={
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.integers(-1, 1000),
            "min_p": st.floats(0, 1),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "repetition_penalty": st.floats(0.01, 10),
            "seed": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
            "stop_token_ids": st.lists(st.integers(0, 99), max_size=4).map(tuple),
            "logprobs": st.none() | st.integers(0, 20),
            "logit_bias": st.none() | st.dictionaries(st.integers(0, 99), st.floats(-1e9, 1e9), max_size=3),
        },
    )
)
def test_whatever_passes_the_checks_can_be_written(fields: dict[str, Any]) -> None:
    sampling = Sampling(**fields)
    check_request([1, 2, 3], sampling, FACTS)
    params = wired(sampling)
    assert all(-100.0 <= bias <= 100.0 for bias in (params.get("logit_bias") or {}).values())
    assert len(params["_all_stop_token_ids"]) == len(set(params["_all_stop_token_ids"]))
