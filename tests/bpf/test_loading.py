"""Every program passes the verifier of this kernel, within the number of instructions that is written down."""

from __future__ import annotations

import importlib.resources
import json
import platform
from pathlib import Path
from typing import Final

import pytest
from support import observed

from seedance.bpf import loader
from seedance.bpf.loader import BpfObject

observed.require_bpf()

CEILINGS: Final[dict[str, int]] = json.loads(Path(__file__).with_name("ceilings.json").read_text())
OBJECTS: Final = sorted(
    path.name.removesuffix(".bpf.o")
    for path in importlib.resources.files("seedance.bpf").iterdir()
    if path.name.endswith(".bpf.o")
)


@pytest.mark.parametrize("name", OBJECTS)
def test_the_verifier_takes_every_program_within_its_ceiling(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with BpfObject(name) as loaded:
        counts = {program.name: program.verified_insns for program in loaded.programs()}
    with capsys.disabled():
        for program, count in counts.items():
            print(f"\n  {program:<20} {count:>6} of {CEILINGS.get(program, 0):>6} instructions", end="")
    over = {program: count for program, count in counts.items() if count > CEILINGS[program]}
    assert not over, f"more than ceilings.json allows on {platform.release()}"
    assert all(counts.values())


def test_ceilings_are_of_programs_that_exist() -> None:
    programs: set[str] = set()
    for name in OBJECTS:
        with BpfObject(name) as loaded:
            programs |= {program.name for program in loaded.programs()}
    assert programs == CEILINGS.keys()


def test_what_is_needed_is_supported() -> None:
    assert loader.supported() == ""
