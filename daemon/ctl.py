"""`seedancectl`: the command that looks into a running daemon, keeps its tenants and keys, and tries its doors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

import click

from seedance import __version__
from seedance.daemon import config as configuration
from seedance.daemon.commands import keys, limits, model, service, simulate, talk, tenants, trace, watch
from seedance.daemon.commands.context import Context, example
from seedance.errors import ConfigError, SeedanceError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
"""What a shell makes of a program that SIGINT has ended."""

_NAME: Final = "seedancectl"
# A group without a command; from click 8.2 on it is an error whose text is the help.
_HELP_WANTED: Final = getattr(click.exceptions, "NoArgsIsHelpError", ())


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
    talk.init,
):
    commands.add_command(_command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says and return the exit status; an error becomes one line on standard error."""
    try:
        return int(commands.main(arguments, prog_name=_NAME, standalone_mode=False) or 0)
    except click.Abort:
        return EXIT_INTERRUPTED
    except _HELP_WANTED as exc:
        click.echo(exc.format_message(), err=True)
        return EXIT_USAGE
    except (click.ClickException, SeedanceError, OSError) as exc:
        text, status = _told(exc)
        text = " ".join(text.split())
        click.echo(f"{_NAME}: {text if text.startswith('cannot ') else f'cannot go on: {text}'}", err=True)
        return status


def _told(exc: Exception) -> tuple[str, int]:
    """Return what to say of an error, and the exit status."""
    if isinstance(exc, click.UsageError):
        return _usage(exc), EXIT_USAGE
    if isinstance(exc, click.ClickException):
        return exc.format_message(), EXIT_FAILED
    if isinstance(exc, OSError):
        where = f"cannot use '{exc.filename}'" if exc.filename else "cannot go on"
        return f"{where}: {exc.strerror}", EXIT_FAILED
    return str(exc), os.EX_CONFIG if isinstance(exc, ConfigError) else EXIT_FAILED


def _usage(exc: click.UsageError) -> str:
    text = exc.message if exc.message.startswith("cannot ") else exc.format_message()
    if not text.startswith("cannot "):
        text = f"cannot understand the command line: {text[:1].lower()}{text[1:]}"
    return f"{text.rstrip('.')}; see `{exc.ctx.command_path} --help`" if exc.ctx else text


def main() -> None:
    """Run the command."""
    sys.exit(run())


if __name__ == "__main__":
    main()
