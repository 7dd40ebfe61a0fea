"""`seedancectl init`: a folder with a configuration and two tenants, ready to run without any privilege."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from seedance.daemon.files import replace_file
from seedance.daemon.hints import KEY_PREFIX, KEYS_FILE
from seedance.daemon.keys import hash_key, new_key

CONFIG_FILE: Final = "seedanced.toml"

_CONFIG: Final = """\
# seedanced's configuration; paths are relative to this file.

[listen]
tcp = ["127.0.0.1:{port}"]

[paths]
state = "state"
run = "run"
tenants = "tenants.d"

[engine]
{engine}

[kernel]
limits = "best_effort"  # go on without a limit that this machine, or this user, cannot keep; `seedancectl status` tells
"""

_TENANTS: Final = {
    "acme": """\
# The tenant "acme": a big customer.
keys = ["{key_hash}"]
class = "gold"

[cpu]
max = "200%"

[memory]
max = "2GiB"

[network]
egress = "100Mbit"

[tokens]
streams = 64

[requests]
per_minute = 600
""",
    "globex": """\
# The tenant "globex": a small one.
keys = ["{key_hash}"]
class = "silver"

[cpu]
max = "50%"

[memory]
max = "1GiB"

[network]
egress = "20Mbit"
ingress = "10Mbit"

[tokens]
streams = 16
per_second = 2000

[requests]
per_minute = 120
""",
}


def _engine(kind: str, model: str, name: str) -> str:
    lines = [f'kind = "{kind}"']
    if model:
        lines.append(f"model = {_quoted(model)}")
    if name:
        lines.append(f"name = {_quoted(name)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Return a text as a TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def create(directory: Path, *, engine: str, model: str = "", name: str = "", port: int = 8000) -> list[Path]:
    """Write what is missing of the example into a folder; returns the files written. Raises OSError.

    The configuration is written anew when what is asked for differs; tenants and their keys stay.
    """
    written = []
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    tenants = directory / "tenants.d"
    tenants.mkdir(mode=0o700, exist_ok=True)
    config = _CONFIG.format(port=port, engine=_engine(engine, model, name))
    path = directory / CONFIG_FILE
    if not path.exists() or path.read_text(encoding="utf-8") != config:
        replace_file(path, config)
        written.append(path)
    missing = {tenant: tenants / f"{tenant}.toml" for tenant in _TENANTS}
    keys = {tenant: new_key() for tenant, path in missing.items() if not path.exists()}
    if keys:
        # First the keys: a disk that is full after them costs nothing but another try, while a key that is known by
        # its hash alone is lost.
        _add_keys(directory / KEYS_FILE, keys)
        written.append(directory / KEYS_FILE)
    for tenant, key in keys.items():
        replace_file(missing[tenant], _TENANTS[tenant].format(key_hash=hash_key(key)))
        written.append(missing[tenant])
    return written


def _add_keys(path: Path, keys: dict[str, str]) -> None:
    """Put tenants' keys into a file that a shell can read; keys of other tenants stay."""
    names = {KEY_PREFIX + tenant.upper().replace("-", "_"): key for tenant, key in keys.items()}
    old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    lines = [line for line in old if line.partition("=")[0] not in names]
    lines += [f"{name}={key}" for name, key in names.items()]
    replace_file(path, "\n".join(lines) + "\n")
