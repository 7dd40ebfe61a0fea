"""The daemon that the tests of its doors share, once on each driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.daemon import DRIVERS, Daemon, running, wait_until

TABLES = {
    "engine": {"max_model_len": 8192},
    "engine.synthetic": {"tokens_per_s": 500, "prompt_tokens_per_s": 5000},
    "worker": {"max_head": "8KiB", "max_body": "1MiB", "max_message": "64KiB", "max_backlog": "64KiB"},
    "http": {"ping_interval": "1s", "head_timeout": "1s", "body_timeout": "1s", "idle_timeout": "2s"},
}


@pytest.fixture(scope="session", params=DRIVERS)
def shared_daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("d"), "acme", "globex", io=request.param, tables=TABLES) as daemon:
        for tenant in daemon.keys:
            daemon.text(tenant)
            assert daemon.tenant(tenant).driver == request.param
        yield daemon
        daemon.stop()


@pytest.fixture
def doors(shared_daemon: Daemon) -> Iterator[Daemon]:
    """A running daemon; each test must leave it at rest."""
    yield shared_daemon
    wait_until(shared_daemon.is_at_rest, 10)
