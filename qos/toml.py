"""TOML documents against a table of the keys that they may have: wrong keys, types and values become ConfigError.

A schema maps each key to a `Field` (the name that the value gets, and how it is read) or to the schema of a sub-table.
What is read comes back as a nested dict of those names; keys that the document leaves out are left out there too, so
that documents can be laid over each other before defaults are filled in.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from seedance.errors import ConfigError
from seedance.qos.units import shown

Reader: TypeAlias = Callable[[object], Any]
UNLIMITED: Final = "unlimited"


class Field(msgspec.Struct, frozen=True):
    """One key: the attribute that its value becomes, and the reader, which raises ValueError on a wrong value."""

    name: str
    read: Reader


Schema: TypeAlias = Mapping[str, "Field | Schema"]


def loads(text: str, path: str) -> dict[str, Any]:
    """Parse TOML text; raises ConfigError that names the line."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as exc:
        reason = str(exc)
        raise ConfigError(path, "", f"cannot read it as TOML: {reason[:1].lower()}{reason[1:]}") from exc


def read_table(table: object, schema: Schema, path: str, key: str = "") -> dict[str, Any]:
    """Read a table and its sub-tables; `key` is the table's own place in the document.

    Raises ConfigError on a key that the schema lacks, naming the closest one that it has, and on a wrong value.
    """
    if not isinstance(table, dict):
        raise ConfigError(path, key, f'cannot take a value where a table belongs; write e.g. "[{key}]"')
    found: dict[str, Any] = {}
    for name, value in table.items():
        place = f"{key}.{name}" if key else name
        entry = schema.get(name)
        if entry is None:
            raise ConfigError(path, place, unknown_key(name, schema))
        if isinstance(entry, Field):
            found[entry.name] = read_value(value, entry.read, path, place)
        else:
            found[name] = read_table(value, entry, path, place)
    return found


def read_value(value: object, read: Reader, path: str, key: str) -> Any:
    """Read one value, turning a reader's ValueError into a ConfigError that says where."""
    try:
        return read(value)
    except ValueError as exc:
        raise ConfigError(path, key, str(exc)) from exc


def unknown_key(name: str, schema: Schema) -> str:
    """Say that a key is unknown, and which known one comes closest."""
    inside = {
        inner: f"{key}.{inner}" for key, entry in schema.items() if not isinstance(entry, Field) for inner in entry
    }
    places = inside | {key: key for key in schema}
    close = difflib.get_close_matches(name, places, n=1, cutoff=0.6)
    if close:
        return f"cannot use an unknown key; did you mean '{places[close[0]]}'?"
    return f"cannot use an unknown key; known here: {', '.join(schema)}"


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `top` laid over it, sub-table by sub-table; neither is changed."""
    merged = dict(base)
    for name, value in top.items():
        under = merged.get(name)
        merged[name] = overlay(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def text(value: object) -> str:
    """Read a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"cannot take {shown(value)}; write a text that is not empty")
    return value


def flag(value: object) -> bool:
    """Read a truth value."""
    if not isinstance(value, bool):
        raise ValueError(f"cannot take {shown(value)}; write true or false")
    return value


def whole(least: int, most: int) -> Reader:
    """Return a reader of an integer between two bounds, both included."""

    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"cannot take {shown(value)}; write a whole number from {least} to {most}")
        return value

    return read


def one_of(choices: Iterable[str]) -> Reader:
    """Return a reader of one of a few words."""
    words = tuple(choices)

    def read(value: object) -> str:
        if value not in words:
            raise ValueError(f"cannot take {shown(value)}; write one of {', '.join(words)}")
        return str(value)

    return read


def above_zero(read: Reader) -> Reader:
    """Return a reader that refuses what another one reads as zero."""

    def read_above_zero(value: object) -> Any:
        quantity = read(value)
        if quantity <= 0:
            raise ValueError(f"cannot take {shown(value)}; write something above zero")
        return quantity

    return read_above_zero


def or_unlimited(read: Reader) -> Reader:
    """Return a reader that also takes the word "unlimited", as None: how a file lifts a limit that its class sets."""

    def read_or_unlimited(value: object) -> Any:
        return None if value == UNLIMITED else read(value)

    return read_or_unlimited
