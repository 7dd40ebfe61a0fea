"""The environment of the engine's processes, and what is said of their ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seedance.engine.ledger import Ledger
from seedance.engine.vllm_control import VllmSettings
from seedance.engine.vllm_process import environment, exit_text, identity_of, last_line
from seedance.qos.gpu import GpuPart


def test_a_local_model_makes_no_hub_calls(tmp_path: Path) -> None:
    env = environment(VllmSettings(model=str(tmp_path), name="m", run_dir="/run/x"), {})
    assert env["HF_HUB_OFFLINE"] == env["TRANSFORMERS_OFFLINE"] == env["VLLM_NO_USAGE_STATS"] == "1"


def test_a_hub_name_may_call_the_hub_unless_told_otherwise() -> None:
    settings = VllmSettings(model="org/model", name="m", run_dir="/run/x")
    assert "HF_HUB_OFFLINE" not in environment(settings, {})
    offline = VllmSettings(model="org/model", name="m", run_dir="/run/x", offline=True)
    assert environment(offline, {})["HF_HUB_OFFLINE"] == "1"


def test_the_operators_environment_stays_except_what_must_hold() -> None:
    base = {"VLLM_HOST_IP": "10.0.0.1", "PYTHONPATH": "/plugins", "TMPDIR": "/elsewhere", "LANG": "C.UTF-8"}
    env = environment(VllmSettings(model="m", name="m", run_dir="/run/x", cache_dir="/state"), base)
    assert env["VLLM_HOST_IP"] == "10.0.0.1"
    assert env["LANG"] == "C.UTF-8"
    assert env["TMPDIR"] == "/run/x/tmp"
    assert env["VLLM_CACHE_ROOT"] == "/state"
    import_root, plugins = env["PYTHONPATH"].split(os.pathsep)
    assert (Path(import_root) / "seedance" / "engine" / "vllm_zygote.py").is_file()
    assert plugins == "/plugins"


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (-9, "it was killed by SIGKILL, as the kernel does when memory runs out"),
        (-11, "it was killed by SIGSEGV"),
        (3, "it ended with status 3"),
    ],
)
def test_ends_of_a_process_in_words(status: int, text: str) -> None:
    assert exit_text(status) == text


@pytest.mark.parametrize(
    ("text", "line"),
    [(None, "it said nothing"), ("", "it said nothing"), ("first\n  second: x \n\n", "second: x")],
)
def test_the_last_line_of_a_log(tmp_path: Path, text: str | None, line: str) -> None:
    log = tmp_path / "log"
    if text is not None:
        log.write_text(text)
    assert last_line(log) == line


def test_the_part_of_a_gpu_is_told_to_cuda() -> None:
    part = GpuPart(device="GPU-1", threads=0.25, memory_bytes=2 << 30)
    settings = VllmSettings(model="m", name="m", run_dir="/run/x", gpu=part)
    env = environment(settings, {"CUDA_VISIBLE_DEVICES": "7"})
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == ("GPU-1", "25")
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2048M"
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == "/run/nvidia-mps"
    whole = VllmSettings(model="m", name="m", run_dir="/run/x")
    assert environment(whole, {"CUDA_VISIBLE_DEVICES": "7"})["CUDA_VISIBLE_DEVICES"] == "7"


def test_fork_servers_are_the_same_if_they_would_be_started_alike_on_the_same_ledger(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    ledger, another = Ledger.create(), Ledger.create()
    settings = VllmSettings(model=str(tmp_path), name="m", run_dir="/run/x", threads=1)
    other_model = msgspec.structs.replace(settings, model=str(tmp_path / "other"), name="n", kv_bytes=7)
    identity = identity_of(settings, ledger)
    assert identity_of(other_model, ledger) == identity
    differing: list[dict[str, Any]] = [
        {"threads": 2},
        {"python": "/p"},
        {"enforce_eager": False},
        {"gpu": GpuPart(device="1")},
    ]
    for change in (*differing, {"cache_dir": "/c"}, {"model": "org/model"}):
        assert identity_of(msgspec.structs.replace(settings, **change), ledger) != identity
    assert identity_of(settings, another) != identity
    ledger.close()
    another.close()
