"""The wheel, built by way of the sdist as `make wheel` does, installed where the checkout is out of sight."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = ROOT / "src" / "seedance"
FOLDERS: Final = ("bpf", "daemon", "engine", "qos")
FILES: Final = ("__init__.py", "errors.py", "py.typed")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=200
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the wheel alone into a folder; its requirements come from the environment that runs the tests."""
    target = tmp_path_factory.mktemp("target")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, wheel, cwd=target)
    yield target


def expected_modules() -> set[str]:
    inside = {f"seedance/{name}" for name in FILES}
    for folder in FOLDERS:
        inside |= {f"seedance/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
        inside |= {f"seedance/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.bpf.o")}
        inside |= {f"seedance/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("vectors/*.json")}
    return inside


def test_the_wheel_holds_every_module_and_nothing_else(names: list[str]) -> None:
    modules = {name for name in names if ".dist-info/" not in name}
    assert modules == expected_modules()


def test_the_wheel_has_one_name_at_the_top(names: list[str]) -> None:
    tops = {name.partition("/")[0] for name in names}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"seedance"}


def test_the_wheel_carries_the_licence(names: list[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_commands_run_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    version = run(sys.executable, "-c", "import seedance; print(seedance.__version__)", cwd=tmp_path, **environment)
    where = run(sys.executable, "-c", "import seedance.daemon.app as a; print(a.__file__)", cwd=tmp_path, **environment)
    assert Path(where.strip()).is_relative_to(installed)
    for command in ("seedanced", "seedancectl"):
        # The script names its interpreter; starting it by hand keeps the environment's path in force.
        script = installed / "bin" / command
        assert version.strip() in run(sys.executable, script, "--version", cwd=tmp_path, **environment)
        assert "Usage:" in run(sys.executable, script, "--help", cwd=tmp_path, **environment)


def test_bpf_objects_can_be_read_from_the_wheel(names: list[str], installed: Path, tmp_path: Path) -> None:
    objects = [Path(name).name for name in names if name.endswith(".bpf.o")]
    if not objects:
        pytest.skip("there are no BPF programs in the wheel")
    code = "import importlib.resources as r; print(*(p.name for p in r.files('seedance.bpf').iterdir()))"
    found = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed)).split()
    assert set(objects) <= set(found)


def test_the_vectors_can_be_read_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.resources as r, json;"
        "files = r.files('seedance.daemon.protocol').joinpath('vectors').iterdir();"
        "print(*sorted(f.name for f in files if json.loads(f.read_text(encoding='utf-8'))))"
    )
    found = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed)).split()
    assert found == sorted(path.name for path in (ROOT / "daemon" / "protocol" / "vectors").iterdir())


def test_the_import_root_holds_links_and_few_files() -> None:
    """Code belongs into the folders: a file that lies here would be in the wheel and in nobody's sight."""
    entries = {path.name for path in SOURCE.iterdir() if path.name != "__pycache__"}
    assert entries == {*FOLDERS, *FILES}
    for folder in FOLDERS:
        assert (SOURCE / folder).readlink() == Path("..", "..", folder)
    # With an __init__.py it would hide the package `systemd` of systemd-python.
    assert not (ROOT / "systemd" / "__init__.py").exists()
