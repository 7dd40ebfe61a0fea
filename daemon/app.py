"""`seedanced`: the command that is the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import sys
from pathlib import Path
from typing import Final

import click

from seedance import __version__
from seedance.daemon import activation, command_line, logs, sockets
from seedance.daemon import config as configuration
from seedance.daemon import hints as hint_lines
from seedance.daemon.config import Config
from seedance.daemon.log_store import LogStore
from seedance.daemon.process import set_name
from seedance.daemon.processes import Options
from seedance.daemon.supervisor import Supervisor
from seedance.daemon.tenants import read_files
from seedance.engine import model_files, vllm_control
from seedance.errors import ConfigError, EngineDead, KernelError
from seedance.qos.kernel import KernelLimits
from seedance.qos.quota import load_directory

_log = logging.getLogger(__name__)

DEFAULT_CONFIG: Final = configuration.DEFAULT_PATH
EXIT_CONFIG: Final = 78
"""EX_CONFIG of sysexits.h; the unit file tells systemd not to try again then."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "path", default=DEFAULT_CONFIG, show_default=True, metavar="PATH", help="Configuration file.")
@click.option("--check-config", is_flag=True, help="Check the configuration and tenant files, then exit: 0 or 78.")
@click.option("--hints", is_flag=True, help="Once ready, print commands to try; done anyway on a terminal.")
@click.option("--log-level", type=click.Choice(logs.LEVELS), default="info", show_default=True)
@click.option("--test-echo", is_flag=True, hidden=True, help="Open the echo route of the conformance tests.")
@click.version_option(__version__, prog_name="seedanced")
def command(path: str, check_config: bool, hints: bool, log_level: str, test_echo: bool) -> None:
    """Serve LLM token streams to many tenants of one machine, in the foreground, until SIGTERM or Ctrl-C.

    SIGHUP reads the tenant files again. Exits with 78 when the configuration is wrong.
    """
    logs.start_logging("seedanced", log_level)
    try:
        config = configuration.load(path)
        if check_config:
            sys.exit(check(config))
        check_model(config)
        options = Options(log_level=log_level, test_echo=test_echo)
        asyncio.run(_serve(config, options, show_hints=hints or sys.stdout.isatty()))
    except ConfigError as exc:
        _log.error("%s", exc)
        sys.exit(EXIT_CONFIG)
    except KernelError as exc:
        _log.error("%s%s", exc, sockets.listen_hint(exc))
        sys.exit(1)
    except OSError as exc:
        _log.error("%s", command_line.os_error_text(exc))
        sys.exit(1)


def check(config: Config) -> int:
    """Read every tenant file and print what is wrong; returns the exit status. Raises ConfigError."""
    check_model(config)
    loaded = load_directory(read_files(Path(config.paths.tenants)), config.classes)
    for error in loaded.errors:
        click.echo(str(error), err=True)
    if loaded.errors:
        return EXIT_CONFIG
    click.echo(f"'{config.path}' and {len(loaded.quotas)} tenant files are right")
    return 0


def check_model(config: Config) -> None:
    """Raise ConfigError when the model is a path that leads to no whole one: no use in starting an engine for it."""
    if config.engine.kind == "vllm":
        try:
            directory = vllm_control.local_model(config.engine.model)
        except EngineDead as exc:
            raise ConfigError(config.path, "engine.model", str(exc)) from exc
        if directory is not None:
            model_files.check_weights(directory)


async def _serve(config: Config, options: Options, *, show_hints: bool) -> None:
    set_name("seedanced")
    _raise_descriptor_limit()
    with contextlib.ExitStack() as stack:
        _take_lock(config, stack)
        # First of all: a socket belongs to the group in which its process was when it was made.
        kernel = KernelLimits(config.kernel)
        stack.callback(kernel.close)
        inherited = activation.take()
        logs = LogStore(inherited.session_logs)
        stack.callback(logs.close)
        listeners = sockets.Listeners(config.listen, inherited.sockets)
        stack.callback(listeners.close)
        kernel.check_sockets([sock.fileno() for sock in listeners.sockets])
        kernel.set_ports(listeners.ports)

        def ready(model: str, names: list[str]) -> None:
            if show_hints:
                click.echo(hint_lines.text(config, model, names, hint_lines.typed("seedancectl")))

        await Supervisor(config, kernel, listeners, options, logs, ready).run()


def _take_lock(config: Config, stack: contextlib.ExitStack) -> None:
    path = f"{config.paths.run}/seedanced.lock"
    try:
        stack.callback(os.close, sockets.lock(path))
    except KernelError as exc:
        if isinstance(exc.__cause__, BlockingIOError):
            raise ConfigError(
                config.path,
                "paths.run",
                f"another seedanced runs in '{config.paths.run}'; stop it, or use another folder",
            ) from exc
        raise


def _raise_descriptor_limit() -> None:
    """Take as many descriptors as we may: a worker holds one for each connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    """Run the command."""
    sys.exit(command_line.run(command, "seedanced"))
