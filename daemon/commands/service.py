"""`seedancectl status`, `reload`, `stop` and `check`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from seedance.daemon import config as configuration
from seedance.daemon import control, tables
from seedance.daemon.command_line import example
from seedance.daemon.commands.context import Context, bad_file_error, console, print_json
from seedance.qos import gpu

_NVIDIA_DEVICE: Final = Path("/dev/nvidiactl")


@click.command(epilog=example("status", "status --json"))
@click.option("--json", "as_json", is_flag=True, help="Print everything, as JSON.")
@click.pass_obj
def status(context: Context, as_json: bool) -> None:
    """Show how the daemon is.

    Its engine, gateway and tenants, files that are wrong, and limits that are off.
    """
    report = context.status()
    if as_json:
        print_json(report)
    else:
        tables.print_status(report, console(), _gpus())


def _gpus() -> tuple[gpu.Gpu, ...]:
    """Ask the driver, where there is one: its library takes a while to load."""
    return gpu.read().gpus if _NVIDIA_DEVICE.exists() else ()


@click.command(epilog=example("reload"))
@click.pass_obj
def reload(context: Context) -> int:
    """Have the tenant files read again.

    Saved files are seen without it. Exits with 1 when one of them is wrong. Changes of the configuration itself need a
    restart.
    """
    reply = context.ask(control.Reload())
    assert isinstance(reply, control.Reloaded)
    for word, names in (("added", reply.added), ("changed", reply.changed), ("removed", reply.removed)):
        click.echo(f"{word}: {', '.join(names) or 'none'}")
    if reply.note:
        click.echo(reply.note, err=True)
    for bad in reply.bad_files:
        click.echo(f"seedancectl: {bad_file_error(bad)}", err=True)
    return int(bool(reply.bad_files))


@click.command(epilog=example("stop"))
@click.pass_obj
def stop(context: Context) -> None:
    """End the daemon. A service manager may start it again: under systemd, use `systemctl stop seedanced`."""
    reply = context.ask(control.Stop())
    assert isinstance(reply, control.Stopping)
    click.echo(f"seedanced, pid {reply.pid}, is stopping")


@click.command(epilog=example("check", "check ./seedanced.toml"))
@click.argument("path", required=False)
@click.pass_obj
def check(context: Context, path: str | None) -> int:
    """Check the configuration and all tenant files.

    PATH is another configuration than the one in use. Exits with 78 when something is wrong. Nothing is asked of a
    running daemon.
    """
    # It brings the whole daemon, which no other command should wait for.
    from seedance.daemon import app  # noqa: PLC0415

    return app.check(configuration.load(path or context.path))
