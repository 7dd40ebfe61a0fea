"""The OpenAI door through the whole daemon, with OpenAI's own client and with plain bytes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from support.daemon import DRIVERS, Daemon, running
from support.raw_http import Connection, events, request
from support.synthetic import MODEL, expected_ids, expected_text, prompt_ids, whole_tokens

from seedance.daemon.protocol import sse
from seedance.daemon.stream_columns import FEWEST
from seedance.engine.synthetic_vocabulary import decode_text, synthetic_token_text

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie heißt 東京 noch?"}]
PROMPT = "Once upon a time"
# Whose clock is the worker's, however the bytes come.
one_driver = pytest.mark.parametrize("shared_daemon", DRIVERS[:1], indirect=True)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture
def client(doors: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{doors.address}/v1", api_key=doors.keys["acme"], max_retries=0) as client:
        yield client


@pytest.fixture
def connection(doors: Daemon) -> Iterator[Connection]:
    with Connection(doors.address) as connection:
        yield connection


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, **fields}


def completion_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, **fields}


# -- what is generated ------------------------------------------------------------------------------------------------


def test_a_whole_chat_has_the_engines_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=40)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == expected_text(MESSAGES, 40)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt_ids(MESSAGES))
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (40, 40 + len(prompt_ids(MESSAGES)))


def test_a_streamed_chat_has_the_engines_text_and_no_broken_character(client: openai.OpenAI) -> None:
    tokens = whole_tokens(MESSAGES, 400)
    assert any("\ufffd" in synthetic_token_text(token_id) for token_id in expected_ids(MESSAGES, tokens))
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=tokens, stream=True))
    deltas = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(delta or "" for delta in deltas) == expected_text(MESSAGES, tokens)
    assert not any("\ufffd" in delta for delta in deltas if delta)
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].usage is None


def test_a_text_cut_inside_a_character_ends_as_the_tokens_decode(client: openai.OpenAI) -> None:
    tokens = next(count for count in range(1, 200) if expected_text(PROMPT, count).endswith("\ufffd"))
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=tokens)
    assert answer.choices[0].text == expected_text(PROMPT, tokens)
    chunks = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=tokens, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected_text(PROMPT, tokens)


def test_prompts_and_choices_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    prompts = ["Once", "Twice upon", "東京"]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, seed=11, max_tokens=20)
    texts = [choice.text for choice in answer.choices]
    assert texts == [expected_text(prompt, 20, 11 + choice) for prompt in prompts for choice in range(2)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(prompt_ids(prompt)) for prompt in prompts)
    assert answer.usage.completion_tokens == 6 * 20


@pytest.mark.parametrize("prompt", [[300, 301, 302], [[300], [301, 302]]])
def test_prompts_may_be_token_ids(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=10)
    prompts = prompt if isinstance(prompt[0], list) else [prompt]
    assert [choice.text for choice in answer.choices] == [expected_text(ids, 10) for ids in prompts]


def test_three_choices_share_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        n=3,
        seed=5,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, roles = ["", "", ""], [""] * 3, [0, 0, 0]
    *chunks, last = list(stream)
    for chunk in chunks:
        (choice,) = chunk.choices
        assert chunk.usage is None
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
        reasons[choice.index] += choice.finish_reason or ""
    assert texts == [expected_text(MESSAGES, 60, 5 + choice) for choice in range(3)]
    assert (reasons, roles) == (["length"] * 3, [1, 1, 1])
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(prompt_ids(MESSAGES)), 180)


def test_the_same_seed_gives_the_same_text_and_another_one_another(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        return client.completions.create(model=MODEL, prompt=PROMPT, seed=seed, max_tokens=30).choices[0].text

    assert text(7) == text(7) == expected_text(PROMPT, 30, 7)
    assert text(8) == expected_text(PROMPT, 30, 8) != text(7)


def _stop_in(text: str) -> str:
    """Return a string from the middle of a text that cuts words, whole in itself and not earlier in the text."""
    start = len(text) // 2
    stop = text[start : start + 7]
    assert text.find(stop) == start
    return stop


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text(client: openai.OpenAI, include: bool) -> None:
    whole = expected_text(PROMPT, 100)
    stop = _stop_in(whole)
    end = whole.index(stop) + (len(stop) if include else 0)
    # As many tokens count as it took to complete the stop string.
    ids = expected_ids(PROMPT, 100)
    tokens = next(count for count in range(101) if stop in decode_text(ids[:count]))
    extra = {"include_stop_str_in_output": include}
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=100, stop=["nowhere", stop], extra_body=extra
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[:end], "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=100,
        stop=stop,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[:end]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.completion_tokens == tokens


def test_a_beginning_of_a_stop_string_comes_out_when_it_was_none(client: openai.OpenAI) -> None:
    tokens = whole_tokens(PROMPT, 50)
    whole = expected_text(PROMPT, tokens)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=tokens, stop=whole[-6:] + "never")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole, "length")


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    ids = expected_ids(MESSAGES, 30)
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=30, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [entry.token for entry in content] == [synthetic_token_text(token_id) for token_id in ids]
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token for entry in content)
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode("utf-8", "replace") == decode_text(ids)
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=30, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [choice.logprobs for chunk in stream for choice in chunk.choices if choice.logprobs]
    assert list(itertools.chain(*(logprobs.content or [] for logprobs in streamed))) == content


def test_log_probabilities_of_a_completion_are_the_same_in_a_stream(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=60, logprobs=3)
    whole = answer.choices[0].logprobs
    assert whole is not None
    assert "\ufffd" in "".join(whole.tokens or [])  # a token inside a character is among them
    stream = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=60, logprobs=3, stream=True)
    parts = [choice.logprobs for chunk in stream for choice in chunk.choices if choice.logprobs]
    for field in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert list(itertools.chain(*(getattr(part, field) for part in parts))) == getattr(whole, field), field


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    ],
)
def test_response_formats_are_taken(client: openai.OpenAI, response_format: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=10, response_format=response_format
    )
    assert answer.choices[0].message.content == expected_text(MESSAGES, 10)


def test_sixteen_streams_of_one_async_client_keep_apart(doors: Daemon) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=number, max_tokens=50 + number, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def every() -> list[str]:
        base_url = f"http://{doors.address}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=doors.keys["acme"], max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    assert asyncio.run(every()) == [expected_text(MESSAGES, 50 + number, number) for number in range(16)]


@pytest.mark.parametrize("io", DRIVERS)
def test_streams_that_go_in_columns_keep_apart(tmp_path: Path, io: str) -> None:
    def options(number: int) -> dict[str, bool] | None:
        return {"include_usage": True} if number % 3 else None

    tokens, numbers = 60, range(FEWEST + 20)
    # All streams in each step, and each with one token.
    synthetic = {"tokens_per_s": 40, "step": "25ms", "prompt_tokens_per_s": 0}
    with running(tmp_path, "acme", io=io, tables={"engine.synthetic": synthetic}) as daemon:
        with ExitStack() as stack:
            connections = [stack.enter_context(Connection(daemon.address)) for _ in numbers]
            for number, connection in enumerate(connections):
                body = chat_body(stream=True, seed=number, max_tokens=tokens, stream_options=options(number))
                connection.send(request("POST", CHAT, daemon.keys["acme"], body))
            in_columns = 0
            for number, connection in enumerate(connections):
                assert connection.head()[0] == 200
                digits, chunks = zip(*connection.sized_chunks(), strict=True)
                in_columns += sum(size.startswith(b"0") for size in digits)  # there sizes have three digits
                told = events(b"".join(chunks))
                deltas = [event["choices"][0]["delta"] for event in told if event["choices"]]
                assert "".join(delta.get("content", "") for delta in deltas) == expected_text(MESSAGES, tokens, number)
                usages = [event["usage"]["completion_tokens"] for event in told if event.get("usage")]
                assert usages == [tokens] * (options(number) is not None)
            assert in_columns > tokens * len(numbers) // 2
        daemon.stop()


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "seedance")
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


# -- how it comes -----------------------------------------------------------------------------------------------------


def test_a_stream_is_events_of_one_answer(doors: Daemon, connection: Connection) -> None:
    connection.send(request("POST", CHAT, doors.keys["acme"], chat_body(stream=True)))
    response = connection.response()
    assert response.status == 200
    assert response.fields["content-type"].startswith("text/event-stream")
    assert response.fields["cache-control"] == "no-cache, no-transform"
    assert response.fields["x-accel-buffering"] == "no"
    assert "connection" not in response.fields
    first, *deltas, last = events(response.body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in deltas) == expected_text(MESSAGES, 5)
    assert last["choices"][0]["delta"] == {}
    assert {event["object"] for event in [first, *deltas, last]} == {"chat.completion.chunk"}
    assert len({event["id"] for event in [first, *deltas, last]}) == 1
    assert first["id"].startswith("chatcmpl-")
    connection.send(request("POST", COMPLETIONS, doors.keys["acme"], completion_body(stream=True)))
    others = events(connection.response().body)
    assert {event["object"] for event in others} == {"text_completion"}
    assert others[0]["id"].startswith("cmpl-")


def test_head_is_get_without_a_body(doors: Daemon, connection: Connection) -> None:
    key = doors.keys["acme"]
    connection.send(request("GET", "/v1/models", key))
    whole = connection.response()
    connection.send(request("HEAD", "/v1/models", key), request("HEAD", "/v1/models/none", key))
    head = connection.response(has_body=False)
    assert (head.status, head.fields) == (200, whole.fields)
    assert connection.response(has_body=False).status == 404
    connection.send(request("GET", "/v1/models", key))
    assert connection.response() == whole


def test_a_connection_serves_many_requests(doors: Daemon, connection: Connection) -> None:
    for number in range(30):
        connection.send(request("POST", COMPLETIONS, doors.keys["acme"], completion_body(seed=number, max_tokens=2)))
        assert connection.response().json()["choices"][0]["text"] == expected_text(PROMPT, 2, number)
    assert doors.tenant("acme").connections == 1


def test_requests_in_one_write_are_answered_in_order(doors: Daemon, connection: Connection) -> None:
    key = doors.keys["acme"]
    connection.send(
        request("POST", CHAT, key, chat_body(stream=True, seed=1))
        + request("GET", "/v1/models", key)
        + request("POST", COMPLETIONS, key, completion_body(seed=2))
        + request("POST", CHAT, key, chat_body(stream=True, seed=3))
    )
    texts = []
    for answer in (connection.response(), connection.response(), connection.response(), connection.response()):
        assert answer.status == 200
        if "transfer-encoding" in answer.fields:
            parts = [event["choices"][0]["delta"].get("content", "") for event in events(answer.body)]
            texts.append("".join(parts))
        elif answer.json()["object"] == "text_completion":
            texts.append(answer.json()["choices"][0]["text"])
        else:
            texts.append(answer.json()["data"][0]["id"])
    assert texts == [
        expected_text(MESSAGES, 5, 1),
        MODEL,
        expected_text(PROMPT, 5, 2),
        expected_text(MESSAGES, 5, 3),
    ]


def test_a_client_that_waits_for_100_continue_gets_it(doors: Daemon, connection: Connection) -> None:
    whole = request("POST", COMPLETIONS, doors.keys["acme"], completion_body(), {"Expect": "100-continue"})
    head, _, body = whole.partition(b"\r\n\r\n")
    connection.send(head + b"\r\n\r\n")
    assert connection.response().status == 100
    connection.send(body)
    assert connection.response().json()["choices"][0]["text"] == expected_text(PROMPT, 5)


def test_no_100_continue_for_what_is_refused_on_its_head(doors: Daemon, connection: Connection) -> None:
    fields = {"Expect": "100-continue", "Content-Length": "1000"}
    connection.send(request("POST", "/v1/nothing", doors.keys["acme"], fields=fields))
    assert connection.response().status == 404
    assert connection.is_closed()


@pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
def test_a_body_may_be_chunked(doors: Daemon, connection: Connection, piece_bytes: int) -> None:
    data = request("POST", COMPLETIONS, None, completion_body()).partition(b"\r\n\r\n")[2]
    head = request("POST", COMPLETIONS, doors.keys["acme"], fields={"Transfer-Encoding": "chunked"})
    pieces = [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)]
    body = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nX-Trailer: 1\r\n\r\n"
    message = head + body
    if piece_bytes == 1:
        connection.send(*(message[at : at + 1] for at in range(len(message))))
    else:
        connection.send(message)
    assert connection.response().json()["choices"][0]["text"] == expected_text(PROMPT, 5)
    connection.send(request("GET", "/v1/models", doors.keys["acme"]))
    assert connection.response().status == 200


def test_http_1_0_gets_a_stream_up_to_the_end(doors: Daemon, connection: Connection) -> None:
    connection.send(request("POST", CHAT, doors.keys["acme"], chat_body(stream=True), version="1.0"))
    response = connection.response()
    assert "transfer-encoding" not in response.fields
    assert response.fields["connection"] == "close"
    parts = [event["choices"][0]["delta"].get("content", "") for event in events(response.body)]
    assert "".join(parts) == expected_text(MESSAGES, 5)


def test_http_1_0_may_keep_the_connection_for_whole_answers(doors: Daemon, connection: Connection) -> None:
    keep = {"Connection": "keep-alive"}
    for _ in range(2):
        connection.send(request("GET", "/v1/models", doors.keys["acme"], fields=keep, version="1.0"))
        assert connection.response().fields["connection"] == "keep-alive"
    connection.send(request("GET", "/v1/models", doors.keys["acme"], version="1.0"))
    assert connection.response().fields["connection"] == "close"
    assert connection.is_closed()


# -- whose it is ------------------------------------------------------------------------------------------------------


def test_the_key_may_come_in_three_places(doors: Daemon) -> None:
    key = doors.keys["globex"]
    before = doors.tenant("globex").used.requests
    for message in (
        request("POST", COMPLETIONS, key, completion_body()),
        request("POST", f"{COMPLETIONS}?key={key}", None, completion_body()),
        request("POST", COMPLETIONS, None, completion_body(), {"Sec-WebSocket-Protocol": f"a, seedance.key.{key}"}),
    ):
        with Connection(doors.address) as connection:
            connection.send(message)
            assert connection.response().status == 200
    assert doors.tenant("globex").used.requests == before + 3


def test_each_request_on_a_connection_is_its_keys_tenants(doors: Daemon, connection: Connection) -> None:
    tenants = ["acme", "globex", "globex", "acme", "globex"]
    before = {tenant: doors.tenant(tenant).used.requests for tenant in tenants}
    bodies = [completion_body(seed=number, stream=number % 2 == 0) for number in range(len(tenants))]
    # In one write: what is behind the first request travels with the connection from process to process.
    connection.send(
        b"".join(
            request("POST", COMPLETIONS, doors.keys[tenant], body) for tenant, body in zip(tenants, bodies, strict=True)
        )
    )
    for number in range(len(tenants)):
        response = connection.response()
        if number % 2 == 0:
            text = "".join(event["choices"][0]["text"] for event in events(response.body))
        else:
            text = response.json()["choices"][0]["text"]
        assert text == expected_text(PROMPT, 5, number)
    assert doors.tenant("acme").used.requests == before["acme"] + 2
    assert doors.tenant("globex").used.requests == before["globex"] + 3


def test_a_body_that_comes_late_follows_its_connection(doors: Daemon, connection: Connection) -> None:
    connection.send(request("GET", "/v1/models", doors.keys["acme"]))
    assert connection.response().status == 200
    body = completion_body(prompt="word " * 6000, max_tokens=3)
    message = request("POST", COMPLETIONS, doors.keys["globex"], body)
    connection.send(message[:300], message[300:20_000], message[20_000:])
    assert connection.response().json()["choices"][0]["text"] == expected_text(body["prompt"], 3)


def test_a_wrong_key_ends_a_good_connection(doors: Daemon, connection: Connection) -> None:
    connection.send(request("POST", COMPLETIONS, doors.keys["acme"], completion_body()))
    assert connection.response().status == 200
    connection.send(request("POST", COMPLETIONS, doors.keys["acme"] + "x", completion_body()))
    refused = connection.response()
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert connection.is_closed()


# -- time -------------------------------------------------------------------------------------------------------------


@one_driver
def test_a_stream_is_never_silent_from_the_first_second_on(doors: Daemon, connection: Connection) -> None:
    # It takes the engine 3.2 s to read both prompts; the configuration asks for a sign of life each second.
    prompts = [[300] * 8000, [301] * 8000]
    body = completion_body(prompt=prompts, max_tokens=3, stream=True)
    begun = time.monotonic()
    connection.send(request("POST", COMPLETIONS, doors.keys["acme"], body))
    status, _ = connection.head()
    assert (status, time.monotonic() - begun < 1) == (200, True)
    seen, gaps, last = [], [], begun
    for chunk in connection.chunks():
        now = time.monotonic()
        gaps.append(now - last)
        last = now
        seen.append(chunk)
    pings = [chunk for chunk in seen if chunk == sse.PING]
    assert len(pings) >= 2
    assert max(gaps) < 1.5
    texts = ["", ""]
    for event in events(b"".join(seen)):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [expected_text(prompt, 3) for prompt in prompts]


@one_driver
def test_a_connection_in_use_is_not_an_idle_one(doors: Daemon, connection: Connection) -> None:
    # `idle_timeout` is 2 s, and the connection is always idle when somebody looks.
    begun = time.monotonic()
    while time.monotonic() - begun < 3.5:
        connection.send(request("GET", "/v1/models", doors.keys["acme"]))
        assert connection.response().status == 200
        time.sleep(0.3)


@one_driver
def test_a_connection_that_is_not_used_is_closed(doors: Daemon, connection: Connection) -> None:
    connection.send(request("GET", "/v1/models", doors.keys["acme"]))
    assert connection.response().status == 200
    begun = time.monotonic()
    assert connection.is_closed()
    assert 1 < time.monotonic() - begun < 6
