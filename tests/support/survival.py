"""Daemons that are to die under streams: parts of one, or all of one whose service manager keeps its descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from support.daemon import Daemon, running, wait_until
from support.fd_store import FdStore

TABLES: Final[dict[str, dict[str, Any]]] = {
    "engine": {"max_model_len": 8192},
    "engine.synthetic": {"tokens_per_s": 100, "prompt_tokens_per_s": 20_000},
}
QUOTA: Final = "[tokens]\nstreams = 128\n"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Daemon]:
    """Run a daemon with the tenant acme, of whose streams nothing may be left at the end."""
    with running(folder, tables=TABLES) as daemon:
        daemon.add_tenant("acme", QUOTA)
        daemon.reload()
        yield daemon
        wait_until(daemon.is_at_rest)
        daemon.stop()


@contextlib.contextmanager
def managed(folder: Path) -> Iterator[tuple[Daemon, FdStore]]:
    """Run a daemon with the tenant acme under a service manager; whoever ends it starts it again."""
    store = FdStore(folder / "notify.sock")
    daemon = Daemon(folder / "d", tables=TABLES, store=store)
    try:
        daemon.add_tenant("acme", QUOTA)
        daemon.start()
        yield daemon, store
    finally:
        daemon.close()
        store.close()


async def kill_all(daemon: Daemon) -> None:
    """Be a service manager that has lost the main process."""
    daemon.signal(signal.SIGKILL)
    await asyncio.to_thread(daemon.close)


async def stop(daemon: Daemon) -> None:
    """Be a service manager that restarts a service."""
    await asyncio.to_thread(daemon.stop)


both_ends = pytest.mark.parametrize("end", [kill_all, stop], ids=["killed", "stopped"])


def worker(daemon: Daemon) -> int:
    """Return the process id of acme's worker, 0 when there is none."""
    return daemon.tenant("acme").worker_pid
