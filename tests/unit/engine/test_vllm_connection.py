"""The EngineCore's protocol: messages are built here as vLLM builds them, field by field."""

from __future__ import annotations

import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.engine import vllm_wire as wire
from seedance.engine.adapter import Output
from seedance.engine.request import FinishReason, Sampling, TenantContext, TokenLogprobs
from seedance.engine.vllm_connection import CoreConnection, Received
from seedance.engine.vllm_sampling import ModelFacts
from seedance.errors import EngineError

TENANT = TenantContext(name="acme", scheduling_class="gold", cache_salt="salt-of-acme")
FACTS = ModelFacts(
    max_model_len=64,
    vocab_size=100,
    max_logprobs=20,
    eos_token_id=1,
    generation_eos_ids=(1, 2),
    structured_backend="xgrammar",
)
STOP, LENGTH, ABORT, ERROR, REPETITION = range(5)


def connection() -> CoreConnection:
    return CoreConnection(FACTS)


def submit(core: CoreConnection, key: int, prompt: list[int] | None = None, **sampling: Any) -> list[Any]:
    """Submit a generation and return the request as the core would read it."""
    frames = core.submit(key, TENANT, prompt or [5, 6, 7], Sampling(max_tokens=8, **sampling), 123.5)
    assert frames[:2] == [b"\0\0", b"\0"]
    request = msgspec.msgpack.decode(frames[2])
    assert isinstance(request, list)
    return request


def output(name: str, token_ids: list[int], **fields: Any) -> list[Any]:
    """One EngineCoreOutput with all that vLLM puts behind the fields that we read."""
    at = {
        "new_logprobs": 2,
        "finish_reason": 5,
        "stop_reason": 6,
        "trace_headers": 10,
        "prefill_stats": 11,
    }
    item: list[Any] = [name, token_ids, *[None] * 11, 0, None, None, None, None]
    for field, value in fields.items():
        item[at[field]] = value
    return item


def message(*outputs: list[Any], utility: list[Any] | None = None) -> bytes:
    return msgspec.msgpack.encode([0, list(outputs), None, 12.25, utility, None, None, None, "default"])


def ndarray(code: str, rows: list[list[Any]] | list[Any], frames: list[bytes] | None = None) -> list[Any]:
    """A numpy array as vLLM encodes it: inline, or, with `frames`, in a frame of its own."""
    flat = [cell for row in rows for cell in row] if isinstance(rows[0], list) else rows
    shape = [len(rows), len(rows[0])] if isinstance(rows[0], list) else [len(rows)]
    data = array.array(code, flat).tobytes()
    dtype = {"i": "<i4", "q": "<i8", "f": "<f4"}[code]
    if frames is None:
        return [dtype, shape, msgspec.msgpack.Ext(3, data)]
    frames.append(data)
    return [dtype, shape, len(frames)]


def test_an_add_request_has_vllms_fields_in_vllms_order() -> None:
    request = submit(connection(), 7)
    name, prompt, mm_features, params, pooling, arrival, lora, salt, rank = request
    assert name.startswith("7.")
    assert prompt == [5, 6, 7]
    assert (mm_features, pooling, lora, rank) == (None, None, None, None)
    assert arrival == 123.5
    assert salt == "salt-of-acme"
    assert params["max_tokens"] == 8
    assert params["output_kind"] == 1
    assert params["extra_args"] == {"row": 0, "urgency": [None, 0.0, 0.0]}


def test_outputs_of_one_step_come_in_the_cores_order_with_their_keys() -> None:
    core = connection()
    first, second = submit(core, 1)[0], submit(core, 2)[0]
    received = core.receive([message(output(second, [20]), output(first, [10, 11]))])
    assert received.outputs == [Output(2, [20]), Output(1, [10, 11])]
    assert (received.reply, received.dead) == (None, False)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (STOP, FinishReason.STOP),
        (LENGTH, FinishReason.LENGTH),
        (ABORT, FinishReason.ABORT),
        (REPETITION, FinishReason.STOP),
    ],
)
def test_a_finish_reason_ends_the_generation(number: int, reason: FinishReason) -> None:
    core = connection()
    name = submit(core, 1)[0]
    assert core.receive([message(output(name, [1], finish_reason=number))]).outputs == [Output(1, [1], reason)]
    assert core.alive == 0
    assert core.receive([message(output(name, [2]))]).outputs == []


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"seedance.error": "cannot use json_schema: no"}, "cannot use json_schema: no"),
        (None, "the engine could not finish this request; its log says why"),
    ],
)
def test_an_error_carries_the_engines_reason(headers: dict[str, str] | None, text: str) -> None:
    core = connection()
    name = submit(core, 1)[0]
    (out,) = core.receive([message(output(name, [], finish_reason=ERROR, trace_headers=headers))]).outputs
    assert (out.finish_reason, out.error) == (FinishReason.ERROR, text)


def test_cached_tokens_are_told_with_the_first_output() -> None:
    core = connection()
    name = submit(core, 1)[0]
    stats = {"num_prompt_tokens": 300, "num_computed_tokens": 44, "num_cached_tokens": 256}
    first, second = (
        core.receive([message(output(name, [token], prefill_stats=prefill))]).outputs[0]
        for token, prefill in ((1, stats), (2, None))
    )
    assert (first.cached_tokens, second.cached_tokens) == (256, 0)


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "in frames of their own"])
def test_logprobs_are_cut_to_what_the_request_asked_for(inline: bool) -> None:
    core = connection()
    name = submit(core, 1, logprobs=1)[0]
    aux: list[bytes] = []
    where = None if inline else aux
    arrays = [
        ndarray("i", [[9, 4, 9], [3, 3, 8]], where),
        ndarray("f", [[-2.0, -0.5, -2.0], [-0.25, -0.25, -1.5]], where),
        ndarray("q", [2, 1], where),
    ]
    frames = [message(output(name, [9, 3], new_logprobs=[*arrays, None])), *aux]
    (out,) = core.receive(frames).outputs
    assert out.logprobs == [TokenLogprobs([9, 4], [-2.0, -0.5], 2), TokenLogprobs([3, 3], [-0.25, -0.25], 1)]


def test_no_logprobs_without_rows() -> None:
    empty = [["<i4", [0, 3], msgspec.msgpack.Ext(3, b"")]] * 3
    core = connection()
    name = submit(core, 1, logprobs=2)[0]
    (out,) = core.receive([message(output(name, [], new_logprobs=[*empty, None]))]).outputs
    assert out.logprobs == []


def test_an_aborted_generation_is_silent_at_once_and_its_key_is_free() -> None:
    core = connection()
    old = submit(core, 1)[0]
    frames = core.abort([1, 99])
    assert frames is not None
    assert frames[:2] == [b"\0\0", b"\1"]
    assert msgspec.msgpack.decode(frames[2]) == [old]
    assert core.abort([1]) is None
    new = submit(core, 1)[0]
    assert new != old
    assert core.receive([message(output(old, [50]), output(new, [60]))]).outputs == [Output(1, [60])]


def test_a_key_cannot_run_twice() -> None:
    core = connection()
    submit(core, 1)
    with pytest.raises(EngineError, match="already running"):
        submit(core, 1)
    assert core.alive == 1


def test_a_refused_request_leaves_nothing_behind() -> None:
    core = connection()
    with pytest.raises(EngineError):
        submit(core, 1, temperature=9.0)
    assert core.alive == 0
    submit(core, 1)


def test_a_utility_call_and_its_reply() -> None:
    core = connection()
    number, frames = core.call("seedance_statistics", "x")
    assert frames[:2] == [b"\0\0", b"\3"]
    assert msgspec.msgpack.decode(frames[2]) == [0, number, "seedance_statistics", ["x"]]
    reply = core.receive([message(utility=[number, None, [None, {"running": 3}]])]).reply
    assert reply == wire.UtilityOutput(number, None, [None, {"running": 3}])


def test_the_dead_frame() -> None:
    assert connection().receive([b"ENGINE_CORE_DEAD"]).dead


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_a_decode_error(data: bytes) -> None:
    core = connection()
    submit(core, 1)
    try:
        received = core.receive([data])
    except msgspec.DecodeError:
        return
    assert received.dead == (data == b"ENGINE_CORE_DEAD")
    assert received.outputs == []


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["submit", "abort", "token", "end"])), max_size=60))
def test_every_output_belongs_to_a_living_generation(moves: list[tuple[int, str]]) -> None:
    core = connection()
    names: dict[int, str] = {}
    for key, move in moves:
        if move == "submit" and key not in names:
            names[key] = submit(core, key)[0]
        elif move == "abort":
            assert (core.abort([key]) is None) == (key not in names)
            names.pop(key, None)
        elif key in names:
            reason = LENGTH if move == "end" else None
            name = names.pop(key) if move == "end" else names[key]
            (out,) = core.receive([message(output(name, [3], finish_reason=reason))]).outputs
            assert out.key == key
            assert (out.finish_reason is None) == (reason is None)
        assert core.alive == len(names)


def test_the_next_host_goes_on_with_what_a_core_tells_it_to_run() -> None:
    last = connection()
    assert last.submit(4, TENANT, [5], Sampling(max_tokens=8), 1.0, claim="c")[0] == wire.ENGINE_IDENTITY
    core = CoreConnection(FACTS, hosts=2)
    number, frames = core.survey()
    assert frames[1] == wire.UTILITY
    assert msgspec.msgpack.decode(frames[2]) == [0, number, "seedance_survey", []]
    assert core.receive([message(output("4.1", [7]))]) == Received([], None, False)  # from before, and counted
    found = [["4.1", "c", array.array("I", [6, 7]).tobytes()], ["9.3", "", b""]]
    assert core.receive([message(utility=[number, None, [None, found]])]).reply is not None
    assert set(core.survivors.keys) == {4, 9}
    assert core.receive([message(output("4.1", [8]))]).outputs == [Output(4, [8])]
    with pytest.raises(EngineError, match="cannot begin generation 4: it is already running"):
        submit(core, 4)
    assert submit(core, 5)[0] != "5.1"
    aborted = core.abort([9])
    assert aborted is not None
    assert msgspec.msgpack.decode(aborted[2]) == ["9.3"]
    assert core.receive([message(output("4.1", [9], finish_reason=LENGTH))]).outputs == [
        Output(4, [9], FinishReason.LENGTH)
    ]


def packed(*singles: tuple[str, int]) -> list[Any]:
    """Return the output that stands for all who got one token and nothing else."""
    return [*output("", [])[:8], wire.pack_singles([(wire.parse_name(name), token_id) for name, token_id in singles])]


def test_what_is_packed_comes_as_singles_but_for_who_was_aborted_meanwhile() -> None:
    core = connection()
    old, kept, ending = (submit(core, key)[0] for key in (1, 2, 3))
    received = core.receive([message(output(ending, [9], finish_reason=STOP), packed((old, 50), (kept, 60)))])
    assert received.singles == array.array("I", [1, 50, 2, 60]).tobytes()
    assert received.outputs == [Output(3, [9], FinishReason.STOP)]
    core.abort([1, 1])
    new = submit(core, 1)[0]
    received = core.receive([message(packed((old, 51), (kept, 61), (new, 70), (ending, 10)))])
    assert received.singles == array.array("I", [2, 61, 1, 70]).tobytes()
    assert received.outputs == []


@pytest.mark.parametrize("wrong", [[b"1234", b"12345678"], [b"12345678", b""], [b"\xff" * 8, b"12345678"], [b""], 7])
def test_what_is_packed_otherwise_cannot_be_read(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        connection().receive([message([*output("", [])[:8], wrong])])


def test_a_survey_that_fails_finds_nothing() -> None:
    core = CoreConnection(FACTS, hosts=2)
    number, _ = core.survey()
    reply = core.receive([message(utility=[number, "no such method", None])]).reply
    assert reply is not None
    assert reply.failure_message == "no such method"
    assert not core.survivors


def test_a_claim_goes_to_the_core_with_the_request() -> None:
    claimed = connection().submit(4, TENANT, [5], Sampling(max_tokens=8), 1.0, claim="c")
    assert msgspec.msgpack.decode(claimed[2])[3]["extra_args"]["claim"] == "c"
    assert "claim" not in submit(connection(), 4)[3]["extra_args"]
