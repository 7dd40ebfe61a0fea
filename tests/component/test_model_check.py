"""The check of a model as the process that it is."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.model_dir import SHAPES, write_manifest, write_model

from seedance.engine.check_process import check_model, tokens_of
from seedance.engine.model_check import Read, Request, end_text, environment
from seedance.engine.model_files import WINDOW_BYTES
from seedance.errors import EngineError

LARGE = {**SHAPES, "large": (WINDOW_BYTES // 2, 1), "larger": (WINDOW_BYTES // 2, 1)}  # of 4 bytes each


def test_a_model_is_read_while_it_is_told_how_far(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", shapes=LARGE)
    write_manifest(model)
    told: list[Read] = []
    files = asyncio.run(check_model(Request(path=str(model), needs_manifest=True), told.append))
    total = sum(file.stat().st_size for file in model.iterdir() if file.name != "SHA256SUMS")
    assert (told[0], told[-1]) == (Read(0, total), Read(total, total))
    assert files.weight_bytes == (model / "model.safetensors").stat().st_size
    assert asyncio.run(tokens_of(str(model))) == files.tokens_digest
    told.clear()
    assert asyncio.run(check_model(Request(path=str(model), heads_only=True), told.append)) == files
    assert told == []


def test_what_is_refused_says_why(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with pytest.raises(EngineError, match=r"cannot use '.*/model/SHA256SUMS': it is not there"):
        asyncio.run(check_model(Request(path=str(model), needs_manifest=True), lambda _: None))
    with pytest.raises(EngineError, match=r"cannot use '/nowhere/tokenizer.json'"):
        asyncio.run(tokens_of("/nowhere"))


_CUT_OFF = """
import os, sys
from pathlib import Path
from seedance.engine.model_files import inspect, verify

def cut_off(done_bytes, total_bytes):
    if done_bytes:
        os.truncate(Path(sys.argv[1], "model.safetensors"), 4096)

verify(inspect(Path(sys.argv[1])), cut_off)
"""


def test_a_file_that_is_cut_off_while_it_is_read_ends_that_process_by_a_signal_of_its_own(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", shapes=LARGE)
    done = subprocess.run([sys.executable, "-c", _CUT_OFF, str(model)], env=environment(), check=False)
    assert done.returncode == -signal.SIGBUS
    assert "a file was cut off while it was read" in end_text(done.returncode)


def test_a_check_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", shapes=LARGE)

    async def give_up() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(check_model(Request(path=str(model)), lambda _: begun.set()))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())


@pytest.mark.parametrize(("spoil", "status"), [(False, 0), (True, 1)])
def test_its_exit_status_says_how_it_ended(tmp_path: Path, spoil: bool, status: int) -> None:
    model = write_model(tmp_path / "model")
    if spoil:
        (model / "config.json").unlink()

    async def run() -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *Request(path=str(model)).arguments(),
            env=environment(),
            stdout=asyncio.subprocess.DEVNULL,
        )
        return await process.wait()

    assert asyncio.run(run()) == status
