"""The text of a new tenant's file."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from seedance.qos.toml import overlay


def new_text(tenant: str, settings: Mapping[str, object]) -> str:
    """Return a tenant's file that says what `settings` do: dotted keys as in "cpu.max", with TOML's own values.

    Nothing is checked: reading it again tells what is wrong. Keys without a dot come first, as TOML wants it.
    """
    tables: dict[str, object] = {}
    for place, value in settings.items():
        table, _, key = place.rpartition(".")
        tables = overlay(tables, {table: {key: value}} if table else {key: value})
    lines = [f"# The tenant {_toml(tenant)}."]
    lines += [f"{key} = {_toml(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    for name, table_ in tables.items():
        if isinstance(table_, dict):
            lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table_.items())]
    return "\n".join([*lines, ""])


def _toml(value: object) -> str:
    """Return a text, number, truth value or list as TOML writes it: as JSON does, but for the character DEL."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
