"""Starts that cannot succeed, with real processes and without vLLM: each gives one clear sentence, quickly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from seedance.engine.adapter import EngineState, Output
from seedance.engine.ledger import Ledger
from seedance.engine.request import Sampling, TenantContext
from seedance.engine.vllm import VllmAdapter, VllmSettings
from seedance.errors import EngineDead

TENANT = TenantContext(name="acme", scheduling_class="gold", cache_salt="s")


class States:
    """Keep what an adapter tells of its state."""

    def __init__(self) -> None:
        self.seen: list[EngineState] = []

    def step_completed(self, outputs: Sequence[Output], singles: bytes = b"") -> None:
        raise AssertionError(f"an engine that never started gave {outputs}")

    def state_changed(self, state: EngineState, detail: str) -> None:
        self.seen.append(state)


def start_failure(settings: VllmSettings) -> tuple[str, list[EngineState]]:
    async def run() -> tuple[str, list[EngineState]]:
        states, adapter = States(), VllmAdapter(settings, Ledger.create())
        try:
            with pytest.raises(EngineDead) as caught:
                await adapter.start(states)
            with pytest.raises(EngineDead, match="cannot generate: the engine is dead"):
                adapter.submit(1, TENANT, [1], Sampling(max_tokens=1))
            adapter.abort([1])
            assert (await adapter.statistics()).state is EngineState.DEAD
        finally:
            await adapter.stop()
            await adapter.stop()
        return str(caught.value), states.seen

    return asyncio.run(run())


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    """What passes for a model before vLLM looks at it."""
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_text("{}")
    return str(path)


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_that_is_not_there(tmp_path: Path, model_dir: str) -> None:
    settings = VllmSettings(model=model_dir, name="m", run_dir=str(tmp_path), python="/nowhere/python")
    text, states = start_failure(settings)
    assert text.startswith("cannot start the engine: No such file or directory: '/nowhere/python'")
    assert states == [EngineState.STARTING, EngineState.DEAD, EngineState.STOPPED]


def test_a_process_that_ends_at_once_is_quoted_and_its_log_named(tmp_path: Path, model_dir: str) -> None:
    python = program(tmp_path / "python", "echo noise; echo 'ModuleNotFoundError: msgspec' >&2; exit 1")
    text, _ = start_failure(VllmSettings(model=model_dir, name="m", run_dir=str(tmp_path), python=python))
    log = tmp_path / "log" / "engine-core.log"
    assert text == (f"cannot start the engine: its fork server ended: ModuleNotFoundError: msgspec; its log is '{log}'")
    assert log.read_text() == "noise\nModuleNotFoundError: msgspec\n"


def test_a_start_that_takes_too_long_is_given_up_and_its_process_ended(tmp_path: Path, model_dir: str) -> None:
    python = program(tmp_path / "python", f"echo $$ > {tmp_path}/pid; exec sleep 600")
    settings = VllmSettings(model=model_dir, name="m", run_dir=str(tmp_path), python=python, start_timeout_s=1.0)
    text, _ = start_failure(settings)
    assert text.startswith("cannot start the engine: it did not come up within 1 s; its log is ")
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_a_run_dir_that_is_too_long_for_sockets(tmp_path: Path, model_dir: str) -> None:
    run_dir = tmp_path / ("x" * 100)
    text, _ = start_failure(VllmSettings(model=model_dir, name="m", run_dir=str(run_dir)))
    assert text.startswith("cannot start the engine: run_dir is too long for the path of a Unix socket: ")
    assert not run_dir.exists()


def test_a_model_that_is_not_there_is_told_before_anything_is_started(tmp_path: Path) -> None:
    text, states = start_failure(VllmSettings(model="/nowhere/model", name="m", run_dir=str(tmp_path / "run")))
    assert text == (
        "cannot start the engine: there is no directory '/nowhere/model': give a model's directory or a hub name"
    )
    assert states == [EngineState.STARTING, EngineState.DEAD, EngineState.STOPPED]
    assert not (tmp_path / "run").exists()


def test_stopping_what_was_never_started_does_nothing(tmp_path: Path) -> None:
    adapter = VllmAdapter(VllmSettings(model="/m", name="m", run_dir=str(tmp_path)), Ledger.create())
    asyncio.run(adapter.stop())
    assert asyncio.run(adapter.statistics()).state is EngineState.STOPPED
