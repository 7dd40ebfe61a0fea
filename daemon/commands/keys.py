"""`seedancectl key`: API keys, of which the tenants' files keep the hashes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import click
import msgspec

from seedance.daemon import keys, tables
from seedance.daemon.command_line import example
from seedance.daemon.commands.context import Context, console, print_json, read_text, tenant_name
from seedance.daemon.files import replace_file
from seedance.daemon.tenants import read_files
from seedance.errors import ConfigError
from seedance.qos import quota
from seedance.qos.toml import loads

_LEAST_PREFIX: Final = 4
_PREFIX: Final = re.compile(rf"(?:sha256:)?([0-9a-f]{{{_LEAST_PREFIX},64}})", re.ASCII)


class ListedKey(msgspec.Struct, frozen=True):
    """A key as a tenant's file lists it."""

    tenant: str
    hash: str


@click.group()
def key() -> None:
    """Make, list and revoke API keys."""


@key.command("new", epilog=example("key new acme"))
@click.argument("tenant", type=tenant_name)
@click.pass_obj
def new(context: Context, tenant: str) -> None:
    """Make an API key for TENANT and print it, this once: only its hash is kept, in the tenant's file.

    A tenant that has no file gets one. A running daemon takes the key at once.
    """
    path = context.tenant_path(tenant)
    made = keys.new_key()
    before = read_text(path) if path.exists() else ""
    replace_file(path, keys.add_key_to_file(before, keys.hash_key(made), str(path)))
    click.echo(made)
    for error in context.put_in_force("the key", path):
        raise error


@key.command("list", epilog=example("key list", "key list acme"))
@click.argument("tenant", required=False, type=tenant_name)
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
@click.pass_obj
def list_(context: Context, tenant: str | None, as_json: bool) -> None:
    """List the keys of all tenants, or of TENANT, by their hashes: the keys themselves are not kept."""
    listed = _listed(context, tenant)
    if as_json:
        print_json(listed)
    else:
        tables.print_keys([(entry.tenant, entry.hash) for entry in listed], console())


@key.command("revoke", epilog=example("key revoke sk-seed-…", "key revoke 3f9a6c01", "key revoke --tenant acme 3f9a"))
@click.argument("which", metavar="[KEY|HASH]", required=False)
@click.option("--tenant", type=tenant_name, metavar="NAME", help="Look in this tenant's file only.")
@click.pass_obj
def revoke(context: Context, which: str | None, tenant: str | None) -> None:
    """Take a key out of its tenant's file: the key itself, or the first digits of its hash.

    Without either it lists the keys with their hashes. A running daemon refuses the key from then on.
    """
    listed = _listed(context, tenant)
    if which is None:
        tables.print_keys([(entry.tenant, entry.hash) for entry in listed], console())
        return
    found = find(which, listed)
    if len(found) != 1:
        raise click.ClickException(_not_one(found))
    path = context.tenant_path(found[0].tenant)
    replace_file(path, keys.remove_key_from_file(read_text(path), found[0].hash, str(path)))
    for error in context.put_in_force("that", path):
        click.echo(f"the key is out of '{path}', and stays in force until the file is right", err=True)
        raise error
    click.echo(f"revoked a key of tenant '{found[0].tenant}' ({found[0].hash[:19]}…)")


def find(which: str, listed: list[ListedKey]) -> list[ListedKey]:
    """Return the keys that `which` may mean: the key itself, or else those whose hash begins so."""
    hashed = keys.hash_key(which)
    if exact := [entry for entry in listed if entry.hash == hashed]:
        return exact
    prefix = _PREFIX.fullmatch(which)
    return [entry for entry in listed if prefix and entry.hash.startswith(f"sha256:{prefix[1]}")]


def _not_one(found: list[ListedKey]) -> str:
    if not found:
        return (
            f"cannot find this key: give a whole key, or {_LEAST_PREFIX} or more digits of a hash that"
            " `seedancectl key list` shows"
        )
    several = ", ".join(f"{entry.hash[:19]}… of '{entry.tenant}'" for entry in found[:3])
    return f"cannot tell which of {len(found)} keys is meant ({several}); give more digits"


def _listed(context: Context, tenant: str | None) -> list[ListedKey]:
    """Return the keys of one tenant's file, or of all, also of files that are wrong but for their keys."""
    if tenant is not None:
        path = context.tenant_path(tenant)
        return _keys_in(tenant, read_text(path), str(path))
    listed: list[ListedKey] = []
    for path_, text in read_files(Path(context.config().paths.tenants)).items():
        try:
            if isinstance(text, ConfigError):
                raise text
            listed += _keys_in(quota.tenant_name(path_), text, path_)
        except ConfigError as exc:
            click.echo(f"{exc}, ignoring", err=True)
    return listed


def _keys_in(tenant: str, text: str, path: str) -> list[ListedKey]:
    listed = loads(text, path).get("keys", [])
    return [ListedKey(tenant, str(hashed)) for hashed in (listed if isinstance(listed, list) else [])]
