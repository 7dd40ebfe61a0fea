"""`seedancectl model`: which model is served, others to serve, and the change from one to another."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from seedance.daemon import control, model_tables
from seedance.daemon.command_line import example
from seedance.daemon.commands.context import Context, console, print_json
from seedance.daemon.files import replace_file
from seedance.engine import model_check, model_files
from seedance.engine.model_files import MANIFEST
from seedance.engine.model_load import DEFAULT_DRAIN_S, LoadOrder, LoadPhase, LoadState, Policy
from seedance.errors import ConfigError
from seedance.qos import units

_LOOK_S: Final = 0.2
_FOLDER: Final = click.Path(path_type=Path)
_DEFAULT_DRAIN: Final = f"{DEFAULT_DRAIN_S / 60:g}min"


class _Duration(click.ParamType):  # type: ignore[type-arg, unused-ignore] # generic from click 8.3 on
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return units.parse_duration(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


@click.group()
def model() -> None:
    """Show which model is served, check others, and change to one without losing a stream."""


@model.command("load", epilog=example("model load /srv/models/next", "model load /srv/models/next --policy continue"))
@click.argument("path", type=_FOLDER)
@click.option("--name", default="", help="What clients ask for from then on; the name stays without it.")
@click.option(
    "--policy",
    type=click.Choice(["finish", "continue"]),
    default="finish",
    show_default=True,
    help="Streams that run end on the old model, or go on with the new one at once.",
)
@click.option(
    "--drain", "drain_s", type=_Duration(), default=_DEFAULT_DRAIN, help=f"Longest `finish`; {_DEFAULT_DRAIN}."
)
@click.option("--manifest", "needs_manifest", is_flag=True, help=f"Refuse a model without {MANIFEST}.")
@click.option("--wait", is_flag=True, help="Wait until the old model has gone, too.")
@click.option("--json", "as_json", is_flag=True, help="Print how it ended, as JSON.")
@click.pass_obj
def load(
    context: Context,
    path: Path,
    name: str,
    policy: Policy,
    drain_s: float,
    needs_manifest: bool,
    wait: bool,
    as_json: bool,
) -> int:
    """Serve the model in the directory PATH in the place of the one that is served.

    It is checked first: its files against SHA256SUMS where it has one, and whether they fit together. Then it is
    started beside the old one and tried; or in its place, where memory holds one, for which new requests wait. Only
    then do new requests go to it, and this command ends with 0. A model that cannot be served never gets one: the
    command ends with 1 and says why, and nothing has changed. Interrupting the command stops nothing; `model cancel`
    does.

    With `continue` both models must have the same tokens. The model is kept when the service is started again, as long
    as the configuration names the same model as now. To load what the configuration names ends that.
    """
    order = LoadOrder(
        path=os.path.abspath(path), name=name, policy=policy, drain_s=drain_s, needs_manifest=needs_manifest
    )
    report = context.ask(control.LoadModel(order))
    assert isinstance(report, control.ModelReport)
    for state in _watched(_states(context, report, until_gone=wait)):
        last = state
    if as_json:
        print_json(last)
    if last.phase is LoadPhase.FAILED:
        raise click.ClickException(last.reason)
    if not as_json:
        click.echo(_served_text(last))
    return 0


def _states(context: Context, report: control.ModelReport, *, until_gone: bool) -> Iterator[LoadState]:
    """Yield how the load goes until it has ended, or enough of it."""
    while True:
        if report.load is None:
            raise click.ClickException("cannot tell how the load went: the daemon has been started again meanwhile")
        yield report.load
        if report.load.phase.is_last or (report.load.is_switched and not until_gone):
            return
        time.sleep(_LOOK_S)
        answer = context.ask(control.GetModel())
        assert isinstance(answer, control.ModelReport)
        report = answer


def _watched(states: Iterator[LoadState]) -> Iterator[LoadState]:
    """Show on standard error how a load goes: a bar on a terminal, a line for each phase elsewhere."""
    screen = Console(stderr=True, highlight=False)
    phase = None
    with _bar(screen) as bar:
        task = bar.add_task("", total=None)
        for state in states:
            if not screen.is_terminal and state.phase is not phase and not state.phase.is_last:
                screen.print(model_tables.load_text(state), soft_wrap=True, markup=False)
            phase = state.phase
            checking = phase is LoadPhase.CHECKING and state.total_bytes
            total = state.total_bytes if checking else None
            bar.update(task, description=model_tables.load_text(state), completed=state.done_bytes, total=total)
            yield state


def _bar(screen: Console) -> Progress:
    columns = TextColumn("{task.description}", markup=False), BarColumn(20), DownloadColumn(), TimeElapsedColumn()
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)


def _served_text(state: LoadState) -> str:
    checked = "" if state.has_manifest else f"; it has no {MANIFEST}, so its files were not compared with anything"
    left = f"; {state.streams:,} streams end on the old model" if state.streams else ""
    pause = model_tables.pause_text(state)
    return f"'{state.order.path}' is served{checked}{left}{'; ' if pause else ''}{pause}"


@model.command("cancel", epilog=example("model cancel"))
@click.pass_obj
def cancel(context: Context) -> None:
    """Give up a load that is under way. The old model goes on; once new requests go to the new one it is too late."""
    context.ask(control.CancelLoad())


@model.command("show", epilog=example("model show", "model show --json"))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.pass_obj
def show(context: Context, as_json: bool) -> None:
    """Show which model is served, where it is from, and how the last load went."""
    report = context.ask(control.GetModel())
    assert isinstance(report, control.ModelReport)
    if as_json:
        print_json(report)
    else:
        model_tables.print_model(report, console())


@model.command("list", epilog=example("model list", "model list /srv/models"))
@click.argument("folder", required=False, type=_FOLDER)
@click.pass_obj
def list_models(context: Context, folder: Path | None) -> None:
    """List the models in FOLDER, or beside the one that is served. Only the heads of their files are read."""
    report = context.ask(control.GetModel()) if folder is None else None
    if isinstance(report, control.ModelReport):
        if not report.source.startswith("/"):
            raise click.ClickException("cannot tell where models are: the one that is served is from no directory")
        folder = Path(report.source).parent
    assert folder is not None
    rows: list[tuple[Path, model_files.ModelFiles | None, str]] = []
    for path in sorted(entry for entry in folder.iterdir() if (entry / "config.json").is_file()):
        try:
            rows.append((path, model_files.inspect(path, needs_tokenizer=False), ""))
        except ConfigError as exc:
            rows.append((path, None, str(exc)))
    model_tables.print_models(rows, report.source if isinstance(report, control.ModelReport) else "", console())


@model.command("check", epilog=example("model check /srv/models/next"))
@click.argument("path", type=_FOLDER)
@click.option("--manifest", "needs_manifest", is_flag=True, help=f"Refuse a model without {MANIFEST}.")
def check(path: Path, needs_manifest: bool) -> int:
    """Check the model in the directory PATH as `model load` does, without loading it. Exits with 78 if it is wrong."""
    request = model_check.Request(path=os.path.abspath(path), needs_manifest=needs_manifest)
    end: model_check.Line | None = None
    screen = Console(stderr=True, highlight=False)
    environment = model_check.environment()
    command = [sys.executable, *request.arguments()]
    with (
        _bar(screen) as bar,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment) as process,
    ):
        assert process.stdout is not None
        task = bar.add_task("checking", total=None)
        for line in process.stdout:
            end = model_check.decode(line)
            if isinstance(end, model_check.Read):
                bar.update(task, completed=end.done_bytes, total=end.total_bytes)
    if isinstance(end, model_check.Passed):
        model_tables.print_model_files(end.files, console())
        return 0
    reason = end.reason if isinstance(end, model_check.Refused) else model_check.end_text(process.returncode)
    click.echo(f"seedancectl: {reason}", err=True)
    return os.EX_CONFIG


@model.command("manifest", epilog=example("model manifest /srv/models/next"))
@click.argument("path", type=_FOLDER)
def manifest(path: Path) -> None:
    """Write SHA256SUMS into the directory PATH: the checksums of its files, as `sha256sum` makes and checks them.

    Do so where the model is known to be good; what is copied from there is then compared with it.
    """
    if not path.is_dir():
        raise ConfigError(str(path), "", "there is no such directory; give that of a model")
    screen = Console(stderr=True, highlight=False)
    with _bar(screen) as bar:
        task = bar.add_task("reading", total=None)
        text = model_files.make_manifest(path, lambda done, total: bar.update(task, completed=done, total=total))
    replace_file(path / MANIFEST, text)
    (path / MANIFEST).chmod(0o644)
    click.echo(f"{path / MANIFEST}: {len(text.splitlines())} files")
