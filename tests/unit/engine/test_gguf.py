"""Finding a GGUF file, the cache, and what is said of a file that is no use. Converting is tested end to end."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import sys
import threading
import types
from pathlib import Path

import pytest
from jinja2 import Environment

from seedance.engine import gguf
from seedance.errors import ConfigError, KernelError


def silent(step: str) -> None:
    """Take a progress report."""


def test_the_key_of_the_cache_is_the_content(tmp_path: Path) -> None:
    one, same, other = (tmp_path / f"{name}.gguf" for name in ("One", "same", "other"))
    one.write_bytes(b"GGUF one")
    same.write_bytes(b"GGUF one")
    other.write_bytes(b"GGUF two")
    assert gguf.source_from_file(one).sha256 == hashlib.sha256(b"GGUF one").hexdigest()
    assert gguf.source_from_file(one).sha256 == gguf.source_from_file(same).sha256
    assert gguf.source_from_file(one).sha256 != gguf.source_from_file(other).sha256
    assert gguf.source_from_file(one).directory_name.startswith("one-")


def test_a_converted_model_is_taken_from_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF of which nothing can be made")
    source = gguf.source_from_file(file)
    cached = tmp_path / "models" / source.directory_name
    cached.mkdir(parents=True)
    assert gguf.convert(source, tmp_path / "models", silent) == cached


@pytest.mark.parametrize(("content", "reason"), [(b"PK\3\4", "no GGUF file"), (b"", "no GGUF file")])
def test_other_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        gguf.source_from_file(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot use '.*/nowhere\.gguf': No such file"):
        gguf.source_from_file(tmp_path / "nowhere.gguf")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a package like the real one among the modules, with a model of two parts."""
    data = tmp_path / "package" / "data"
    data.mkdir(parents=True)
    parts = [data / "part0", data / "part1"]
    for part, content in zip(parts, (b"GGUF", b"rest"), strict=True):
        part.write_bytes(content)
    (data / "NOTICE.md").write_text("terms")
    module = types.ModuleType(gguf.PACKAGE)
    module.__file__ = str(data.parent / "__init__.py")
    vars(module).update(chunk_paths=lambda: parts, EXPECTED_SHA256=hashlib.sha256(b"GGUFrest").hexdigest())
    monkeypatch.setitem(sys.modules, gguf.PACKAGE, module)
    return data


def test_the_package_is_found_with_its_terms(package: Path) -> None:
    source = gguf.source_from_package()
    assert [part.name for part in source.parts] == ["part0", "part1"]
    assert source.notices == (package / "NOTICE.md",)


def test_a_package_with_a_missing_part_is_refused(package: Path) -> None:
    (package / "part1").unlink()
    with pytest.raises(ConfigError, match="part1'.*install the package again"):
        gguf.source_from_package()


def test_a_missing_package_is_told_how_to_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, gguf.PACKAGE, None)
    with pytest.raises(ConfigError, match=r"pip install seedance\[model\]"):
        gguf.source_from_package()


def test_parts_that_do_not_match_their_sum_leave_nothing_behind(package: Path, tmp_path: Path) -> None:
    (package / "part1").write_bytes(b"rust")
    with pytest.raises(ConfigError, match="does not match its SHA-256"):
        gguf.convert(gguf.source_from_package(), tmp_path / "models", silent)
    assert list((tmp_path / "models").iterdir()) == []


def test_what_a_killed_conversion_has_left_goes_with_the_next(package: Path, tmp_path: Path) -> None:
    left = tmp_path / "models" / ".converting-left"
    left.mkdir(parents=True)
    (left / "half.safetensors").write_bytes(b"half")
    (package / "part1").write_bytes(b"other")
    with pytest.raises(ConfigError, match="SHA-256"):
        gguf.convert(gguf.source_from_package(), tmp_path / "models", silent)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_second_conversion_waits_for_the_first_and_takes_its_result(package: Path, tmp_path: Path) -> None:
    source = gguf.source_from_package()
    models = tmp_path / "models"
    models.mkdir()
    first = os.open(models, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)
    found: list[Path] = []
    told: list[str] = []
    second = threading.Thread(target=lambda: found.append(gguf.convert(source, models, told.append)))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    assert told == ["waiting for another conversion"]
    (models / source.directory_name).mkdir()
    os.close(first)
    second.join(10.0)
    assert found == [models / source.directory_name]


def test_a_directory_that_cannot_be_made_is_said_so(package: Path, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file is in the way")
    with pytest.raises(KernelError, match="cannot write the model to") as raised:
        gguf.convert(gguf.source_from_package(), tmp_path / "models", silent)
    assert raised.value.errno == errno.EEXIST


def test_the_plain_template_is_a_transcript() -> None:
    template = Environment().from_string(gguf.PLAIN_TEMPLATE)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi \n"},
    ]
    text = template.render(messages=messages, bos_token="<bos>", add_generation_prompt=True)
    assert text == "<bos>System: Be brief.\nUser: Hi\nAssistant:"


def test_a_bad_file_ends_the_command_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gguf.main(["--into", str(tmp_path), "--file", str(tmp_path / "none.gguf")]) == 78
    assert "none.gguf" in capsys.readouterr().err


def test_an_interrupt_ends_the_command_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> list[Path]:
        raise KeyboardInterrupt

    module = types.ModuleType(gguf.PACKAGE)
    vars(module).update(chunk_paths=interrupted)
    monkeypatch.setitem(sys.modules, gguf.PACKAGE, module)
    assert gguf.main(["--into", str(tmp_path)]) == 130
    assert capsys.readouterr() == ("", "")


def test_what_is_printed_does_not_depend_on_where_it_is_read(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = tmp_path / "models" / gguf.source_from_package().directory_name
    cached.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert gguf.main(["--into", "models"]) == 0
    assert capsys.readouterr().out == f"{cached}\n"
