"""Replacing a file: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from seedance.daemon.files import replace_file


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 100 bytes: not even the one that pytest reports to, so not for long."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_new_file_is_private_and_a_replaced_one_stays_as_open_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    replace_file(path, "grün\n")
    assert path.read_bytes() == "grün\n".encode()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    replace_file(path, b"red\r\n")
    assert path.read_bytes() == b"red\r\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["a.toml"]


def test_on_a_full_disk_all_is_as_before(tmp_path: Path) -> None:
    path, new = tmp_path / "a", tmp_path / "b"
    replace_file(path, "old")
    for place in (path, new):
        with full_disk(), pytest.raises(OSError, match=f"'{place}'"):
            replace_file(place, "x" * 101)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_what_a_killed_process_has_left_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / f".a.{os.getpid()}").write_text("half")
    replace_file(tmp_path / "a", "whole")
    assert (tmp_path / "a").read_text() == "whole"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_that_is_not_there_is_named_by_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none/a'"):
        replace_file(tmp_path / "none" / "a", "")
