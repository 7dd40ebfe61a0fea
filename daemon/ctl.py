"""`seedancectl`: the command that looks into a running daemon, keeps its tenants and keys, and tries its doors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

import click

from seedance import __version__
from seedance.daemon import command_line
from seedance.daemon import config as configuration
from seedance.daemon.command_line import example
from seedance.daemon.commands import init, keys, limits, model, service, simulate, talk, tenants, trace, watch
from seedance.daemon.commands.context import Context

_NAME: Final = "seedancectl"


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=example("doctor", "tenant add acme --class gold --cpu 150% --egress 50Mbit", "top"),
)
@click.option(
    "--config",
    "path",
    default=configuration.DEFAULT_PATH,
    show_default=True,
    metavar="PATH",
    help="The daemon's configuration.",
)
@click.version_option(__version__, prog_name=_NAME)
@click.pass_context
def commands(context: click.Context, path: str) -> None:
    """Look into a running seedanced, keep its tenants and their keys, and try it.

    Exit status: 0 all well, 1 it could not be done, 2 the command line is wrong, 78 the configuration or a tenant's
    file is wrong, 130 interrupted. What went wrong is one line on standard error, "seedancectl: cannot …".
    """
    context.obj = Context(path)


for _command in (
    service.status,
    service.check,
    service.reload,
    service.stop,
    tenants.tenant,
    keys.key,
    limits.limits,
    model.model,
    simulate.command,
    watch.top,
    trace.trace,
    watch.doctor,
    talk.chat,
    talk.infer,
    init.init,
):
    commands.add_command(_command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says and return the exit status; an error becomes one line on standard error."""
    return command_line.run(commands, _NAME, arguments)


def main() -> None:
    """Run the command."""
    sys.exit(run())


if __name__ == "__main__":
    main()
