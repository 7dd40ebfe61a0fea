"""Processes that are killed while streams run: clients are told, and what comes next works."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.daemon import DRIVERS, Daemon, running, wait_until
from support.raw_http import Connection, request
from support.synthetic import MODEL, expected_text, whole_tokens
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import ClientConnection, connect

COMPLETIONS = "/v1/completions"
PROMPT = "Once upon a time"
LONG: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10_000}


@pytest.fixture(scope="module", params=DRIVERS)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("d"), "acme", "globex", io=request.param) as daemon:
        yield daemon
        daemon.stop()


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """A daemon that serves both tenants, before and after."""
    wait_until(lambda: serves(shared, "acme") and serves(shared, "globex"))
    yield shared
    wait_until(lambda: serves(shared, "acme") and serves(shared, "globex"))
    wait_until(shared.is_at_rest)


def serves(daemon: Daemon, tenant: str) -> bool:
    with Connection(daemon.address) as connection:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5}
        connection.send(request("POST", COMPLETIONS, daemon.keys[tenant], body))
        response = connection.response()
    if response.status != 200:
        assert response.status == 503
        assert response.error["code"] in ("overloaded", "engine_unavailable")
        assert int(response.fields["retry-after"]) >= 1
        return False
    return bool(response.json()["choices"][0]["text"] == expected_text(PROMPT, 5))


def started(daemon: Daemon, tenant: str, *, stream: bool, **body: Any) -> Connection:
    """Begin a long request, and wait until it is under way."""
    before = daemon.tenant(tenant).used
    connection = Connection(daemon.address)
    connection.send(request("POST", COMPLETIONS, daemon.keys[tenant], {**LONG, **body, "stream": stream}))
    wait_until(lambda: daemon.tenant(tenant).used.streams == before.streams + 1)
    return connection


def infer(daemon: Daemon, tenant: str) -> ClientConnection:
    headers = {"Authorization": f"Bearer {daemon.keys[tenant]}"}
    return connect(f"ws://{daemon.address}/v2/infer", additional_headers=headers, proxy=None)


def test_a_killed_worker_closes_its_clients_and_no_one_elses(daemon: Daemon) -> None:
    other = started(daemon, "globex", stream=True)
    with (
        started(daemon, "acme", stream=True) as stream,
        started(daemon, "acme", stream=False) as whole,
        infer(daemon, "acme") as socket,
    ):
        socket.send(json.dumps(LONG))
        assert "delta" in json.loads(socket.recv(10))
        pid = daemon.tenant("acme").worker_pid
        daemon.kill(pid)
        assert b"[DONE]" not in stream.rest()
        assert whole.is_closed()
        with pytest.raises(ConnectionClosedError):
            while True:
                socket.recv(10)
    # The engine ends what it did for it, and only that.
    wait_until(lambda: _running(daemon) == 1)
    with openai.OpenAI(base_url=f"http://{daemon.address}/v1", api_key=daemon.keys["acme"], max_retries=8) as client:
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=9)
        assert answer.choices[0].text == expected_text(PROMPT, 9)
    assert daemon.tenant("acme").worker_pid not in (0, pid)
    assert other.head()[0] == 200
    chunks = other.chunks()
    assert b"".join(next(chunks) for _ in range(3))
    other.close()


def _running(daemon: Daemon) -> int:
    statistics = daemon.status().engine.statistics
    return -1 if statistics is None else statistics.running


def test_streams_of_every_door_outlive_a_killed_engine_host(daemon: Daemon) -> None:
    worker = daemon.tenant("acme").worker_pid
    body = {**LONG, "max_tokens": whole_tokens(PROMPT, 100)}
    text = expected_text(PROMPT, body["max_tokens"])
    with (
        started(daemon, "acme", stream=True, **body) as stream,
        started(daemon, "acme", stream=False, **body) as whole,
        infer(daemon, "acme") as socket,
    ):
        for stream_id in ("a", "b"):
            socket.send(json.dumps({"id": stream_id, **body}))
        texts = {"a": "", "b": ""}
        received = json.loads(socket.recv(10))
        pid = daemon.child("engine host").pid
        daemon.kill(pid)
        answer = stream.response().body
        assert b": engine restarting\n" in answer
        events = [json.loads(event) for event in re.findall(rb"data: ({.*})\n", answer)]
        assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == text
        assert whole.response().json()["choices"][0]["text"] == text
        ended: dict[str, str] = {}
        while len(ended) < 2:
            texts[received["id"]] += received.get("delta", "")
            if "finish_reason" in received:
                ended[received["id"]] = received["finish_reason"]
            if len(ended) < 2:
                received = json.loads(socket.recv(10))
        assert ended == {"a": "length", "b": "length"}
        assert set(texts.values()) == {text}
    assert daemon.tenant("acme").worker_pid == worker
    assert daemon.child("engine host").pid not in (0, pid)


def test_while_the_engine_is_away_requests_and_health_say_so(daemon: Daemon) -> None:
    daemon.kill(daemon.child("engine host").pid)
    seen = set()
    with Connection(daemon.address) as health:

        def is_back() -> bool:
            health.send(request("GET", "/healthz"))
            response = health.response()
            seen.add(response.status)
            return response.status == 200 and len(seen) > 1

        wait_until(is_back)
    assert seen == {200, 503}


def test_a_frozen_worker_holds_up_nobody_else(daemon: Daemon) -> None:
    pid = daemon.tenant("acme").worker_pid
    assert pid
    with started(daemon, "acme", stream=True):
        os.kill(pid, signal.SIGSTOP)
        try:
            with Connection(daemon.address) as stuck:
                stuck.send(request("GET", "/v1/models", daemon.keys["acme"]))
                for _ in range(5):
                    assert serves(daemon, "globex")
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_zygote_that_dies_or_hangs_is_followed_by_another(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody wants a worker meanwhile: the daemon finds out by itself, of one that hangs as its manager watches."""
    if number == signal.SIGSTOP:
        monkeypatch.setenv("WATCHDOG_USEC", "6000000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
    with running(tmp_path / "d", "acme", "globex") as daemon:
        wait_until(lambda: serves(daemon, "acme"))
        zygote, worker = daemon.child("zygote").pid, daemon.tenant("acme").worker_pid
        with started(daemon, "acme", stream=True) as stream:
            os.kill(zygote, number)
            wait_until(lambda: daemon.child("zygote").pid not in (0, zygote))
            assert not Path(f"/proc/{zygote}").exists()
            wait_until(lambda: serves(daemon, "globex"))
            assert daemon.tenant("acme").worker_pid == worker
            assert stream.head()[0] == 200
            chunks = stream.chunks()
            assert b"".join(next(chunks) for _ in range(3))
        # The last zygote's worker is now the daemon's own child; its end is seen, too.
        daemon.kill(worker)
        wait_until(lambda: serves(daemon, "acme"))
        assert daemon.tenant("acme").worker_pid not in (0, worker)
        assert daemon.child("zygote").restarts >= 1
        daemon.stop()


def test_a_stop_waits_for_the_streams_that_end_in_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("d"), "acme") as daemon:
        fields = {**LONG, "max_tokens": 60, "logprobs": 3, "stream": True}
        with Connection(daemon.address) as ends, started(daemon, "acme", stream=True) as endless:
            ends.send(request("POST", COMPLETIONS, daemon.keys["acme"], fields))
            assert ends.head()[0] == 200
            daemon.signal(signal.SIGTERM)
            body = b"".join(ends.chunks())
            assert body.endswith(b"data: [DONE]\n\n")
            assert endless.head()[0] == 200
            assert daemon.wait() == 0
        assert daemon.processes() == []
