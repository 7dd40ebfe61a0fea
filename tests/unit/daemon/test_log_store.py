"""Who has which log, and what the service manager is told of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from seedance.daemon import shared_log
from seedance.daemon.log_store import LogStore


class Manager:
    """A service manager's store."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def store(self, name: str, fd: int) -> bool:
        assert os.fstat(fd).st_size == shared_log.LOG_BYTES
        self.names.append(name)
        return True

    def discard(self, name: str) -> bool:
        self.names.remove(name)
        return True


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture
def inherited() -> Iterator[int]:
    fd = shared_log.create("test")
    log = shared_log.SharedLog(os.dup(fd))
    log.set_count(3)
    log.close()
    yield fd


def test_a_tenant_has_one_log_which_is_stored_when_it_is_made(manager: Manager, inherited: int) -> None:
    logs = LogStore({"acme": inherited}, manager.store, manager.discard)
    assert (logs.of("acme"), logs.sessions("acme")) == (inherited, 3)
    assert (logs.of("globex"), logs.sessions("globex")) == (logs.of("globex"), 0)
    assert (logs.tenants, manager.names) == (["acme", "globex"], ["sessions-globex"])
    logs.close()
    assert manager.names == ["sessions-globex"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(inherited)


def test_what_is_dropped_is_stored_no_longer(manager: Manager) -> None:
    logs = LogStore({}, manager.store, manager.discard)
    fd = logs.of("acme")
    logs.drop("acme")
    logs.drop("acme")
    assert (logs.tenants, logs.sessions("acme"), manager.names) == ([], 0, [])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
