"""Loads of models by `seedancectl` in a daemon of a test, and other models of the tiny one's shape."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.daemon import Daemon
from support.tiny_model import tiny_model

from seedance.daemon import control
from seedance.engine.model_load import LoadState

LIMIT_S = 180.0


def ctl(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "seedance.daemon.ctl", "--config", str(daemon.config), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def load_of(daemon: Daemon) -> LoadState | None:
    """Return how the last load goes."""
    reply = daemon.ask(control.GetModel())
    assert isinstance(reply, control.ModelReport)
    return reply.load


def other_model(path: Path, *, seed: int = 1, config: Mapping[str, Any] | None = None) -> Path:
    """Write a model of the tiny one's shape with the weights of a seed; `config` goes into its config.json besides."""
    path.mkdir()
    for file in tiny_model(seed=seed).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    if config is not None:
        known = json.loads((path / "config.json").read_bytes())
        (path / "config.json").write_text(json.dumps({**known, **config}))
    return path


def spoil_numbers(weights: Path) -> None:
    """Make numbers that are none of many: all is as it should be, until somebody asks."""
    data = bytearray(weights.read_bytes())
    begin = int.from_bytes(data[:8], "little") + 8
    data[begin : begin + (1 << 20)] = b"\xff" * (1 << 20)
    weights.write_bytes(data)
