"""Whatever a client sends, a door answers with a request or one of its own errors."""

from __future__ import annotations

import contextlib
import datetime
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from seedance.daemon import tokenizer
from seedance.daemon.doors import fm, infer, parameters
from seedance.daemon.doors.errors import ApiError, openai_error_body
from seedance.daemon.doors.openai_request import ChatRequest, CompletionRequest, parse_chat, parse_completion
from seedance.daemon.protocol.fm_messages import Infer

FIELDS = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "id", "cancel", "resume", "last_seq"}
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from([0, 1, "user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "tool_calls", "1"]), inner, max_size=4)
    ),
    max_leaves=6,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5).flatmap(
    lambda fields: st.sampled_from(
        [
            fields,
            {"model": "m", "prompt": "x", **fields},
            {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields},
        ]
    )
)
TOKENIZER = tokenizer.synthetic()


def served(body: bytes) -> None:
    """Take a body as far as the engine's parameters and the prompt, as a worker does."""
    for parse in (parse_chat, parse_completion):
        try:
            request: Any = parse(body)
            parameters.sampling(request, prompt_tokens=1, context_tokens=9, vocab_size=300)
            if isinstance(request, ChatRequest):
                TOKENIZER.render_chat(
                    request.template_messages(), request.tools, variables=request.template_variables()
                )
        except ApiError as error:
            assert 400 <= error.status < 500
            json.loads(openai_error_body(error))
    result = infer.parse(body)
    if isinstance(result, infer.Rejected):
        json.loads(result.message())
    elif isinstance(result, infer.InferRequest):
        with contextlib.suppress(ApiError):
            result.template_messages()


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes(body: bytes) -> None:
    served(body)


@settings(deadline=None, max_examples=300)
@given(BODIES)
def test_any_json(body: Any) -> None:
    served(json.dumps(body).encode())


MSGPACK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.datetimes(timezones=st.just(datetime.UTC)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    sampling=st.dictionaries(st.sampled_from([*FIELDS, "sampling", "more"]), MSGPACK | JSON, max_size=5),
    messages=st.none() | st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), MSGPACK), max_size=2),
    prompt=st.none() | st.text(max_size=4),
)
def test_any_frame_is_a_request_or_an_error(
    sampling: dict[str, Any], messages: list[dict[str, Any]] | None, prompt: str | None
) -> None:
    with contextlib.suppress(ApiError):
        request = fm.parse(Infer(stream=1, model="m", prompt=prompt, messages=messages, sampling=sampling))
        assert request.streams()
        assert request.choices() == 1
        assert (request.prompt, request.model) == (prompt, "m")
