"""The soak itself, for some seconds: it finds nothing where nothing is wrong, and what is wrong it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.soak import soak

ROOT = Path(__file__).resolve().parents[3]
DOORS = {"fm", "json", "sse"}


def test_a_short_soak_loses_nothing() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", "bench.soak", "--seconds", "10", "--seed", "3", "--clients", "1"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["failure"], result["seed"]) == ("", 3)
    assert result["streams"].keys() == DOORS
    assert sum(result["deaths"].values()) >= 2
    assert result["cuts"] > 0


def test_a_stream_that_ends_early_ends_the_soak(tmp_path: Path) -> None:
    limits = "[tokens]\nstreams = 512\nper_minute = 100\n[requests]\nqueue = 512\n"
    log = tmp_path / "log"
    result = soak(tmp_path, seconds=60, seed=4, clients=1, log=log, limits=limits)
    assert " ended by " in result["failure"] or "lost: it ended at byte" in result["failure"]
    assert result["soak_s"] < 50
    assert log.stat().st_size
