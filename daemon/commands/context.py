"""What every command of `seedancectl` stands on: the configuration, the daemon behind it, names, and files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console

from seedance.daemon import config as configuration
from seedance.daemon import control
from seedance.daemon.config import Config
from seedance.errors import ConfigError, ResourceBroken
from seedance.qos.quota import read_name

_NO_TERMINAL_COLUMNS: Final = 200


class Context:
    """The configuration file's path, and the daemon behind it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def config(self) -> Config:
        """Return the configuration. Raises ConfigError."""
        return configuration.load(self.path)

    def control_path(self) -> str:
        """Return where the daemon answers."""
        return str(Path(self.config().paths.run) / control.SOCKET_NAME)

    def tenant_path(self, tenant: str) -> Path:
        """Return where a tenant's file is, or would be."""
        return Path(self.config().paths.tenants) / f"{tenant}.toml"

    def ask(self, request: control.Request) -> control.Reply:
        """Return the daemon's answer. Raises ResourceBroken when it does not answer."""
        reply = control.ask(self.control_path(), request)
        if isinstance(reply, control.Failed):
            raise click.ClickException(reply.message)
        return reply

    def status(self) -> control.StatusReport:
        """Return how the daemon is. Raises ResourceBroken when it does not answer."""
        reply = self.ask(control.GetStatus())
        assert isinstance(reply, control.StatusReport)
        return reply

    def put_in_force(self, what: str, path: Path) -> list[ConfigError]:
        """Have a running daemon read the tenant files again; returns what is wrong with the one at `path`.

        Says on standard error when no daemon could be told.
        """
        try:
            reply = self.ask(control.Reload())
        except ResourceBroken as exc:
            click.echo(f"{exc} {what} counts from its next start", err=True)
            return []
        assert isinstance(reply, control.Reloaded)
        return [bad_file_error(bad) for bad in reply.bad_files if bad.path == str(path)]


def bad_file_error(bad: control.BadFile) -> ConfigError:
    """Return what is wrong with a tenant's file as the error that it was."""
    return ConfigError(bad.path, bad.key, bad.reason)


def tenant_name(value: str) -> str:
    """Take an argument that names a tenant; a wrong one is a wrong command line."""
    try:
        return read_name(value)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


def print_json(value: Any) -> None:
    """Print a value for programs, laid out for people too."""
    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


def console() -> Console:
    """Return where tables go: as wide as the terminal, and where there is none so wide that nothing is cut."""
    is_bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if is_bounded else _NO_TERMINAL_COLUMNS)


def read_text(path: Path) -> str:
    """Return a tenant's file. Raises ConfigError when it is not there or cannot be read."""
    return configuration.read_text(str(path))
