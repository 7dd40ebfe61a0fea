"""Models for people: what is served, what a directory holds, and how a load goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seedance.daemon.control_messages import ModelReport
from seedance.daemon.quantities import scaled
from seedance.engine.model_files import MANIFEST, ModelFiles
from seedance.engine.model_load import LoadPhase, LoadState
from seedance.engine.request import ModelInfo

_DOING: Final = {
    LoadPhase.CHECKING: "checking",
    LoadPhase.STARTING: "starting the engine",
    LoadPhase.RELOADING: "loading the weights into the engine that runs",
    LoadPhase.TRYING: "trying a prompt",
    LoadPhase.PREPARING: "loading the tokenizer",
    LoadPhase.DRAINING: "letting streams end on the old model",
    LoadPhase.SERVED: "served",
    LoadPhase.FAILED: "failed",
}


def load_text(state: LoadState) -> str:
    """Return how a load goes, in a line."""
    text = f"{state.order.path}: {_DOING[state.phase]}"
    if state.phase is LoadPhase.CHECKING and state.total_bytes:
        text += f", {state.done_bytes / state.total_bytes:.0%} of {scaled(state.total_bytes, 'B')}"
    if state.phase is LoadPhase.DRAINING:
        text += f", {state.streams:,} left"
    return f"{text}: {state.reason}" if state.reason else text


def pause_text(state: LoadState) -> str:
    """Return for how long new requests waited, and why that long; nothing where they did not wait for an engine."""
    if state.pause_s is None or state.place not in ("reload", "instead"):
        return ""
    text = f"new requests waited {state.pause_s:.2f} s at most"
    if state.reload_s is not None:
        return f"{text}, of which the engine took {state.reload_s:.2f} s to load and try the weights"
    return f"{text}, as another engine was started: {state.restart_reason}"


def model_text(model: ModelInfo) -> str:
    """Return what a model is, in a few words."""
    return f"{model.name} ({model.engine}), {model.max_model_len:,} tokens"


def print_model(report: ModelReport, console: Console) -> None:
    """Print what is served, and how the last load went."""
    table = Table.grid(padding=(0, 2))
    table.add_row("model", escape(model_text(report.model)) if report.model is not None else "none")
    table.add_row("engine", report.state)
    table.add_row("from", escape(report.source or "-"))
    if report.source != report.configured:
        table.add_row("configured", escape(f"{report.configured or '-'}; the one above was loaded in its place"))
    if report.load is not None:
        table.add_row("last load", escape(load_text(report.load)))
        if report.load.pause_s is not None:
            table.add_row("pause", f"{report.load.pause_s * 1e3:.0f} ms for new requests")
    console.print(table, soft_wrap=True)


def print_models(rows: Sequence[tuple[Path, ModelFiles | None, str]], served: str, console: Console) -> None:
    """Print models by directory, with what is wrong with those that cannot be served; `served` is marked."""
    table = Table("", "model", "size", "weights", "type", MANIFEST, box=None, pad_edge=False, collapse_padding=True)
    served = str(Path(served).resolve()) if served else ""
    for path, files, _ in rows:
        cells = ["-"] * 4 if files is None else _cells(files)
        table.add_row("*" if str(path.resolve()) == served else "", escape(path.name), *cells)
    console.print(table)
    for _, _, reason in rows:
        if reason:
            console.print(reason, soft_wrap=True, markup=False)


def _cells(files: ModelFiles) -> list[str]:
    has_manifest = "yes" if files.checksums else "no"
    return [scaled(files.weight_bytes, "B"), scaled(files.parameters, ""), "+".join(files.dtypes), has_manifest]


def print_model_files(files: ModelFiles, console: Console) -> None:
    """Print what a directory that passed its check holds."""
    table = Table.grid(padding=(0, 2))
    table.add_row("model", escape(files.path))
    table.add_row("architecture", escape(", ".join(files.config.architectures) or files.config.model_type or "-"))
    size, weights, dtypes, _ = _cells(files)
    table.add_row("weights", f"{weights} numbers of {dtypes}, {size} in {len(files.weights)} files")
    table.add_row("vocabulary", f"{files.config.vocab_size:,} tokens" if files.config.vocab_size else "-")
    compared = f"{len(files.checksums)} files are as {MANIFEST} says" if files.checksums else f"no {MANIFEST}"
    table.add_row("checksums", compared)
    console.print(table, soft_wrap=True)
