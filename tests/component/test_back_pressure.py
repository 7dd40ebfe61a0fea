"""Clients that stop reading: the engine leaves them out, keeps what they have, and goes on when they do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.daemon import DRIVERS, Daemon, running, wait_until
from support.live import LiveStreams
from support.raw_http import Connection, events, request
from support.synthetic import MODEL, expected_text

STALLED = 20
MAX_TOKENS = 4_000
TOKENS_PER_S = 500
RECEIVE_BUFFER_BYTES = 4096


@pytest.fixture(scope="module", params=DRIVERS)
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    tables = {
        "engine.synthetic": {"tokens_per_s": TOKENS_PER_S, "prompt_tokens_per_s": 0},
        "worker": {"max_backlog": "256KiB"},
    }
    with running(tmp_path_factory.mktemp("d"), "acme", "globex", io=request.param, tables=tables) as daemon:
        daemon.text("acme")
        yield daemon
        daemon.stop()


def stream(daemon: Daemon, tenant: str, seed: int, max_tokens: int, receive_buffer_bytes: int = 0) -> Connection:
    connection = Connection(daemon.address, receive_buffer_bytes=receive_buffer_bytes)
    body = {"model": MODEL, "prompt": "Once", "max_tokens": max_tokens, "stream": True, "seed": seed}
    connection.send(request("POST", "/v1/completions", daemon.keys[tenant], body))
    return connection


def read(connection: Connection) -> str:
    """Read a stream to its end; returns its text."""
    connection.head()
    return "".join(event["choices"][0]["text"] for event in events(b"".join(connection.chunks())))


def output_tokens(daemon: Daemon, tenant: str) -> int:
    engine = daemon.tenant(tenant).engine
    return 0 if engine is None else engine.output_tokens


def test_who_reads_nothing_takes_no_steps_and_gets_all_of_it_later(daemon: Daemon) -> None:
    before = output_tokens(daemon, "acme")
    stalled = [stream(daemon, "acme", seed, MAX_TOKENS, RECEIVE_BUFFER_BYTES) for seed in range(STALLED)]
    live = LiveStreams([stream(daemon, "globex", seed, 30_000) for seed in range(3)])
    counts: list[int] = []

    def has_stalled(seconds: float) -> bool:
        """Whether nothing has come for a second."""
        assert seconds < 30
        counts.append(output_tokens(daemon, "acme") - before)
        return len(counts) > 10 and counts[-10] == counts[-1] > 0

    try:
        live.watch(has_stalled, 0.1)
        assert counts[-1] < STALLED * MAX_TOKENS * 0.9
        engine = daemon.tenant("acme").engine
        assert engine is not None
        assert (engine.running, engine.is_held) == (STALLED, False)
        taken_s = engine.step_s
        live.watch(lambda seconds: seconds > 0.5)
        engine = daemon.tenant("acme").engine
        assert engine is not None
        assert engine.step_s == taken_s
        with ThreadPoolExecutor(STALLED) as threads:
            texts = list(threads.map(read, stalled))
        assert texts == [expected_text("Once", MAX_TOKENS, seed) for seed in range(STALLED)]
    finally:
        live.close()
        for connection in stalled:
            connection.close()
    wait_until(daemon.is_at_rest)
    assert output_tokens(daemon, "acme") - before == STALLED * MAX_TOKENS
