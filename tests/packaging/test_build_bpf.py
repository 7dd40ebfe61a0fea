"""`packaging/build_bpf.py` in a copy of the tree: what it builds, and when it builds again."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = """
#include "helpers.bpf.h"
#include "value.h"

char LICENSE[] SEC("license") = "GPL";

SEC("tc")
int answer(struct __sk_buff *skb)
{
	return VALUE;
}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    if importlib.util.find_spec("ziglang") is None and "CLANG" not in os.environ:
        pytest.skip("no compiler for BPF programs: `make bpf` installs one")
    for folder in ("packaging", "bpf", "tests/bpf"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "packaging" / "build_bpf.py", tmp_path / "packaging")
    shutil.copy(ROOT / "bpf" / "helpers.bpf.h", tmp_path / "bpf")
    (tmp_path / "bpf" / "value.h").write_text("#define VALUE 1\n")
    (tmp_path / "bpf" / "answer.bpf.c").write_text(SOURCE)
    (tmp_path / "tests" / "bpf" / "probe.bpf.c").write_text(SOURCE)
    return tmp_path


def build(tree: Path) -> subprocess.CompletedProcess[str]:
    command: list[str] = [sys.executable, str(tree / "packaging" / "build_bpf.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def objects(tree: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*.o")}


def test_it_builds_what_is_there_and_nothing_twice(tree: Path) -> None:
    assert build(tree).stderr == "built 2 BPF objects\n"
    built = objects(tree)
    assert built.keys() == {"bpf/answer.bpf.o", "tests/bpf/probe.bpf.o"}
    assert build(tree).stderr == ""
    (tree / "bpf" / "answer.bpf.o").unlink()
    build(tree)
    assert objects(tree) == built


def test_where_it_was_built_is_not_in_the_objects(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("another-place") / "deeper"
    shutil.copytree(tree, elsewhere)
    build(tree)
    build(elsewhere)
    assert objects(tree) == objects(elsewhere)


def test_a_changed_header_builds_again(tree: Path) -> None:
    build(tree)
    before = objects(tree)
    (tree / "bpf" / "value.h").write_text("#define VALUE 2\n")
    assert build(tree).stderr == "built 2 BPF objects\n"
    assert all(after != before[name] for name, after in objects(tree).items())


def test_an_object_whose_source_is_gone_goes_too(tree: Path) -> None:
    build(tree)
    (tree / "tests" / "bpf" / "probe.bpf.c").unlink()
    build(tree)
    assert objects(tree).keys() == {"bpf/answer.bpf.o"}


def test_what_the_compiler_refuses_is_named_and_the_old_object_stays(tree: Path) -> None:
    build(tree)
    before = objects(tree)
    (tree / "bpf" / "answer.bpf.c").write_text(SOURCE.replace("VALUE", "VALUES"))
    done = build(tree)
    assert done.returncode == 1
    assert done.stderr.endswith("build_bpf: cannot compile answer.bpf.c\n")
    assert objects(tree)["bpf/answer.bpf.o"] == before["bpf/answer.bpf.o"]
    assert build(tree).returncode == 1
    assert not list(tree.rglob("*.draft"))


def test_a_compiler_that_is_not_there_is_named(tree: Path) -> None:
    command: list[str] = [sys.executable, str(tree / "packaging" / "build_bpf.py")]
    environment = {**os.environ, "CLANG": "no-such-clang"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "cannot find CLANG='no-such-clang'" in done.stderr
