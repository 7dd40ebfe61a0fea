"""Fuzz target: FM, both ends. Needs atheris; `test_corpus.py` replays the corpus without it.

python tests/fuzz/fuzz_fm.py -runs=1000000 [option of libFuzzer]... [folder for finds] tests/fuzz/corpus/fm
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["seedance"]):
    from support.fm_invariants import check_fm_input

if __name__ == "__main__":
    atheris.Setup(sys.argv, check_fm_input)
    atheris.Fuzz()
