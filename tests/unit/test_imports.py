"""The import graph: which way imports run, who may import an engine, and that what decides touches nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

SOURCE: Final = Path(__file__).resolve().parents[2] / "src" / "seedance"

ORDER: Final = ("errors", "bpf", "qos", "engine", "daemon")
"""A module may import from its own folder and from those to the left of it."""

HEAVY: Final = frozenset(("torch", "transformers", "vllm"))
HEAVY_ALLOWED: Final = frozenset(
    ("seedance.engine.gguf", "seedance.engine.vllm_core", "seedance.engine.vllm_reload", "seedance.engine.vllm_zygote")
)
"""These run in the engine's own process (or before there is one), and nobody else imports them."""

# fmt: off
PURE: Final = (
    "seedance.daemon.doors", "seedance.daemon.history", "seedance.daemon.journal_records",
    "seedance.daemon.protocol", "seedance.daemon.session_log",
    "seedance.engine.accounting", "seedance.engine.admission",
    "seedance.engine.bucket", "seedance.engine.canary", "seedance.engine.cost",
    "seedance.engine.decoding", "seedance.engine.emitted",
    "seedance.engine.fairness", "seedance.engine.model_load", "seedance.engine.model_shapes",
    "seedance.engine.planner", "seedance.engine.policy", "seedance.engine.preemption", "seedance.engine.request",
    "seedance.engine.roster", "seedance.engine.safetensors", "seedance.engine.scheduling",
    "seedance.engine.simulation", "seedance.engine.states", "seedance.qos.limiter",
    "seedance.qos.plan", "seedance.qos.quota", "seedance.qos.settings", "seedance.qos.toml", "seedance.qos.units",
    "seedance.qos.usage",
)
# fmt: on
"""What decides: packages and modules without input, output or clock."""

# fmt: off
TOUCHING: Final = frozenset((
    "asyncio", "ctypes", "fcntl", "mmap", "multiprocessing", "os", "pathlib", "random", "select", "selectors", "shutil",
    "signal", "socket", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "zmq",
))
# fmt: on


IMPORT_CALLS: Final = ("importlib.import_module", "__import__")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> dict[str, Path]:
    folders = (SOURCE / name for name in ORDER[1:])  # links: rglob would not enter them from above
    paths = [*SOURCE.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    return {module_name(path): path for path in paths}


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield every module that the code names in an import, wherever it stands, as far as it is written out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORT_CALLS:
            yield from (str(first.value) for first in node.args[:1] if isinstance(first, ast.Constant))


FILES: Final = source_files()
IMPORTS: Final = {name: set(imports_of(ast.parse(path.read_text()))) for name, path in FILES.items()}
MODULES: Final = pytest.mark.parametrize("module", sorted(FILES))


def closure(start: str) -> set[str]:
    """Return every module that importing `start` may bring, ours followed, others named."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += IMPORTS.get(name, ())
    return seen


def top(name: str) -> str:
    return name.partition(".")[0]


def test_the_folders_are_found() -> None:
    assert {name.split(".")[1] for name in FILES if "." in name} >= set(ORDER)


@MODULES
def test_imports_run_one_way(module: str) -> None:
    own = module.split(".")[1] if "." in module else ORDER[-1]
    allowed = ORDER[: ORDER.index(own) + 1]
    ours = {name.split(".")[1] for name in IMPORTS[module] if name.startswith("seedance.")}
    assert ours & set(ORDER) <= set(allowed)


@MODULES
def test_folders_are_imported_by_their_full_name(module: str) -> None:
    assert not {top(name) for name in IMPORTS[module]} & set(ORDER)


@MODULES
def test_engines_are_imported_in_their_own_process_only(module: str) -> None:
    brought = {top(name) for name in IMPORTS[module]} & HEAVY
    assert not brought or module in HEAVY_ALLOWED
    assert module in HEAVY_ALLOWED or not IMPORTS[module] & HEAVY_ALLOWED


@pytest.mark.parametrize("process", ["worker", "zygote", "gateway", "supervisor", "app", "ctl"])
def test_no_process_of_the_daemon_brings_an_engine(process: str) -> None:
    reached = closure(f"seedance.daemon.{process}")
    assert f"seedance.daemon.{process}" in FILES
    assert len(reached) > len(IMPORTS[f"seedance.daemon.{process}"])
    assert not {top(name) for name in reached} & HEAVY


@pytest.mark.parametrize("module", sorted(name for name in FILES if name.startswith(PURE)))
def test_what_decides_touches_nothing(module: str) -> None:
    assert not {top(name) for name in IMPORTS[module]} & TOUCHING


def test_the_graph_sees_late_and_spelled_out_imports() -> None:
    code = "def f():\n import vllm.config\n importlib.import_module('torch')\n from a.b import c\n"
    assert set(imports_of(ast.parse(code))) == {"vllm.config", "torch", "a.b", "a.b.c"}
