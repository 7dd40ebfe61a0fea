"""Prompts in parts: what they make together, how they are cut, and what is no part of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fm_vectors import cases

from seedance.daemon.protocol.fm_messages import Infer, Modality, Part, encode_payload
from seedance.daemon.protocol.fm_parts import Parts, in_parts, pack_tokens, unpack_tokens
from seedance.errors import LocalProtocolError

BOUND_BYTES = 1 << 20
PAYLOAD_BYTES = 300
TEXTS = st.text(max_size=1200)
PROMPTS: st.SearchStrategy[dict[str, Any]] = (
    st.fixed_dictionaries({"prompt": TEXTS})
    | st.fixed_dictionaries({"token_ids": st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=400)})
    | st.builds(
        lambda before, last: {"messages": [*before, {"role": "user", "content": last}]},
        st.lists(st.just({"role": "system", "content": "Be brief."}), max_size=2),
        TEXTS,
    )
)


def put_together(infer: Infer, parts: list[Part], bound_bytes: int = BOUND_BYTES) -> Infer:
    taken = Parts(infer, bound_bytes)
    for part in parts:
        assert not taken.is_complete
        taken.take(part)
    assert taken.is_complete
    return taken.whole()


@given(PROMPTS, st.integers(PAYLOAD_BYTES, 2000))
def test_what_was_cut_is_put_together_again(prompt: dict[str, Any], payload_bytes: int) -> None:
    infer = Infer(stream=3, model="m", sampling={"max_tokens": 5}, deadline_ms=9, **prompt)
    head, parts = in_parts(infer, payload_bytes)
    asked: list[Infer | Part] = [head, *parts]
    assert all(len(encode_payload(message)) <= payload_bytes for message in asked)
    if parts:
        assert head.more
        assert put_together(head, parts) == infer
    else:
        assert head == infer


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_are_big_endian(token_ids: list[int]) -> None:
    data = pack_tokens(token_ids)
    assert data == b"".join(token_id.to_bytes(4, "big") for token_id in token_ids)
    assert unpack_tokens(data) == token_ids


@pytest.mark.parametrize("case", [pytest.param(case, id=case["summary"]) for case in cases("parts.json")])
def test_vectors(case: dict[str, Any]) -> None:
    taken = Parts(Infer(stream=1, model="", more=True, **case["prompt"]), case.get("most_bytes", BOUND_BYTES))

    def whole() -> Infer:
        for part in case["parts"]:
            fields = {**part, "modality": Modality(part["modality"]), "data": bytes.fromhex(part["data"])}
            taken.take(Part(stream=1, **fields))
        return taken.whole()

    if "whole" in case:
        assert whole() == Infer(stream=1, model="", **case["whole"])
        assert taken.size_bytes == sum(len(part["data"]) // 2 for part in case["parts"])
    else:
        with pytest.raises(ValueError, match="^cannot "):
            whole()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Hi", "sampling": {"stop": ["x" * 5000]}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 5000}]}]},
        {"messages": [{"role": "user", "content": "x" * 5000}, {"role": "user", "content": "Hi"}]},
    ],
)
def test_what_is_no_end_of_a_prompt_is_not_cut(fields: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="^cannot "):
        in_parts(Infer(stream=1, model="m", **fields), 4096)
