"""Which kernel headers the tracing tools take, and how two folders look like one."""

from __future__ import annotations

from pathlib import Path

import pytest

from seedance.daemon.trace import _headers


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    for release in ("6.1.9-amd64", "6.1.10-amd64", "5.10.200-amd64"):
        (tmp_path / release / "build" / "include" / "generated").mkdir(parents=True)
    (tmp_path / "6.12.1-modules-without-headers").mkdir()
    return tmp_path


def test_headers_of_the_release_come_first(modules: Path) -> None:
    found = _headers.find("6.1.9-amd64", modules)
    assert found == ("6.1.9-amd64", modules / "6.1.9-amd64/build", modules / "6.1.9-amd64/build")


def test_else_the_newest_are_taken(modules: Path) -> None:
    found = _headers.find("6.18.0-custom", modules)
    assert found is not None
    assert found.release == "6.1.10-amd64"


def test_without_headers_there_are_none(tmp_path: Path) -> None:
    assert _headers.find("6.1.9-amd64", tmp_path) is None


def test_what_was_made_for_a_kernel_is_merged_with_its_sources(tmp_path: Path) -> None:
    build, source, merged = tmp_path / "build", tmp_path / "source", tmp_path / "merged"
    for path in ("include/generated/a.h", "arch/x86/include/generated/b.h"):
        (build / path).parent.mkdir(parents=True)
        (build / path).write_text(path)
    for path in ("include/linux/c.h", "arch/x86/include/asm/d.h", "arch/arm64/include/asm/e.h"):
        (source / path).parent.mkdir(parents=True)
        (source / path).write_text(path)
    _headers.merge(_headers.Headers("6.1", build, source), merged)
    for path in ("include/generated/a.h", "arch/x86/include/generated/b.h", "include/linux/c.h"):
        assert (merged / path).read_text() == path
    assert (merged / "arch/x86/include/asm/d.h").exists()
    assert not (merged / "arch/arm64").exists()
