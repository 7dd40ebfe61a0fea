"""The wheel that the tests of this folder share, built by way of the sdist as `make wheel` does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
SHIPPED: Final = ("bpf", "daemon", "engine", "qos", "src", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build in a copy that also has what a careless build would pick up: a stale `build/` with a deleted module."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=ignored)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, checkout)
    stale = checkout / "build" / "lib" / "seedance" / "deleted.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(checkout)]
    result = subprocess.run(command, cwd=out, env=os.environ, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    (built,) = out.glob("*.whl")
    return built
