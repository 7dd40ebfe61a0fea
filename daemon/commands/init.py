"""`seedancectl init`: an example to begin with.

`make run` calls this module itself, at each start: it brings little of what other commands need, and so begins sooner.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from seedance.daemon import command_line, hints
from seedance.daemon import example as example_folder
from seedance.daemon.command_line import example


@click.command(epilog=example("init ./try --engine synthetic"))
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--engine", type=click.Choice(["vllm", "synthetic"]), default="synthetic", show_default=True)
@click.option("--model", default="", help="Hub name or path of the model; needed with vllm.")
@click.option("--name", default="", help="Name under which clients ask for it.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
def init(directory: Path, engine: str, model: str, name: str, port: int) -> None:
    """Write an example into DIRECTORY.

    That is a configuration, tenants acme and globex, and their keys in keys.env. Run again, it keeps the tenants and
    their keys.
    """
    if engine == "vllm" and not model:
        raise click.UsageError("cannot serve without a model: give --model, or --engine synthetic")
    for path in example_folder.create(directory, engine=engine, model=model, name=name, port=port):
        click.echo(f"wrote {path}")
    config = shlex.quote(str(directory / example_folder.CONFIG_FILE))
    click.echo(f"run it with: {hints.typed('seedanced')} --config {config}")


if __name__ == "__main__":
    sys.exit(command_line.run(init, "seedancectl init"))
