"""Replay of the fuzz targets' corpora: what was worth keeping stays right, with no fuzzer needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.fm_invariants import check_fm_input
from support.protocol_invariants import check_http_input, check_websocket_input

CORPORA = Path(__file__).parent / "corpus"
CHECKS: dict[str, Callable[[bytes], None]] = {
    "fm": check_fm_input,
    "http": check_http_input,
    "websocket": check_websocket_input,
}
INPUTS = [(name, path) for name in CHECKS for path in sorted((CORPORA / name).iterdir())]


@pytest.mark.parametrize(("name", "path"), INPUTS, ids=[f"{name}/{path.name}" for name, path in INPUTS])
def test_input_keeps_the_invariants(name: str, path: Path) -> None:
    check = CHECKS[name]
    data = path.read_bytes()
    check(data)
    for length in range(len(data)):
        check(data[:length])


def test_there_is_a_corpus() -> None:
    assert {name for name, _ in INPUTS} == set(CHECKS)
