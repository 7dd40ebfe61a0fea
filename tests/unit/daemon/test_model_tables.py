"""Models as people see them."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from support.model_dir import write_manifest, write_model

from seedance.daemon.control import ModelReport
from seedance.daemon.model_tables import load_text, pause_text, print_model, print_model_files, print_models
from seedance.engine.model_files import inspect
from seedance.engine.model_load import LoadOrder, LoadPhase, LoadState
from seedance.engine.request import ModelInfo

MODEL = ModelInfo(
    name="m", tokenizer_dir="", max_model_len=8192, vocab_size=9, eos_token_ids=(), created=0, engine="vllm"
)
ORDER = LoadOrder(path="/srv/[next]")


class Screen:
    """What is printed, 100 columns wide."""

    def __init__(self) -> None:
        self.console = Console(file=io.StringIO(), width=100)

    @property
    def lines(self) -> list[str]:
        assert isinstance(self.console.file, io.StringIO)
        return [" ".join(line.split()) for line in self.console.file.getvalue().splitlines()]


def test_how_a_load_goes() -> None:
    reading = LoadState(order=ORDER, done_bytes=10**9, total_bytes=4 * 10**9)
    assert load_text(reading) == "/srv/[next]: checking, 25% of 4.0GB"
    draining = LoadState(order=ORDER, phase=LoadPhase.DRAINING, streams=1200)
    assert load_text(draining) == "/srv/[next]: letting streams end on the old model, 1,200 left"
    assert load_text(LoadState(order=ORDER, phase=LoadPhase.FAILED, reason="no")) == "/srv/[next]: failed: no"
    for phase in LoadPhase:
        assert load_text(LoadState(order=ORDER, phase=phase)).startswith("/srv/[next]: ")


def test_how_long_requests_waited() -> None:
    load = LoadState(order=ORDER, phase=LoadPhase.SERVED, place="beside", pause_s=0.01)
    assert pause_text(load) == ""
    load = LoadState(order=ORDER, phase=LoadPhase.SERVED, place="reload", pause_s=2.5, reload_s=0.257)
    assert pause_text(load) == (
        "new requests waited 2.50 s at most, of which the engine took 0.26 s to load and try the weights"
    )
    load = LoadState(order=ORDER, phase=LoadPhase.SERVED, place="instead", pause_s=2.5, restart_reason="it is [big]")
    assert pause_text(load) == "new requests waited 2.50 s at most, as another engine was started: it is [big]"


def test_what_is_served() -> None:
    screen = Screen()
    load = LoadState(order=ORDER, phase=LoadPhase.SERVED, pause_s=0.012)
    print_model(ModelReport(model=MODEL, state="ready", source="/b", configured="/a", load=load), screen.console)
    assert screen.lines == [
        "model m (vllm), 8,192 tokens",
        "engine ready",
        "from /b",
        "configured /a; the one above was loaded in its place",
        "last load /srv/[next]: served",
        "pause 12 ms for new requests",
    ]
    screen = Screen()
    print_model(ModelReport(model=None, state="dead", source="/a", configured="/a"), screen.console)
    assert screen.lines == ["model none", "engine dead", "from /a"]


def test_models_of_a_folder_and_what_is_wrong_with_one(tmp_path: Path) -> None:
    good = write_model(tmp_path / "good")
    write_manifest(good)
    link = tmp_path / "link"
    link.symlink_to(good)
    screen = Screen()
    print_models([(good, inspect(good), ""), (tmp_path / "bad", None, "cannot use 'bad'")], str(link), screen.console)
    size = (good / "model.safetensors").stat().st_size
    assert screen.lines[1:] == [f"* good {size}B 96 F32 yes", "bad - - - -", "cannot use 'bad'"]


def test_what_a_check_found(tmp_path: Path) -> None:
    screen = Screen()
    print_model_files(inspect(write_model(tmp_path / "m")), screen.console)
    assert screen.lines[1:] == [
        "architecture LlamaForCausalLM",
        f"weights 96 numbers of F32, {(tmp_path / 'm' / 'model.safetensors').stat().st_size}B in 1 files",
        "vocabulary 8 tokens",
        "checksums no SHA256SUMS",
    ]
