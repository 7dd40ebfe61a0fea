"""`seedancectl limits`: what the kernel enforces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import click

from seedance.daemon import sockets, tables
from seedance.daemon.command_line import example
from seedance.daemon.commands.context import Context, console, print_json, tenant_name
from seedance.daemon.config import Config
from seedance.errors import KernelError

_LOCK: Final = "seedanced.lock"


@click.group()
def limits() -> None:
    """Show or remove the kernel's limits."""


@limits.command("show", epilog=example("limits show", "limits show acme --json"))
@click.argument("tenant", required=False, type=tenant_name)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.pass_obj
def show(context: Context, tenant: str | None, as_json: bool) -> None:
    """Show what the kernel enforces, of all tenants or of TENANT, and what keeps it.

    The values are read back from the kernel at this moment: cgroup files, and rates in bytes a second of the BPF maps.
    """
    report = context.status()
    enforced = {entry.quota.tenant: entry.enforced for entry in report.tenants}
    if tenant is not None:
        if tenant not in enforced:
            raise click.ClickException(f"cannot find tenant '{tenant}' in the daemon; `tenant list` names all")
        enforced = {tenant: enforced[tenant]}
    if as_json:
        print_json({"tenants": enforced, "attachments": report.limits, "off": report.limits_off, "notes": report.notes})
    else:
        tables.print_limits(enforced, report, console())


@limits.command("remove", epilog=example("limits remove"))
@click.pass_obj
def remove(context: Context) -> None:
    """Remove what a daemon has left in the kernel.

    That is programs, filters, qdiscs, maps and cgroups. Limits outlive a crash of the daemon, and so go on holding
    until it runs again. `seedancectl stop` removes them by itself; this is for a daemon that does not come back. It
    does nothing while one runs.
    """
    # pyroute2 takes a tenth of a second, which no other command should wait for.
    from seedance.qos import kernel  # noqa: PLC0415

    config = context.config()
    lock = _lock_out(config)
    try:
        removed = kernel.remove(config.kernel)
    finally:
        if lock is not None:
            os.close(lock)
    for line in removed:
        click.echo(line)
    if not removed:
        click.echo("nothing to remove")


def _lock_out(config: Config) -> int | None:
    """Keep a daemon from starting meanwhile; None where it never ran. Raises ClickException while one runs."""
    path = Path(config.paths.run) / _LOCK
    if not path.exists():
        return None
    try:
        return sockets.lock(str(path))
    except KernelError as exc:
        if not isinstance(exc.__cause__, BlockingIOError):
            raise
        text = "cannot remove the limits of a running seedanced; stop it first, which removes them as well"
        raise click.ClickException(text) from exc
