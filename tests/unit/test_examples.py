"""The example files are right, and name every key that there is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from seedance.daemon import config
from seedance.daemon.network_settings import NetworkSettings
from seedance.qos import quota
from seedance.qos.toml import Field, loads

FOLDER = Path(__file__).parents[2] / "systemd"


def uncommented(path: Path) -> str:
    """Return an example with every key in force: a line "# key = …" or "# [table]" without its mark."""
    return re.sub(r"(?m)^# (?=[a-z_.]+ = |\[)", "", path.read_text())


def keys_of(schema: Mapping[str, object], prefix: str = "") -> set[str]:
    found = set()
    for name, entry in schema.items():
        if isinstance(entry, Field):
            found.add(prefix + name)
        else:
            assert isinstance(entry, Mapping)
            found |= keys_of(entry, f"{prefix}{name}.")
    return found


# Their own keys are names that a file chooses.
NAMED = ("classes", "listen.at")


def keys_in(table: Mapping[str, object], prefix: str = "") -> set[str]:
    found = set()
    for name, value in table.items():
        if isinstance(value, Mapping) and prefix + name not in NAMED:
            found |= keys_in(value, f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


def test_the_configuration_is_right_as_it_stands_and_with_every_key() -> None:
    path = FOLDER / "seedanced.toml"
    config.parse(path.read_text(), str(path))
    config.parse(uncommented(path), str(path))


def test_the_configuration_names_every_key() -> None:
    path = FOLDER / "seedanced.toml"
    assert keys_in(loads(uncommented(path), str(path))) == keys_of(config.SCHEMA)


def test_the_commented_defaults_are_the_defaults() -> None:
    path = FOLDER / "seedanced.toml"
    plain, full = config.parse(path.read_text(), str(path)), config.parse(uncommented(path), str(path))
    everywhere = {name: getattr(full.listen, name) for name in NetworkSettings.__struct_fields__}
    assert NetworkSettings(**everywhere) == NetworkSettings()
    assert plain.worker == full.worker
    assert plain.http == full.http
    assert plain.engine.synthetic.tokens_per_s == full.engine.synthetic.tokens_per_s


def test_the_tenant_is_right_as_it_stands_and_with_every_key() -> None:
    path = FOLDER / "tenants.d" / "acme.toml"
    quota.load(path.read_text(), str(path), "acme")
    full = quota.load(uncommented(path), str(path), "acme")
    assert full.tokens.per_minute == 60_000
    assert keys_in(loads(uncommented(path), str(path))) == keys_of(quota.TENANT_FILE)
