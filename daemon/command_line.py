"""How `seedanced` and `seedancectl` end: what went wrong is one line on standard error that begins "cannot …"."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final

import click

from seedance.errors import ConfigError, SeedanceError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
"""What a shell makes of a program that SIGINT has ended."""

_HINTS: Final = {
    errno.ENOSPC: "; make room on that disk",
    errno.EDQUOT: "; make room on that disk",
    errno.EACCES: "; this user must be able to read and write there",
    errno.EROFS: "; choose a place that can be written to",
}

# A group without a command; from click 8.2 on it is an error whose text is the help.
_HELP_WANTED: Final = getattr(click.exceptions, "NoArgsIsHelpError", ())


def run(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says, or `arguments`, and return the exit status; an error becomes one line."""
    try:
        return int(command.main(arguments, prog_name=name, standalone_mode=False) or 0)
    except click.Abort:
        return EXIT_INTERRUPTED
    except _HELP_WANTED as exc:
        click.echo(exc.format_message(), err=True)
        return EXIT_USAGE
    except (click.ClickException, SeedanceError, OSError) as exc:
        text, status = _told(exc)
        text = " ".join(text.split())
        click.echo(f"{name}: {text if text.startswith('cannot ') else f'cannot go on: {text}'}", err=True)
        return status


def example(*lines: str) -> str:
    """Return the end of a command's help: command lines to go by."""
    return "\b\nExample:\n" + "\n".join(f"  seedancectl {line}" for line in lines)


def os_error_text(exc: OSError) -> str:
    """Say what the system refused, of which file where it is known, and what may help."""
    where = f"cannot use '{exc.filename}'" if exc.filename else "cannot go on"
    return f"{where}: {exc.strerror or exc}{_HINTS.get(exc.errno or 0, '') if exc.filename else ''}"


def _told(exc: Exception) -> tuple[str, int]:
    """Return what to say of an error, and the exit status."""
    if isinstance(exc, click.UsageError):
        return _usage(exc), EXIT_USAGE
    if isinstance(exc, click.ClickException):
        return exc.format_message(), EXIT_FAILED
    if isinstance(exc, OSError):
        return os_error_text(exc), EXIT_FAILED
    return str(exc), os.EX_CONFIG if isinstance(exc, ConfigError) else EXIT_FAILED


def _usage(exc: click.UsageError) -> str:
    text = exc.message if exc.message.startswith("cannot ") else exc.format_message()
    if not text.startswith("cannot "):
        text = f"cannot understand the command line: {text[:1].lower()}{text[1:]}"
    return f"{text.rstrip('.')}; see `{exc.ctx.command_path} --help`" if exc.ctx else text
