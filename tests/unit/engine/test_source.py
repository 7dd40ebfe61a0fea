"""Which engines there are for which settings; none is started."""

from __future__ import annotations

import asyncio

from seedance.engine.fallback import fallback_settings
from seedance.engine.ledger import Ledger
from seedance.engine.settings import EngineSettings, FailoverSettings
from seedance.engine.source import create_source, vllm_settings
from seedance.engine.synthetic import SyntheticAdapter
from seedance.engine.vllm import VllmAdapter
from seedance.qos.gpu import GpuPart


def test_kinds() -> None:
    async def make(settings: EngineSettings) -> object:
        ledger = Ledger.create()
        source = create_source(settings, ledger, asyncio.get_running_loop())
        adapter = source.create(settings, ledger)
        await source.stop()
        ledger.close()
        return adapter

    assert isinstance(asyncio.run(make(EngineSettings(kind="synthetic", name="s"))), SyntheticAdapter)
    assert isinstance(asyncio.run(make(EngineSettings(kind="vllm", name="s", model="/m", run_dir="/r"))), VllmAdapter)


def test_engine_on_the_processor_has_its_own_interpreter_and_nothing_of_the_gpu() -> None:
    settings = EngineSettings(
        kind="vllm",
        name="m",
        model="/m",
        run_dir="/run/e",
        kv_bytes=1 << 35,
        enforce_eager=False,
        gpu=GpuPart(device="1"),
        failover=FailoverSettings(cpu_python="/cpu/bin/python", cpu_kv_bytes=1 << 30),
    )
    vllm = vllm_settings(fallback_settings(settings))
    assert (vllm.python, vllm.kv_bytes, vllm.run_dir) == ("/cpu/bin/python", 1 << 30, "/run/e/cpu")
    assert (vllm.enforce_eager, vllm.gpu, vllm.model) == (None, GpuPart(), "/m")
    assert vllm_settings(settings).python != ""
