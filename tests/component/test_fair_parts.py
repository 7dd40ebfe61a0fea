"""Two tenants of one class, and so two workers: who asks more often gets no more of the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from support.daemon import Daemon, wait_until, working
from support.raw_http import Connection, request
from support.synthetic import MODEL

SLOTS = 8
CLIENTS = {"few": 10, "many": 40}
MAX_TOKENS = 20
WARM_UP_S, MEASURED_S = 2.0, 10.0


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    tables = {"engine": {"max_streams": SLOTS}, "engine.synthetic": {"tokens_per_s": 100, "prompt_tokens_per_s": 0}}
    limits = dict.fromkeys(CLIENTS, "[tokens]\nstreams = 64\n[requests]\nqueue = 64\n")
    with working(tmp_path_factory.mktemp("d"), limits, tables=tables) as daemon:
        yield daemon


def ask_again_and_again(daemon: Daemon, tenant: str, is_over: threading.Event, refusals: list[int]) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": MAX_TOKENS}
    with Connection(daemon.address) as connection:
        while not is_over.is_set():
            connection.send(request("POST", "/v1/completions", daemon.keys[tenant], body))
            status = connection.response().status
            if status != 200:
                refusals.append(status)
                return


def used(daemon: Daemon) -> dict[str, tuple[float, int]]:
    """Return each tenant's engine time and tokens so far."""
    entries = {tenant: daemon.tenant(tenant).engine for tenant in CLIENTS}
    return {name: (entry.step_s, entry.output_tokens) for name, entry in entries.items() if entry is not None}


def test_four_times_the_requests_give_no_more_of_the_engine(daemon: Daemon) -> None:
    is_over, refusals = threading.Event(), list[int]()
    threads = [
        threading.Thread(target=ask_again_and_again, args=(daemon, tenant, is_over, refusals))
        for tenant, count in CLIENTS.items()
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        time.sleep(WARM_UP_S)
        before = used(daemon)
        time.sleep(MEASURED_S)
        after = used(daemon)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(30)
    assert refusals == []
    wait_until(daemon.is_at_rest)
    for number, what in enumerate(("of its time", "of its tokens")):
        gained = {tenant: after[tenant][number] - before[tenant][number] for tenant in CLIENTS}
        part = gained["few"] / sum(gained.values())
        print(f"10 clients beside 40 have {part:.3f} {what}")
        assert part == pytest.approx(0.5, rel=0.05)
