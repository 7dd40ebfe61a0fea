"""Fuzz target: WebSocket frames. Needs atheris; `test_corpus.py` replays the corpus without it.

python tests/fuzz/fuzz_websocket.py -runs=100000 [option of libFuzzer]... [folder for finds] tests/fuzz/corpus/websocket
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["seedance"]):
    from support.protocol_invariants import check_websocket_input

if __name__ == "__main__":
    atheris.Setup(sys.argv, check_websocket_input)
    atheris.Fuzz()
