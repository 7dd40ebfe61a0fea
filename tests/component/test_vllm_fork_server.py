"""A host that takes over the fork server of the last one, as real processes without vLLM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from support.vllm_family import Family

from seedance.engine import vllm_control as control
from seedance.engine.ledger import Ledger
from seedance.engine.vllm_control import VllmSettings
from seedance.engine.vllm_fork_server import ForkServer
from seedance.engine.vllm_process import identity_of
from seedance.errors import EngineDead

LIMIT_S = 10.0


class Client:
    """Who hears of a core."""

    def __init__(self) -> None:
        self.ends: asyncio.Queue[str] = asyncio.Queue()

    def core_launched(self, pid: int) -> None:
        raise AssertionError("nothing was launched")

    def core_resolved(self, resolved: control.Resolved) -> None:
        raise AssertionError("nothing was launched")

    def core_ended(self, reason: str) -> None:
        self.ends.put_nowait(reason)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with closing(Ledger.create()) as ledger:
        yield ledger


def settings(run_dir: Path) -> VllmSettings:
    return VllmSettings(model="m", name="m", run_dir=str(run_dir), threads=1)


def all_of(cores: Sequence[control.LeftCore]) -> list[control.LeftCore]:
    return list(cores)


def left_family(run_dir: Path, identity: str) -> tuple[Family, int, list[int]]:
    """Return a fork server with two cores, of which one was up, and whose host is dead."""
    family = Family(run_dir / "fork-server", identity=identity)
    (zygote, first), (_, second) = family.launch(), family.launch(2)
    family.tell("serving 1")
    family.end_adapter()
    return family, zygote, [first, second]


def test_the_next_host_chooses_among_the_cores_and_hears_of_their_ends(tmp_path: Path, ledger: Ledger) -> None:
    async def take_over() -> None:
        server = ForkServer(settings(tmp_path), ledger)
        family, zygote, (first, second) = left_family(tmp_path, identity_of(server.settings, ledger))
        with closing(family):
            (core,) = await server.take_over(lambda cores: [core for core in cores if core.serving is not None])
            assert (core.pid, core.launch.launch, server.hosts) == (first, 1, 2)
            await server.wait_ended(2)
            assert family.ended(second)
            with pytest.raises(EngineDead, match="it ended when its host had died"):
                server.adopt(2, Client())
            client = Client()
            server.adopt(1, client)
            await server.ready()
            assert family.running(first)
            assert server.admit(client) == 3
            family.signal(first, signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                assert "SIGKILL" in await client.ends.get()
            await server.stop()
            assert family.ended(zygote)
        assert not (tmp_path / "fork-server").exists()

    asyncio.run(take_over())


def test_a_fork_server_that_was_started_otherwise_is_ended(tmp_path: Path, ledger: Ledger) -> None:
    async def take_over() -> None:
        server = ForkServer(settings(tmp_path), ledger)
        family, zygote, cores = left_family(tmp_path, "another version")
        with closing(family):
            assert await server.take_over(all_of) == []
            assert all(map(family.ended, (zygote, *cores)))

    asyncio.run(take_over())


def test_where_there_was_no_host_nothing_is_taken_over(tmp_path: Path, ledger: Ledger) -> None:
    server = ForkServer(settings(tmp_path), ledger)
    assert asyncio.run(server.take_over(all_of)) == []
    (tmp_path / "fork-server").touch()
    assert asyncio.run(server.take_over(all_of)) == []
