"""Where a new engine comes up."""

from __future__ import annotations

from pathlib import Path

import pytest

from seedance.engine.model_load import Place
from seedance.engine.placement import _free_of_machine, choose, needed_bytes
from seedance.engine.settings import EngineSettings

GIB = 1 << 30


@pytest.mark.parametrize(
    ("wish", "needed", "free", "place"),
    [
        ("beside", 10, 1, "beside"),
        ("instead", 1, 10, "instead"),
        ("auto", 10, 10, "beside"),
        ("auto", 11, 10, "instead"),
        ("auto", 10, None, "beside"),
        ("auto", None, None, "instead"),
        ("auto", 0, 0, "beside"),
    ],
)
def test_where(wish: Place, needed: int | None, free: int | None, place: Place) -> None:
    assert choose(wish, needed, free) == place


def test_what_an_engine_takes() -> None:
    settings = EngineSettings(kind="vllm", name="m", model="/m")
    with_kv = EngineSettings(kind="vllm", name="m", model="/m", kv_bytes=3 * GIB)
    assert needed_bytes(settings, 2 * GIB, on_gpu=False) == 2 * GIB + GIB + GIB // 2
    assert needed_bytes(with_kv, 2 * GIB, on_gpu=False) == 5 * GIB + GIB // 2
    assert needed_bytes(with_kv, 2 * GIB, on_gpu=True) == 7 * GIB
    assert needed_bytes(settings, 2 * GIB, on_gpu=True) is None  # it takes what it finds
    assert needed_bytes(EngineSettings(kind="synthetic", name="m"), GIB, on_gpu=False) == 0


def test_what_is_free_is_bounded_by_each_group_above(tmp_path: Path) -> None:
    meminfo, cgroup, cgroups = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
    cgroup.write_text("0::/slice/engine\n")
    inner, outer = cgroups / "slice" / "engine", cgroups / "slice"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("5\n")
    (outer / "memory.max").write_text("5000\n")
    (outer / "memory.current").write_text("4000\n")
    (outer / "memory.stat").write_text("anon 3000\nfile 700\n")
    assert list(_free_of_machine(meminfo, cgroup, cgroups)) == [1000 << 10, 1700]
    assert list(_free_of_machine(tmp_path / "none", tmp_path / "none", cgroups)) == []
