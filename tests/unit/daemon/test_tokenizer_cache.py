"""Tokenizers by the content of their files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.model_dir import write_tokenizer

from seedance.daemon.tokenizer_cache import tokenizer_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    write_tokenizer(tmp_path / "a")
    return tmp_path / "a"


def test_models_with_the_same_files_have_one_tokenizer(folder: Path) -> None:
    first = tokenizer_in(str(folder))
    assert tokenizer_in(str(folder)) is first
    other = folder.with_name("b")
    shutil.copytree(folder, other)
    assert tokenizer_in(str(other)) is first
    (other / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    second = tokenizer_in(str(other))
    assert second is not first
    assert second.has_chat_template
    assert tokenizer_in(str(folder)) is first


def test_a_directory_with_other_content_than_before_has_another_one(folder: Path) -> None:
    first = tokenizer_in(str(folder))
    write_tokenizer(folder, ("x", "y", "z"))
    os.utime(folder / "tokenizer.json", ns=(1, 1))
    second = tokenizer_in(str(folder))
    assert second.vocabulary.token_text(0) == "x"
    assert first.vocabulary.token_text(0) == "a"


def test_two_are_kept(folder: Path) -> None:
    synthetic = tokenizer_in("")
    first = tokenizer_in(str(folder))
    assert tokenizer_in("") is synthetic
    write_tokenizer(folder, ("x", "y"))
    second = tokenizer_in(str(folder))
    assert tokenizer_in("") is synthetic
    write_tokenizer(folder)
    assert tokenizer_in(str(folder)) is not first
    write_tokenizer(folder, ("x", "y"))
    assert tokenizer_in(str(folder)) is not second


@pytest.mark.parametrize("text", [None, "{"])
def test_what_cannot_be_read_is_told_each_time(folder: Path, text: str | None) -> None:
    if text is None:
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "tokenizer.json").write_text(text)
    for _ in range(2):
        with pytest.raises((OSError, ValueError), match="tokenizer.json"):
            tokenizer_in(str(folder))
