"""The tenants of the daemon: read from the directory of tenant files, again at each reload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from seedance.daemon.links import KEYS_PER_MESSAGE, TenantEntry
from seedance.errors import ConfigError
from seedance.qos.quota import Quota, SchedulingClass, load_directory, tenant_name

# About 800 keys: a quota must fit into one packet of a link, with room to spare.
MAX_FILE_CHARACTERS: Final = 64 << 10


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What a reload changed: names of tenants, sorted, and an error for each file that is not in force."""

    added: list[str]
    changed: list[str]
    removed: list[str]
    errors: list[ConfigError]


def read_files(directory: Path) -> dict[str, str | ConfigError]:
    """Return the text of every `*.toml` of a directory by its path, or what kept it from being read.

    Raises ConfigError when the directory itself cannot be listed.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix == ".toml")
    except OSError as exc:
        reason = f"{exc.strerror}; make the directory or set another one in `tenants`"
        raise ConfigError(str(directory), "", reason) from exc
    return {str(path): _read(path) for path in paths}


def _read(path: Path) -> str | ConfigError:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_FILE_CHARACTERS + 1)
    except OSError as exc:
        return ConfigError(str(path), "", f"cannot read it: {exc.strerror}; the daemon's user needs to read it")
    except UnicodeDecodeError as exc:
        return ConfigError(str(path), "", f"cannot read byte {exc.start} as UTF-8; write the file in UTF-8")
    if len(text) > MAX_FILE_CHARACTERS:
        return ConfigError(
            str(path), "", f"cannot take more than {MAX_FILE_CHARACTERS} characters; write a smaller file"
        )
    return text


class TenantTable:
    """The quotas in force, and the number by which the kernel knows each tenant (SO_MARK), fixed while we run."""

    def __init__(self, directory: Path, classes: Mapping[str, SchedulingClass]) -> None:
        self._directory = directory
        self._classes = classes
        self._marks: dict[str, int] = {}
        self.quotas: dict[str, Quota] = {}
        self.errors: list[ConfigError] = []

    def reload(self) -> Changes:
        """Read the directory again and put it in force; a bad file leaves its tenant as it was.

        Raises ConfigError when the directory cannot be listed; nothing has changed then.
        """
        loaded = load_directory(read_files(self._directory), self._classes, self.quotas)
        old, new = self.quotas, loaded.quotas
        self.quotas, self.errors = new, loaded.errors
        for name in new:
            self._marks.setdefault(name, len(self._marks) + 1)
        return Changes(
            added=sorted(new.keys() - old.keys()),
            changed=sorted(name for name in new.keys() & old.keys() if new[name] != old[name]),
            removed=sorted(old.keys() - new.keys()),
            errors=loaded.errors,
        )

    def mark(self, tenant: str) -> int:
        """Return the tenant's number, from 1; a name that comes back gets its old number."""
        return self._marks[tenant]

    def is_kept(self, error: ConfigError) -> bool:
        """Say whether the tenant of a bad file goes on with the quota that it had."""
        return tenant_name(error.path) in self.quotas

    def pieces(self) -> Iterator[tuple[list[TenantEntry], bool]]:
        """Yield the tenants as the gateway is told of them, cut to fit into packets; True marks the last piece."""
        piece: list[TenantEntry] = []
        size = 0
        for name, quota in self.quotas.items():
            weight = 1 + len(quota.keys)
            if piece and size + weight > KEYS_PER_MESSAGE:
                yield piece, False
                piece, size = [], 0
            piece.append(TenantEntry(name, self.mark(name), quota.network.connections, list(quota.keys)))
            size += weight
        yield piece, True
