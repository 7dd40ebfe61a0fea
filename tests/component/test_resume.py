"""Streams of SSE and JSON that outlive their connections, through the whole daemon."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.chaos_proxy import ChaosProxy
from support.daemon import DRIVERS, Daemon, part_of, running, wait_until
from support.event_client import EventClient, Events, Refused
from support.json_client import JsonClient
from support.raw_http import Connection, request
from support.synthetic import MODEL, expected_text, prompt_ids, whole_tokens

from seedance.engine.scheduling import NOTHING_COUNTED

PROMPT = "Once upon a time"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TIMEOUT_S = 60.0
CHAOS_TIMEOUT_S = 200.0
RESUME_FOR_S = 2.0
TABLES = {
    "listen": {"send_buffer": "16KiB"},
    "engine": {"max_model_len": 32768},
    "engine.synthetic": {"tokens_per_s": 100, "prompt_tokens_per_s": 2000},
    "worker": {"max_backlog": "64KiB"},
    "http": {"ping_interval": "1s", "idle_timeout": "2s"},
}


# The rest is the same whatever carries it.
one_driver = pytest.mark.parametrize("daemon", DRIVERS[:1], indirect=True, scope="module")


@pytest.fixture(scope="module", params=DRIVERS)
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("d"), "globex", io=request.param, tables=TABLES) as daemon:
        daemon.add_tenant("acme", "[tokens]\nstreams = 128\n[requests]\nqueue = 128\n")
        daemon.add_tenant("brief", f'[session]\nresume_for = "{RESUME_FOR_S:g}s"\n')
        daemon.reload()
        daemon.text("acme")
        yield daemon
        wait_until(daemon.is_at_rest)
        daemon.stop()


@pytest.fixture
def generations(daemon: Daemon) -> int:
    """How many there are to be through cuts."""
    return part_of(1000, daemon.tenant("acme").driver)


def events_client(daemon: Daemon, tenant: str = "acme") -> EventClient:
    return EventClient(daemon.address, daemon.keys[tenant])


def json_client(daemon: Daemon, tenant: str = "acme", **options: Any) -> JsonClient:
    return JsonClient(daemon.address, daemon.keys[tenant], **options)


def fields(tokens: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    """Return the body of a resumable completion."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "seed": seed, "stream": True, "resumable": True}
    return {**body, "stream_options": {"include_usage": True}, **more}


@contextlib.asynccontextmanager
async def in_time(timeout_s: float = TIMEOUT_S) -> AsyncIterator[None]:
    async with asyncio.timeout(timeout_s):
        yield


def output_tokens(daemon: Daemon, tenant: str = "acme") -> int:
    return (daemon.tenant(tenant).engine or NOTHING_COUNTED).output_tokens


def ends_with(daemon: Daemon, before: int, delivered: int) -> None:
    """See that the engine has made the tokens that were delivered, and no other."""
    wait_until(daemon.is_at_rest)
    wait_until(lambda: output_tokens(daemon) - before >= delivered)
    assert output_tokens(daemon) - before == delivered


async def until(condition: Any) -> None:
    """Wait for what nobody announces, while this loop goes on."""
    await asyncio.to_thread(wait_until, condition)


async def away(seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    await until(lambda: time.monotonic() >= deadline_s)


async def refusal(client: EventClient, events: Events, path: str = "") -> Refused:
    """Return how going on is refused."""
    client.drop()
    with pytest.raises(Refused) as caught:
        await client.resume(events, path)
    client.drop()
    return caught.value


# -- through cuts -----------------------------------------------------------------------------------------------------


def test_events_through_cuts_lose_nothing(daemon: Daemon, generations: int) -> None:
    """Some connections are cut before their first byte, and most in the middle of a stream."""
    clients = 100

    async def talk(address: str, number: int) -> int:
        client = EventClient(address, daemon.keys["acme"], random.Random(number))
        delivered = 0
        for turn in range(generations // clients):
            seed = 100 * number + turn
            tokens = whole_tokens(PROMPT, 20 + seed % 20, seed)
            events = await client.stream(COMPLETIONS, fields(tokens, seed), f"k{seed}")
            assert events.text() == expected_text(PROMPT, tokens, seed)
            assert events.finish_reasons() == {0: "length"}
            assert events.usage["completion_tokens"] == tokens
            delivered += tokens
        client.drop()
        return delivered

    async def run() -> int:
        async with in_time(CHAOS_TIMEOUT_S), ChaosProxy(daemon.address, random.Random(5), 0.05, 1.5) as proxy:
            results = await asyncio.gather(*(talk(proxy.address, number) for number in range(clients)))
            assert proxy.cuts > clients * generations // 1000
            print(f"events: {generations} generations, {sum(results)} tokens, {proxy.cuts} cuts")
            return sum(results)

    before = output_tokens(daemon)
    ends_with(daemon, before, asyncio.run(run()))


def test_messages_through_cuts_lose_nothing(daemon: Daemon, generations: int) -> None:
    clients, at_once = 20, 5

    async def talk(address: str, number: int) -> int:
        delivered = 0
        choose = random.Random(number)
        async with JsonClient(address, daemon.keys["acme"], name=f"c{number}", choose=choose) as client:
            for turn in range(generations // clients // at_once):
                seeds = [1000 * number + 10 * turn + index for index in range(at_once)]
                wanted = {seed: whole_tokens(PROMPT, 20 + seed % 20, seed) for seed in seeds}
                streams = {seed: client.ask(PROMPT, seed=seed, max_tokens=wanted[seed]) for seed in seeds}
                for seed, stream in streams.items():
                    last = await stream.end()
                    assert stream.text == expected_text(PROMPT, wanted[seed], seed)
                    assert last["finish_reason"] == "length"
                    assert last["usage"]["completion_tokens"] == wanted[seed]
                    delivered += wanted[seed]
        return delivered

    async def run() -> int:
        async with in_time(CHAOS_TIMEOUT_S), ChaosProxy(daemon.address, random.Random(6), 0.05, 1.5) as proxy:
            delivered = await asyncio.gather(*(talk(proxy.address, number) for number in range(clients)))
            assert proxy.cuts > clients * generations // 1000
            print(f"messages: {generations} generations, {sum(delivered)} tokens, {proxy.cuts} cuts")
            return sum(delivered)

    before = output_tokens(daemon)
    ends_with(daemon, before, asyncio.run(run()))


# -- events -----------------------------------------------------------------------------------------------------------


@one_driver
def test_all_of_an_answer_is_right_after_going_on(daemon: Daemon) -> None:
    """Several choices, roles, log probabilities, the usage and the end, cut after each few events."""
    messages = [{"role": "user", "content": "Hello"}]
    tokens = 20
    body = fields(tokens, messages=messages, n=3, seed=7, temperature=1, logprobs=True, top_logprobs=1)

    async def read_in_pieces() -> Events:
        events, client = Events(), events_client(daemon)
        await client.ask(events, CHAT, body)
        while not events.is_done:
            with contextlib.suppress(AssertionError):
                await client.read(events, 3)
            client.drop()
            if not events.is_done:
                await client.resume(events, random.choice((CHAT, "")))
        return events

    async def run() -> Events:
        async with in_time():
            return await read_in_pieces()

    events = asyncio.run(run())
    assert [entry["delta"]["role"] for chunk in events.chunks for entry in chunk["choices"] if "role" in entry["delta"]]
    for choice in range(3):
        entries = [entry for chunk in events.chunks for entry in chunk["choices"] if entry["index"] == choice]
        assert sum(len(entry["logprobs"]["content"]) for entry in entries if entry["logprobs"]) == tokens
        assert events.text(choice) == expected_text(messages, tokens, 7 + choice)
    assert events.finish_reasons() == dict.fromkeys(range(3), "length")
    assert events.usage["completion_tokens"] == 3 * tokens
    assert len({chunk["id"] for chunk in events.chunks}) == 1
    wait_until(daemon.is_at_rest)


@one_driver
def test_a_drop_during_prefill_loses_nothing(daemon: Daemon) -> None:
    prompt = [300 + index % 50 for index in range(3000)]  # three seconds of reading for two
    tokens = whole_tokens(prompt, 50)

    async def run() -> None:
        async with in_time(), json_client(daemon, keeps_trying=False) as messages:
            client, events = events_client(daemon), Events()
            await client.ask(events, COMPLETIONS, fields(tokens, prompt=prompt))
            stream = messages.ask(prompt, max_tokens=tokens)
            await stream.wait(lambda stream: bool(stream.token))
            assert (events.seq, stream.seq) == (0, 0)
            before = output_tokens(daemon)
            client.drop()
            messages.drop()
            await until(lambda: output_tokens(daemon) == before + 2 * tokens)
            messages.reconnect()
            await client.resume(events)
            await client.read(events)
            await stream.end()
            assert events.text() == stream.text == expected_text(prompt, tokens)
            client.drop()

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


@one_driver
def test_a_stream_waits_for_its_time_and_is_gone_after_it(daemon: Daemon) -> None:
    tokens = whole_tokens(PROMPT, 100)

    async def run() -> None:
        async with in_time():
            client, events, longer = events_client(daemon, "brief"), Events(), Events()
            await client.ask(events, COMPLETIONS, fields(tokens))
            await client.read(events, 2)
            client.drop()
            await away(RESUME_FOR_S * 0.8)
            await client.resume(events)
            await client.read(events)
            assert events.text() == expected_text(PROMPT, tokens)
            await client.ask(longer, COMPLETIONS, fields(20_000))
            await client.read(longer, 2)
            client.drop()
            # When its time is up, it ends, though nobody asks for it.
            await until(lambda: daemon.tenant("brief").used.streams == 0)
            for path in ("", COMPLETIONS):
                refused = await refusal(client, longer, path)
                assert (refused.status, refused.error["code"]) == (410, "gone")
                assert refused.error["oldest_seq"] >= 1

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


@one_driver
def test_a_message_stream_waits_for_its_time_and_is_gone_after_it(daemon: Daemon) -> None:
    async def run() -> None:
        async with in_time(), json_client(daemon, "brief", keeps_trying=False) as client:
            stream = client.ask(PROMPT, max_tokens=20_000)
            await stream.wait(lambda stream: stream.seq > 3)
            client.drop()
            await until(lambda: daemon.tenant("brief").used.streams == 0)
            client.reconnect()
            error = (await stream.end())["error"]
            assert error["code"] == "gone"
            assert error["oldest_seq"] >= 1

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


@one_driver
def test_a_stream_of_somebody_else_is_not_found_and_is_audited(daemon: Daemon) -> None:
    tokens = whole_tokens(PROMPT, 100)

    async def run() -> None:
        async with in_time(), json_client(daemon, "globex") as stranger:
            client, events = events_client(daemon), Events()
            await client.ask(events, COMPLETIONS, fields(tokens))
            await client.read(events, 5)
            audited = daemon.log.read_text().count("audit: a client asks")
            thief = events_client(daemon, "globex")
            refused = await refusal(thief, events)
            assert (refused.status, refused.error["code"]) == (404, "not_found")
            stolen = await stranger.resume(events.token).end()
            assert stolen["error"]["code"] == "not_found"
            assert daemon.log.read_text().count("audit: a client asks") == audited + 2
            await client.read(events)  # it goes on as if nothing had been
            assert events.text() == expected_text(PROMPT, tokens)
            client.drop()

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


def test_a_reader_takes_the_stream_over(daemon: Daemon) -> None:
    """As when the client's side notices the end of a connection and the server's does not."""
    tokens = whole_tokens(PROMPT, 150)

    async def run() -> None:
        async with in_time():
            first, second, events = events_client(daemon), events_client(daemon), Events()
            await first.ask(events, COMPLETIONS, fields(tokens))
            await first.read(events, 5)
            await second.resume(events)
            stale = Events()
            stale.token, stale.seq = events.token, events.seq
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await first.read(stale)
            await second.read(events)
            assert events.text() == expected_text(PROMPT, tokens)
            second.drop()

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


def test_a_message_reader_takes_the_stream_over(daemon: Daemon) -> None:
    tokens = whole_tokens(PROMPT, 150)

    async def run() -> None:
        async with in_time(), json_client(daemon, keeps_trying=False) as first, json_client(daemon) as second:
            stream = first.ask(PROMPT, max_tokens=tokens)
            await stream.wait(lambda stream: stream.seq > 5)
            continued = second.resume(stream.token, stream.seq)
            assert first.socket is not None
            await first.socket.wait_closed()
            assert first.socket.close_code == 1001
            await continued.end()
            assert stream.text + continued.text == expected_text(PROMPT, tokens)

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


@one_driver
def test_a_request_may_be_sent_again_under_its_key(daemon: Daemon) -> None:
    tokens = whole_tokens(PROMPT, 40)

    async def run() -> None:
        async with in_time():
            before = output_tokens(daemon)
            client, lost, events = events_client(daemon), Events(), Events()
            await client.ask(lost, COMPLETIONS, fields(tokens), "my key")
            client.drop()
            await client.ask(events, COMPLETIONS, fields(tokens), "my key")
            await client.read(events)
            assert events.token == lost.token
            assert events.text() == expected_text(PROMPT, tokens)
            with pytest.raises(Refused) as caught:
                await client.ask(Events(), COMPLETIONS, fields(tokens, seed=1), "my key")
            assert (caught.value.status, caught.value.error["param"]) == (422, "idempotency_key")
            client.drop()
            await until(lambda: output_tokens(daemon) >= before + tokens)
            assert output_tokens(daemon) == before + tokens

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


@one_driver
def test_where_to_go_on_is_checked(daemon: Daemon) -> None:
    async def run() -> Events:
        async with in_time():
            client, events = events_client(daemon), Events()
            await client.ask(events, COMPLETIONS, fields(5))
            await client.read(events)
            assert await client.resume(events) == 204  # so a browser does not ask again
            client.drop()
            return events

    def ask(method: str, path: str, last_id: str | None = None) -> tuple[int, str]:
        with Connection(daemon.address) as connection:
            more = {} if last_id is None else {"Last-Event-ID": last_id}
            connection.send(request(method, path, daemon.keys["acme"], b"{}" if method == "POST" else None, more))
            response = connection.response()
            return response.status, "" if response.status == 200 else str(response.error["code"])

    events = asyncio.run(run())
    for bad in ("", "5", "a.b", f"{events.token}:", f"{events.token}:-1", f"{events.token}:x", events.id + ":1"):
        assert ask("POST", COMPLETIONS, bad)[0] in (400, 404)
    assert ask("POST", COMPLETIONS, f"{events.token}:{events.seq + 1}") == (400, "invalid_request")
    assert ask("GET", f"/v2/streams/{events.token}", "x.y:3") == (400, "invalid_request")
    assert ask("GET", f"/v2/streams/{events.token}:2")[0] == 200
    assert ask("GET", "/v2/streams/nothing%20such") == (404, "not_found")
    assert ask("PUT", f"/v2/streams/{events.token}")[0] == 405
    body = {"model": MODEL, "prompt": PROMPT, "resumable": True}
    with Connection(daemon.address) as connection:
        connection.send(request("POST", COMPLETIONS, daemon.keys["acme"], body))
        assert connection.response().error["param"] == "resumable"


@pytest.mark.parametrize(("is_away", "tokens"), [(True, 200), (False, 300)])
def test_who_takes_nothing_pauses_its_streams_and_gets_all_of_it_later(
    daemon: Daemon, is_away: bool, tokens: int
) -> None:
    """16 KiB may wait here, which is 60 events; a client that is there has some buffers besides."""

    async def run() -> None:
        async with in_time():
            before = output_tokens(daemon)
            client, events = EventClient(daemon.address, daemon.keys["acme"], receive_buffer_bytes=4096), Events()
            await client.ask(events, COMPLETIONS, fields(tokens, n=4, temperature=1))
            await client.read(events, 3)
            if is_away:
                client.drop()
            counts: list[int] = []

            def has_stopped() -> bool:
                counts.append(output_tokens(daemon) - before)
                time.sleep(0.05)
                return len(counts) > 20 and counts[-20] == counts[-1]

            await until(has_stopped)
            assert 30 < counts[-1] < 3.5 * tokens
            assert daemon.tenant("acme").used.streams == 4
            if is_away:
                await client.resume(events)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await client.read(events)
            client.drop()
            if not events.is_done:  # it took nothing for the idle timeout
                await client.resume(events)
                await client.read(events)
            assert [events.text(choice) for choice in range(4)] == [
                expected_text(PROMPT, tokens, choice) for choice in range(4)
            ]
            client.drop()

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


@one_driver
def test_openais_client_goes_on_by_counting(daemon: Daemon) -> None:
    """As the README says."""
    messages: Any = [{"role": "user", "content": "Hello"}]
    tokens = whole_tokens(messages, 60)
    with openai.OpenAI(base_url=f"http://{daemon.address}/v1", api_key=daemon.keys["acme"], max_retries=0) as client:
        text, seen = "", 0
        ask: Any = functools.partial(
            client.chat.completions.create, model=MODEL, messages=messages, max_tokens=tokens, stream=True
        )
        with ask(extra_body={"resumable": True}) as stream:
            token = stream.response.headers["X-Resume-Token"]
            for chunk in itertools.islice(stream, 20):
                seen += 1
                text += chunk.choices[0].delta.content or ""
        for chunk in ask(extra_headers={"Last-Event-ID": f"{token}:{seen}"}):
            text += chunk.choices[0].delta.content or ""
    assert text == expected_text(messages, tokens)


# -- ending -----------------------------------------------------------------------------------------------------------


def delete(daemon: Daemon, tenant: str, id: str) -> int:
    with Connection(daemon.address) as connection:
        connection.send(request("DELETE", f"/v2/streams/{id}", daemon.keys[tenant]))
        return connection.head()[0]


@one_driver
def test_a_stream_is_ended_by_its_id(daemon: Daemon) -> None:
    async def run() -> None:
        async with in_time(), json_client(daemon) as messages:
            client, events = events_client(daemon), Events()
            await client.ask(events, CHAT, fields(20_000, messages=[{"role": "user", "content": "Hi"}]))
            await client.read(events, 5)
            stream = messages.ask(PROMPT, max_tokens=20_000)
            await stream.wait(lambda stream: stream.seq > 5)
            for id in (events.token, stream.id):
                assert await asyncio.to_thread(delete, daemon, "globex", id) == 404
                assert await asyncio.to_thread(delete, daemon, "acme", id) == 204
            await client.read(events)
            assert events.is_done
            assert events.finish_reasons() == {0: "abort"}
            assert events.usage["completion_tokens"] >= 5
            assert (await stream.end())["finish_reason"] == "abort"
            # Once more, and it is not kept any more either.
            assert await asyncio.to_thread(delete, daemon, "acme", events.id) == 204
            assert (await refusal(client, events)).status == 410

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


@one_driver
def test_a_message_stream_is_cancelled_on_its_connection_and_by_a_close_of_1000(daemon: Daemon) -> None:
    async def run() -> None:
        async with in_time(), json_client(daemon, keeps_trying=False) as client:
            stream, other = client.ask(PROMPT, max_tokens=20_000), client.ask(PROMPT, max_tokens=20_000, seed=1)
            await other.wait(lambda stream: stream.seq > 5)
            client.send({"cancel": "s0"})
            last = await stream.end()
            assert last["finish_reason"] == "abort"
            whole = expected_text(PROMPT, last["usage"]["completion_tokens"])
            assert whole.removesuffix("\ufffd") == stream.text
            assert client.socket is not None
            await client.socket.close()
            await until(lambda: daemon.tenant("acme").used.streams == 0)
            client.reconnect()
            assert (await other.end())["error"]["code"] == "gone"

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


@one_driver
def test_a_stream_that_is_not_resumable_ends_with_its_connection(daemon: Daemon) -> None:
    with Connection(daemon.address) as connection:
        body = {**fields(20_000), "resumable": False}
        connection.send(request("POST", COMPLETIONS, daemon.keys["acme"], body))
        status, head = connection.head()
        assert status == 200
        assert not {"x-stream-id", "x-resume-token"} & head.keys()
        assert json.loads(next(connection.chunks()).removeprefix(b"data: "))["choices"]
    wait_until(daemon.is_at_rest)


@one_driver
def test_prompts_count_once(daemon: Daemon) -> None:
    """What is sent again is not read again."""

    async def run() -> Events:
        async with in_time():
            client = events_client(daemon)
            events = await client.stream(COMPLETIONS, fields(5))
            client.drop()
            return events

    assert asyncio.run(run()).usage["prompt_tokens"] == len(prompt_ids(PROMPT))


def test_a_stop_is_told_beside_the_streams_and_sends_away_who_has_one_left(tmp_path: Path) -> None:
    async def run(daemon: Daemon) -> None:
        async with in_time(), json_client(daemon, keeps_trying=False) as messages:
            client, events = events_client(daemon), Events()
            await client.ask(events, COMPLETIONS, fields(20_000))
            await client.read(events, 2)
            stream = messages.ask(PROMPT, max_tokens=20_000)
            await stream.wait(lambda stream: stream.seq > 2)
            daemon.signal(signal.SIGTERM)
            await messages.told.wait()
            assert messages.notes == [{"note": "draining", "retry_after_ms": 2000}]
            with pytest.raises(asyncio.IncompleteReadError):
                await client.read(events)
            assert client.notes == [b": draining\nretry: 2000\n"]
            assert messages.socket is not None
            await messages.socket.wait_closed()
            assert messages.socket.close_code == 1001
            assert stream.last is None
            assert not events.is_done
            client.drop()

    with running(tmp_path / "d", "acme", tables=TABLES | {"daemon": {"drain": "1s"}}) as daemon:
        asyncio.run(run(daemon))
        assert daemon.wait() == 0
