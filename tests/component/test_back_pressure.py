"""Clients that stop reading: the engine leaves them out, keeps what they have, and goes on when they do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.daemon import DRIVERS, Daemon, part_of, running, wait_until
from support.live import LiveStreams, percentile
from support.raw_http import Connection, events, request
from support.synthetic import MODEL, expected_text

from seedance.engine.scheduling import NOTHING_COUNTED, TenantStatistics
from seedance.engine.synthetic import BLOCK_TOKENS

STALLED = 200
LIVE = 3
MAX_TOKENS = 500
TOKENS_PER_S = 100
RECEIVE_BUFFER_BYTES = 4096


@pytest.fixture(scope="module", params=DRIVERS)
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    tables = {
        "listen": {"send_buffer": "16KiB"},  # so that a client that reads nothing is soon behind
        "engine": {"max_streams": 256},  # one of 32 is kept for tenants that use little
        "engine.synthetic": {"tokens_per_s": TOKENS_PER_S, "prompt_tokens_per_s": 0},
        "worker": {"max_backlog": "32KiB"},
    }
    with running(tmp_path_factory.mktemp("d"), "globex", io=request.param, tables=tables) as daemon:
        daemon.add_tenant("acme", f"[tokens]\nstreams = {STALLED}\n[requests]\nqueue = {STALLED}\n")
        daemon.reload()
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


def of_engine(daemon: Daemon, tenant: str) -> TenantStatistics:
    return daemon.tenant(tenant).engine or NOTHING_COUNTED


def output_tokens(daemon: Daemon, tenant: str) -> int:
    return of_engine(daemon, tenant).output_tokens


def test_who_reads_nothing_takes_no_steps_and_gets_all_of_it_later(daemon: Daemon) -> None:
    clients = part_of(STALLED, daemon.tenant("acme").driver)
    before = output_tokens(daemon, "acme")
    live = LiveStreams([stream(daemon, "globex", seed, 30_000) for seed in range(LIVE)])
    stalled: list[Connection] = []
    counts: list[int] = []

    def has_stalled(seconds: float) -> bool:
        """Whether nothing has come for a second."""
        assert seconds < 30
        counts.append(output_tokens(daemon, "acme") - before)
        return len(counts) > 10 and counts[-10] == counts[-1] > 0

    try:
        live.watch(lambda seconds: seconds > 0.5)
        alone, _ = live.watch(lambda seconds: seconds > 2.0)
        stalled += [stream(daemon, "acme", seed, MAX_TOKENS, RECEIVE_BUFFER_BYTES) for seed in range(clients)]
        live.watch(has_stalled, 0.1)
        assert counts[-1] < clients * MAX_TOKENS * 0.9
        held = of_engine(daemon, "acme")
        assert (held.running, held.is_held) == (clients, False)
        assert held.kv_blocks >= counts[-1] // BLOCK_TOKENS, "what was computed is kept"
        beside, _ = live.watch(lambda seconds: seconds > 2.0)
        later = of_engine(daemon, "acme")
        assert (later.step_s, later.kv_blocks) == (held.step_s, held.kv_blocks)
        p99_ms = [1000 * percentile(gaps, 0.99) for gaps in (alone, beside)]
        print(
            f"time between tokens, p99: {p99_ms[0]:.1f} ms alone, {p99_ms[1]:.1f} ms beside {clients} that read nothing"
        )
        assert p99_ms[1] < max(1.5 * p99_ms[0], p99_ms[0] + 1000 / TOKENS_PER_S)
        with ThreadPoolExecutor(clients) as threads:
            texts = list(threads.map(read, stalled))
        assert texts == [expected_text("Once", MAX_TOKENS, seed) for seed in range(clients)]
    finally:
        live.close()
        for connection in stalled:
            connection.close()
    wait_until(daemon.is_at_rest)
    assert output_tokens(daemon, "acme") - before == clients * MAX_TOKENS
