"""The FM door through the whole daemon: streams that outlive their connections."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import random
import re
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chaos_proxy import ChaosProxy
from support.daemon import DRIVERS, Daemon, running, wait_until
from support.fm_stream import FmClient, FmStream, SessionLost
from support.raw_http import Connection, request
from support.synthetic import MODEL, expected_text, prompt_ids, whole_tokens
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from seedance.daemon.protocol.fm_logprobs import Candidate
from seedance.daemon.protocol.fm_messages import End, Modality, Part
from seedance.daemon.protocol.fm_session import Options
from seedance.daemon.protocol.frame import CloseCode
from seedance.engine.scheduling import NOTHING_COUNTED

README = Path(__file__).parents[2] / "README.md"
PROMPT = "Once upon a time"
TIMEOUT_S = 60.0
CHAOS_TIMEOUT_S = 200.0
RESUME_FOR_S = 2.0
TABLES = {
    "listen": {"send_buffer": "16KiB"},
    "engine": {"max_model_len": 32768},
    "engine.synthetic": {"tokens_per_s": 500, "prompt_tokens_per_s": 4000},
    "worker": {"max_head": "8KiB", "max_message": "256KiB", "max_backlog": "64KiB"},
    "http": {"ping_interval": "1s", "idle_timeout": "2s"},
}


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


def client(daemon: Daemon, tenant: str = "acme", **options: Any) -> FmClient:
    return FmClient(options.pop("address", daemon.address), daemon.keys[tenant], **options)


@contextlib.asynccontextmanager
async def in_time(timeout_s: float = TIMEOUT_S) -> AsyncIterator[None]:
    async with asyncio.timeout(timeout_s):
        yield


def output_tokens(daemon: Daemon, tenant: str) -> int:
    return (daemon.tenant(tenant).engine or NOTHING_COUNTED).output_tokens


async def until(condition: Any) -> None:
    """Wait for what nobody announces, while this loop goes on."""
    await asyncio.to_thread(wait_until, condition)


async def refusal(stream: FmStream) -> str:
    """Return the code of the error that a stream ends with."""
    with pytest.raises(SessionLost) as caught:
        await stream.end()
    assert caught.value.error.message.startswith("cannot ")
    return caught.value.error.code


# -- streams ----------------------------------------------------------------------------------------------------------


def test_streams_of_one_session_have_the_engines_text_and_the_usage(daemon: Daemon) -> None:
    async def run() -> None:
        async with in_time(), client(daemon) as fm:
            tokens = {seed: whole_tokens(PROMPT, 100, seed) for seed in range(8)}
            streams = {seed: fm.ask(PROMPT, seed=seed, model=MODEL, max_tokens=tokens[seed]) for seed in tokens}
            for seed, stream in streams.items():
                end = await stream.end()
                assert stream.text == expected_text(PROMPT, tokens[seed], seed)
                assert (end.finish_reason, end.usage["completion_tokens"]) == ("length", tokens[seed])
                assert end.usage["prompt_tokens"] == len(prompt_ids(PROMPT))
                assert 0 < end.slo["first_token_ms"] < end.slo["total_ms"]
            assert len({stream.id for stream in streams.values()}) == len(streams)

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


def test_messages_and_token_ids_and_stop_strings(daemon: Daemon) -> None:
    async def run() -> None:
        messages = [{"role": "user", "content": "Hello"}]
        whole = expected_text([300, 301], 60)
        async with in_time(), client(daemon) as fm:
            chat = fm.ask(messages, max_tokens=whole_tokens(messages, 20))
            stopped = fm.ask([300, 301], max_tokens=60, stop=[whole[40:46]], logit_bias={5: 0.5})
            assert (await chat.end()).finish_reason == "length"
            assert chat.text == expected_text(messages, whole_tokens(messages, 20))
            assert (await stopped.end()).finish_reason == "stop"
            assert stopped.text == whole[:40]

    asyncio.run(run())


def test_prompts_in_parts_are_the_same_prompts(daemon: Daemon) -> None:
    async def run() -> None:
        text = "Once upon a time there was a long prompt. " * 150
        messages, ids = [{"role": "user", "content": text}], prompt_ids(text)
        async with in_time(), client(daemon, options=Options(payload_bytes=4096, bound_bytes=8192)) as fm:
            prompts: list[Any] = [text, messages, ids]
            tokens = [whole_tokens(prompt, 50) for prompt in prompts]
            streams = [fm.ask(prompt, max_tokens=count) for prompt, count in zip(prompts, tokens, strict=True)]
            fm.drop()
            for prompt, count, stream in zip(prompts, tokens, streams, strict=True):
                end = await stream.end()
                assert stream.text == expected_text(prompt, count)
                assert end.usage["prompt_tokens"] == len(prompt_ids(prompt))
            waiting = fm.ask("Hi", more=True)
            await waiting.wait(lambda stream: bool(stream.id))
            fm.part(Part(stream=waiting.number, modality=Modality.IMAGE, data=b""))
            assert await refusal(waiting) == "invalid_request"

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


def test_log_probabilities_are_those_of_the_other_doors(daemon: Daemon) -> None:
    async def run() -> list[list[Candidate]]:
        async with in_time(), client(daemon) as fm:
            stream = fm.ask(PROMPT, max_tokens=60, logprobs=2)
            await stream.wait(lambda stream: len(stream.positions) > 5)
            fm.drop()
            await stream.end()
            whole = expected_text(PROMPT, 60)
            assert whole.removesuffix("\ufffd") == stream.text.removesuffix("\ufffd")
            return stream.positions

    positions = asyncio.run(run())
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "logprobs": 2}
    with Connection(daemon.address) as connection:
        connection.send(request("POST", "/v1/completions", daemon.keys["acme"], body))
        logprobs = connection.response().json()["choices"][0]["logprobs"]
    assert [position[0].logprob for position in positions] == logprobs["token_logprobs"]
    assert [len(position) for position in positions] == [3] * 60
    assert [position[0].data.decode(errors="replace") for position in positions] == logprobs["tokens"]
    wait_until(daemon.is_at_rest)


def test_what_cannot_be_served_ends_with_an_error_and_changes_nothing(daemon: Daemon) -> None:
    async def run() -> None:
        async with in_time(), client(daemon) as fm:
            going = fm.ask(PROMPT, max_tokens=whole_tokens(PROMPT, 200))
            refused = {
                "not_found": fm.ask(PROMPT, model="gpt-4"),
                "context_too_long": fm.ask(" word" * 33_000),
                "invalid_request": fm.ask(PROMPT, temperature=3),
            }
            for code, stream in refused.items():
                assert await refusal(stream) == code
            for bad in ({"logprobs": 21}, {"n": 2}, {"deadline_ms": 0}, {"stop": [b"\xff"] * 20}):
                assert await refusal(fm.ask(PROMPT, **bad)) == "invalid_request"
            await going.end()
            assert going.text == expected_text(PROMPT, whole_tokens(PROMPT, 200))

    asyncio.run(run())


def test_who_is_over_a_limit_is_told_when_to_come_back(daemon: Daemon) -> None:
    async def run() -> None:
        daemon.add_tenant("small", "[tokens]\nstreams = 1\nper_minute = 100\n")
        await asyncio.to_thread(daemon.reload)
        async with in_time(), client(daemon, "small") as fm:
            stream = fm.ask(PROMPT, max_tokens=1000)
            assert await refusal(second := fm.ask(PROMPT)) == "rate_limited"
            assert second.last is not None
            assert second.last.retry_after_ms
            end = await stream.end()
            assert end.finish_reason == "quota_exceeded"
            assert end.usage["total_tokens"] == 100
            assert end.retry_after_ms
            assert end.retry_after_ms > 1000

    asyncio.run(run())


def test_a_text_message_is_refused(daemon: Daemon) -> None:
    headers = {"Authorization": f"Bearer {daemon.keys['acme']}"}
    uri = f"ws://{daemon.address}/v2/stream"
    with connect(uri, additional_headers=headers, subprotocols=[Subprotocol("seedance.fm.v1")], proxy=None) as socket:
        assert socket.subprotocol == "seedance.fm.v1"
        socket.send("hello")
        with pytest.raises(ConnectionClosed):
            socket.recv(TIMEOUT_S)
        assert socket.close_code == 1003
    with connect(uri, additional_headers=headers, proxy=None) as socket:
        socket.send(b"FM no frame")
        assert b"protocol_error" in socket.recv(TIMEOUT_S)
        with pytest.raises(ConnectionClosed):
            socket.recv(TIMEOUT_S)
        assert socket.close_code == 1002


# -- cancelling -------------------------------------------------------------------------------------------------------


def test_a_cancelled_stream_ends_with_what_there_was(daemon: Daemon) -> None:
    async def run() -> None:
        async with in_time(), client(daemon) as fm:
            stream, other = fm.ask(PROMPT, max_tokens=5000), fm.ask(PROMPT, max_tokens=5000, seed=1)
            await stream.wait(lambda stream: len(stream.data) > 50)
            fm.cancel(stream.number)
            end = await stream.end()
            assert end.finish_reason == "abort"
            assert expected_text(PROMPT, end.usage["completion_tokens"]).removesuffix("\ufffd") == stream.text
            assert other.last is None
            await until(lambda: daemon.tenant("acme").used.streams == 1)

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


def test_a_stream_is_cancelled_from_another_connection_while_its_client_is_away(daemon: Daemon) -> None:
    async def run() -> None:
        async with in_time(), client(daemon, keeps_trying=False) as fm, client(daemon, client_id="other") as other:
            stream = fm.ask(PROMPT, max_tokens=20_000)
            await stream.wait(lambda stream: bool(stream.id))
            fm.drop()
            before = output_tokens(daemon, "acme")
            await until(lambda: output_tokens(daemon, "acme") > before)  # a dropped connection is no cancel
            async with client(daemon, "globex") as stranger:
                stranger.cancel(id=stream.id)
                await stranger.wait(lambda client: bool(client.notes))
                assert stream.id in stranger.notes[0]
            assert daemon.tenant("acme").used.streams == 1
            other.cancel(id=stream.id)
            await until(lambda: daemon.tenant("acme").used.streams == 0)
            fm.reconnect()
            end = await stream.end()
            assert end.finish_reason == "abort"
            assert expected_text(PROMPT, end.usage["completion_tokens"]).removesuffix("\ufffd") == stream.text

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


def test_a_stream_is_ended_by_an_http_request(daemon: Daemon) -> None:
    def ask(method: str, tenant: str, id: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(daemon.address, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {daemon.keys[tenant]}"}
            connection.request(method, f"/v2/streams/{id}", headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode()

    async def run() -> None:
        async with in_time(), client(daemon) as fm:
            stream = fm.ask(PROMPT, max_tokens=20_000)
            await stream.wait(lambda stream: bool(stream.data))
            status, body = await asyncio.to_thread(ask, "DELETE", "globex", stream.id)
            assert (status, "not_found" in body) == (404, True)
            assert (await asyncio.to_thread(ask, "GET", "acme", stream.id))[0] == 404  # a session goes on with it
            assert (await asyncio.to_thread(ask, "PUT", "acme", stream.id))[0] == 405
            assert stream.last is None
            for _ in range(2):  # the second one is only late
                assert await asyncio.to_thread(ask, "DELETE", "acme", stream.id) == (204, "")
            assert (await stream.end()).finish_reason == "abort"

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


def test_a_close_of_1000_ends_the_session_and_its_streams(daemon: Daemon) -> None:
    async def run() -> None:
        async with in_time(), client(daemon) as fm:
            stream = fm.ask(PROMPT, max_tokens=20_000)
            await stream.wait(lambda stream: bool(stream.data))

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


# -- coming back ------------------------------------------------------------------------------------------------------


def test_streams_through_cuts_lose_nothing(daemon: Daemon) -> None:
    """Some connections are cut before their first frame, and none lives for a second."""
    choose = random.Random(5)
    generations, clients, at_once = 1000, 20, 5

    async def talk(address: str, number: int) -> int:
        async with client(daemon, address=address, client_id=f"c{number}", choose=random.Random(number)) as fm:
            for turn in range(generations // clients // at_once):
                seeds = [1000 * number + 10 * turn + index for index in range(at_once)]
                wanted = {seed: whole_tokens(PROMPT, 60 + seed % 60, seed) for seed in seeds}
                streams = {seed: fm.ask(PROMPT, seed=seed, max_tokens=wanted[seed]) for seed in seeds}
                for seed, stream in streams.items():
                    end = await stream.end()
                    assert stream.text == expected_text(PROMPT, wanted[seed], seed)
                    assert (end.finish_reason, end.usage["completion_tokens"]) == ("length", wanted[seed])
            assert all(welcome.continued for welcome in fm.welcomes[1:])
            return sum(end.usage["completion_tokens"] for end in map(_end, fm.streams.values()))

    async def run() -> int:
        async with in_time(CHAOS_TIMEOUT_S), ChaosProxy(daemon.address, choose, 0.05, 0.8) as proxy:
            delivered = await asyncio.gather(*(talk(proxy.address, number) for number in range(clients)))
            assert proxy.cuts > 2 * clients
            print(f"frames: {generations} generations, {sum(delivered)} tokens, {proxy.cuts} cuts")
            return sum(delivered)

    before = output_tokens(daemon, "acme")
    delivered = asyncio.run(run())
    wait_until(lambda: daemon.tenant("acme").used.streams == 0)
    wait_until(lambda: output_tokens(daemon, "acme") - before >= delivered)
    assert output_tokens(daemon, "acme") - before == delivered


def _end(stream: FmStream) -> End:
    assert isinstance(stream.last, End)
    return stream.last


def test_a_drop_during_prefill_loses_nothing(daemon: Daemon) -> None:
    prompt = [300 + index % 50 for index in range(6000)]  # a second and a half of reading
    tokens = whole_tokens(prompt, 50)

    async def run() -> None:
        async with in_time(), client(daemon, keeps_trying=False) as fm:
            stream = fm.ask(prompt, max_tokens=tokens)
            await stream.wait(lambda stream: bool(stream.id))
            assert not stream.data
            before = output_tokens(daemon, "acme")
            fm.drop()
            await until(lambda: output_tokens(daemon, "acme") == before + tokens)
            assert not stream.data
            fm.reconnect()
            await stream.end()
            assert stream.text == expected_text(prompt, tokens)

    asyncio.run(run())


def test_a_session_waits_for_its_time_and_is_gone_after_it(daemon: Daemon) -> None:
    tokens = whole_tokens(PROMPT, 100)

    async def run() -> None:
        async with in_time(), client(daemon, "brief", keeps_trying=False) as fm:
            assert fm.welcomes[0].resume_for_ms == 1000 * RESUME_FOR_S
            first = fm.ask(PROMPT, max_tokens=tokens)
            await first.wait(lambda stream: bool(stream.data))
            fm.drop()
            await _away(RESUME_FOR_S * 0.8)
            fm.reconnect()
            await first.end()
            assert first.text == expected_text(PROMPT, tokens)
            second = fm.ask(PROMPT, max_tokens=20_000)
            await second.wait(lambda stream: bool(stream.data))
            fm.drop()
            await until(lambda: daemon.tenant("brief").connections == 0)
            # When its time is up, its streams end, though nobody asks for it.
            await until(lambda: daemon.tenant("brief").used.streams == 0)
            fm.reconnect()
            with pytest.raises(SessionLost) as caught:
                await fm.wait(lambda client: len(client.welcomes) > 2)
            error = caught.value.error
            assert error.code == "gone"
            assert error.oldest_seq is not None
            assert error.oldest_seq > 1

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


async def _away(seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    await until(lambda: time.monotonic() >= deadline_s)


def test_a_session_of_somebody_else_is_not_found_and_is_audited(daemon: Daemon) -> None:
    async def run() -> None:
        async with in_time(), client(daemon, keeps_trying=False) as fm:
            stream = fm.ask(PROMPT, max_tokens=whole_tokens(PROMPT, 300))
            await stream.wait(lambda stream: bool(stream.data))
            fm.drop()
            for tenant, client_id in (("globex", "test"), ("acme", "somebody")):
                thief = client(daemon, tenant, client_id=client_id)
                thief.session._welcome = fm.session._welcome  # it has seen the token
                with pytest.raises(SessionLost) as caught:
                    async with thief:
                        pass
                assert caught.value.error.code == "not_found"
                assert caught.value.error.oldest_seq is None
                await thief.leave()
            assert daemon.log.read_text().count("audit: client") >= 2
            fm.reconnect()
            await stream.end()
            assert stream.text == expected_text(PROMPT, whole_tokens(PROMPT, 300))

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


def test_a_token_is_good_after_the_workers_death(daemon: Daemon) -> None:
    async def run() -> None:
        async with in_time(), client(daemon, "globex") as fm:
            tokens = whole_tokens(PROMPT, 300)
            stream = fm.ask(PROMPT, max_tokens=tokens)
            await stream.wait(lambda stream: bool(stream.data))
            await asyncio.to_thread(daemon.kill, daemon.tenant("globex").worker_pid)
            await fm.wait(lambda client: len(client.welcomes) > 1)
            assert fm.welcomes[1].continued
            assert fm.welcomes[1].session_id == fm.welcomes[0].session_id
            await stream.end()
            assert stream.text == expected_text(PROMPT, tokens)

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


def test_a_connection_that_is_taken_over_by_another_one_is_closed(daemon: Daemon) -> None:
    """As when the client's side notices the end of a connection and the server's does not."""

    async def run() -> None:
        async with in_time(), client(daemon) as fm:
            stream = fm.ask(PROMPT, max_tokens=whole_tokens(PROMPT, 300))
            await stream.wait(lambda stream: len(stream.data) > 300)  # so some of it has been acknowledged
            successor = client(daemon)
            successor.session._welcome = fm.session._welcome
            with pytest.raises(SessionLost) as caught:
                async with successor:
                    pass
            assert caught.value.error.code == "gone"  # it lacks what the first one has acknowledged
            await successor.leave()
            await stream.end()
            assert stream.text == expected_text(PROMPT, whole_tokens(PROMPT, 300))
            assert fm.connections >= 2

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


@pytest.mark.parametrize("is_away", [True, False])
def test_who_takes_nothing_pauses_its_streams_and_gets_all_of_it_later(daemon: Daemon, is_away: bool) -> None:
    tokens = whole_tokens(PROMPT, 2500)

    async def run() -> None:
        async with in_time(), client(daemon, keeps_trying=not is_away) as fm:
            before = output_tokens(daemon, "acme")
            streams = [fm.ask(PROMPT, max_tokens=tokens) for _ in range(4)]
            for stream in streams:
                await stream.wait(lambda stream: bool(stream.data))
            if is_away:
                fm.drop()
            else:
                fm.reading.clear()
            counts: list[int] = []

            def has_stopped() -> bool:
                counts.append(output_tokens(daemon, "acme") - before)
                time.sleep(0.05)
                return len(counts) > 20 and counts[-20] == counts[-1]

            await until(has_stopped)
            assert 1000 < counts[-1] < 3 * tokens
            assert daemon.tenant("acme").used.streams == 4
            fm.reading.set()
            fm.reconnect()
            for stream in streams:
                await stream.end()
                assert stream.text == expected_text(PROMPT, tokens)

    asyncio.run(run())
    wait_until(daemon.is_at_rest)


def test_the_example_of_the_readme_loses_nothing_either(daemon: Daemon, tmp_path: Path) -> None:
    tokens = whole_tokens(PROMPT, 500)
    found = re.search(r"```python\n(import asyncio, random.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    example = tmp_path / "example.py"

    async def run() -> str:
        async with in_time(), ChaosProxy(daemon.address, random.Random(3), 0.1, 0.4) as proxy:
            code = found[1].replace("127.0.0.1:8000", proxy.address).replace("gemma-3-270m", MODEL)
            code = code.replace('"max_tokens": 64', f'"max_tokens": {tokens}')
            example.write_text(code.replace("sk-seed-…", daemon.keys["acme"]))
            process = await asyncio.create_subprocess_exec(sys.executable, str(example), stdout=PIPE)
            output, _ = await process.communicate()
            assert process.returncode == 0
            assert proxy.cuts > 0
            return output.decode()

    assert asyncio.run(run()) == expected_text(PROMPT, tokens)
    wait_until(daemon.is_at_rest)


def test_a_stop_is_told_and_sends_away_who_has_a_stream_left(tmp_path: Path) -> None:
    async def run(daemon: Daemon) -> None:
        async with in_time(), client(daemon, keeps_trying=False) as fm:
            stream = fm.ask(PROMPT, max_tokens=20_000)
            await stream.wait(lambda stream: bool(stream.data))
            daemon.signal(signal.SIGTERM)
            await fm.wait(lambda client: bool(client.notes))
            refused = fm.ask(PROMPT)
            assert await refusal(refused) == "overloaded"
            assert refused.last is not None
            assert refused.last.retry_after_ms
            assert fm.notes == ["draining"]
            assert fm.last_note is not None
            assert fm.last_note.retry_after_ms == 2000
            assert fm.socket is not None
            await fm.socket.wait_closed()
            assert fm.socket.close_code == CloseCode.GOING_AWAY
            assert stream.last is None

    with running(tmp_path / "d", "acme") as daemon:
        asyncio.run(run(daemon))
        assert daemon.wait() == 0
