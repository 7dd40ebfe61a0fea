"""`seedancectl tenant`: the tenants of a daemon, and their files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec

from seedance.daemon import control, keys, tables, tenant_file
from seedance.daemon.command_line import example
from seedance.daemon.commands.context import Context, bad_file_error, console, print_json, read_text, tenant_name
from seedance.daemon.files import replace_file
from seedance.daemon.tenants import read_files
from seedance.errors import ConfigError, ResourceBroken
from seedance.qos.quota import load, load_directory

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _LimitOption(msgspec.Struct, frozen=True):
    """One option of `tenant add`: the key of the tenant's file that it sets."""

    flag: str
    place: str
    metavar: str
    help: str

    @property
    def parameter(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


_LIMITS: Final = (
    _LimitOption("--cpu", "cpu.max", "PERCENT", 'Processor time; "150%" is one core and a half.'),
    _LimitOption("--memory", "memory.max", "SIZE", 'Memory of its processes; "2GiB".'),
    _LimitOption("--egress", "network.egress", "RATE", 'Bytes on the wire to its clients; "50Mbit" a second.'),
    _LimitOption("--ingress", "network.ingress", "RATE", "Bytes on the wire from its clients."),
    _LimitOption("--connections", "network.connections", "N", "Connections open at once."),
    _LimitOption("--gpu", "gpu.share", "PERCENT", "Share of the engine's time."),
    _LimitOption("--kv", "gpu.kv", "PERCENT", "Share of the KV cache."),
    _LimitOption("--tokens-per-second", "tokens.per_second", "N", "Tokens of prompts and output."),
    _LimitOption("--tokens-per-minute", "tokens.per_minute", "N", "Tokens of prompts and output."),
    _LimitOption("--tokens-per-day", "tokens.per_day", "N", "Tokens of prompts and output."),
    _LimitOption("--streams", "tokens.streams", "N", "Streams at once."),
    _LimitOption("--context", "tokens.context", "N", "Tokens of one stream."),
    _LimitOption("--requests-per-minute", "requests.per_minute", "N", "Requests begun in any 60 seconds."),
)


def _limit_options(command: _Command) -> _Command:
    for option in reversed(_LIMITS):
        command = click.option(option.flag, option.parameter, metavar=option.metavar, help=option.help)(command)
    return command


@click.group()
def tenant() -> None:
    """List, show, add and remove tenants. Each has one file, NAME.toml, in the folder that paths.tenants names."""


@tenant.command("list", epilog=example("tenant list"))
@click.option("--json", "as_json", is_flag=True, help="Print all quotas, as JSON.")
@click.pass_obj
def list_(context: Context, as_json: bool) -> None:
    """List the tenants with their quotas: those in force, or without a daemon those of the files."""
    try:
        report = context.status()
    except ResourceBroken as exc:
        click.echo(f"{exc} This is what the files say.", err=True)
        config = context.config()
        loaded = load_directory(read_files(Path(config.paths.tenants)), config.classes)
        quotas, errors = list(loaded.quotas.values()), loaded.errors
    else:
        quotas = [entry.quota for entry in report.tenants]
        errors = [bad_file_error(bad) for bad in report.bad_files]
    if as_json:
        print_json(quotas)
    else:
        tables.print_tenants(quotas, console())
    for error in errors:
        click.echo(f"bad file: {error}", err=True)


@tenant.command("show", epilog=example("tenant show acme", "tenant show acme --json"))
@click.argument("name", metavar="TENANT", type=tenant_name)
@click.option("--json", "as_json", is_flag=True, help="Print everything, as JSON.")
@click.pass_obj
def show(context: Context, name: str, as_json: bool) -> None:
    """Show one tenant: its limits, what the kernel enforces of them, and what it has used.

    Without a daemon it shows what the tenant's file says.
    """
    path = context.tenant_path(name)
    try:
        report = context.status()
    except ResourceBroken as exc:
        click.echo(f"{exc} This is what the file says.", err=True)
        quota = load(read_text(path), str(path), name, context.config().classes)
        if as_json:
            print_json({"quota": quota})
        else:
            tables.print_quota(quota, str(path), console())
        return
    bad = next((bad for bad in report.bad_files if bad.path == str(path)), None)
    found = next((entry for entry in report.tenants if entry.quota.tenant == name), None)
    if found is None:
        raise _no_such_tenant(name, path, bad)
    if as_json:
        print_json(found)
        return
    tables.print_tenant(found, str(path), report.limits_off, console())
    if bad is not None:
        click.echo(f"bad file: {bad_file_error(bad)} (its last good quota is in force)", err=True)


def _no_such_tenant(name: str, path: Path, bad: control.BadFile | None) -> Exception:
    if bad is not None:
        return bad_file_error(bad)
    if path.exists():
        return click.ClickException(f"cannot find tenant '{name}' in the daemon; `seedancectl reload` reads '{path}'")
    return click.ClickException(f"cannot find tenant '{name}': there is no '{path}'; `tenant list` names all")


@tenant.command(
    "add",
    epilog=example(
        "tenant add acme --class gold --cpu 150% --memory 2GiB --egress 50Mbit",
        "tenant add small --class bronze --streams 4 --requests-per-minute 60",
    ),
)
@click.argument("name", metavar="TENANT", type=tenant_name)
@click.option("--class", "scheduling_class", metavar="CLASS", help="gold, silver, bronze, or one of the configuration.")
@click.option("--group", metavar="NAME", help="Share a worker with the tenants of this group.")
@click.option("--best-effort", is_flag=True, help="Leave out limits that this machine cannot keep.")
@click.option("--key/--no-key", "with_key", default=True, help="Make a first key and print it, once.  [default: key]")
@_limit_options
@click.pass_obj
def add(
    context: Context,
    /,
    name: str,
    scheduling_class: str | None,
    group: str | None,
    best_effort: bool,
    with_key: bool,
    **limits: str | None,
) -> None:
    """Write a file for TENANT and print its first key, this once: only the key's hash is kept.

    A running daemon serves the tenant at once. Limits that are not named are those of the class. Values are written as
    in the file; "unlimited" lifts a limit that the class sets. When the daemon refuses the tenant, because this machine
    cannot keep a limit, no file is left.
    """
    path = context.tenant_path(name)
    if path.exists():
        raise click.ClickException(f"cannot add tenant '{name}': there is '{path}'; edit it, or remove it first")
    key = keys.new_key() if with_key else None
    settings: dict[str, object] = {"keys": [keys.hash_key(key)] if key else []}
    if scheduling_class:
        settings["class"] = scheduling_class
    if group:
        settings["group"] = group
    if best_effort:
        settings["best_effort"] = True
    settings |= {option.place: _value(given) for option in _LIMITS if (given := limits[option.parameter]) is not None}
    text = tenant_file.new_text(name, settings)
    _check(text, name, path, context)
    replace_file(path, text)
    if refused := context.put_in_force("the tenant", path):
        path.unlink()
        context.put_in_force("that", path)
        raise refused[0]
    click.echo(f"wrote {path}", err=True)
    if key:
        click.echo(key)


def _value(given: str) -> int | str:
    return int(given) if given.isascii() and given.isdecimal() else given


def _check(text: str, name: str, path: Path, context: Context) -> None:
    """Raise UsageError that names the option whose value is wrong."""
    try:
        load(text, str(path), name, context.config().classes)
    except ConfigError as exc:
        flags = {option.place: option.flag for option in _LIMITS} | {"class": "--class", "group": "--group"}
        if exc.path != str(path) or exc.key not in flags:
            raise
        raise click.UsageError(f"cannot use {flags[exc.key]}: {exc.reason}", click.get_current_context()) from exc


@tenant.command("remove", epilog=example("tenant remove acme", "tenant remove acme --yes"))
@click.argument("name", metavar="TENANT", type=tenant_name)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def remove(context: Context, name: str, yes: bool) -> None:
    """Remove the file of TENANT, after showing what it is.

    Its keys stop working at once. What it has made the daemon keep, such as sessions, is not touched.
    """
    path = context.tenant_path(name)
    text = read_text(path)
    try:
        tables.print_quota(load(text, str(path), name, context.config().classes), str(path), console())
    except ConfigError as exc:
        click.echo(f"bad file: {exc}")
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("cannot ask whether to remove it: say --yes", click.get_current_context())
        click.confirm(f"Remove tenant '{name}' with its keys?", abort=True)
    path.unlink()
    context.put_in_force("that", path)
    click.echo(f"removed {path}")
