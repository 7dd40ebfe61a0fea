"""The tenants of the daemon: read from the directory of tenant files, again at each reload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from seedance.daemon.links import KEYS_PER_MESSAGE, TenantEntry
from seedance.errors import ConfigError, TenantRefused
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

    Names that begin with a dot are no tenants': editors keep files of that kind.

    Raises ConfigError when the directory itself cannot be listed.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix == ".toml" and path.name[0] != ".")
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


class Limits(Protocol):
    """What keeps the quotas: `qos.kernel.KernelLimits`."""

    def check(self, quota: Quota, path: str) -> None:
        """Raise ConfigError when this machine cannot keep a limit of the quota, and the quota insists on it."""

    def apply(self, quotas: Mapping[str, Quota]) -> None:
        """Put all quotas in force. Raises KernelError when that fails, and then nothing has changed.

        It is a TenantRefused where the limits of one of these tenants are the reason.
        """

    def mark(self, tenant: str) -> int:
        """Return the number by which the kernel knows the tenant's sockets (SO_MARK)."""

    def index(self, tenant: str) -> int:
        """Return the number of a tenant whose quota is in force, from 1 on."""


class TenantTable:
    """The quotas in force, in the kernel too."""

    def __init__(self, directory: Path, classes: Mapping[str, SchedulingClass], limits: Limits) -> None:
        self._directory = directory
        self._classes = classes
        self._limits = limits
        self.quotas: dict[str, Quota] = {}
        self.errors: list[ConfigError] = []

    def reload(self) -> Changes:
        """Read the directory again and put it in force; a bad file leaves its tenant as it was.

        Raises ConfigError when the directory cannot be listed, KernelError when the kernel takes no limits at all;
        nothing has changed then.
        """
        loaded = load_directory(read_files(self._directory), self._classes, self.quotas, self._limits.check)
        old, errors = self.quotas, loaded.errors
        new = self._put_in_force(old, loaded.quotas, errors)
        self.quotas, self.errors = new, errors
        return Changes(
            added=sorted(new.keys() - old.keys()),
            changed=sorted(name for name in new.keys() & old.keys() if new[name] != old[name]),
            removed=sorted(old.keys() - new.keys()),
            errors=errors,
        )

    def _put_in_force(
        self, old: Mapping[str, Quota], new: dict[str, Quota], errors: list[ConfigError]
    ) -> dict[str, Quota]:
        """Have the kernel keep `new`; a tenant whose limits it refuses stays with what it had.

        Returns what is in force. Raises KernelError when it refuses for another reason.
        """
        wanted = dict(new)
        while True:
            try:
                self._limits.apply(wanted)
            except TenantRefused as exc:
                name = exc.tenant
                errors.append(ConfigError(str(self._directory / f"{name}.toml"), "", str(exc)))
                if name in old and wanted[name] != old[name]:
                    wanted[name] = old[name]
                else:
                    del wanted[name]
            else:
                return wanted

    def mark(self, tenant: str) -> int:
        """Return the number by which the kernel knows the tenant's sockets (SO_MARK)."""
        return self._limits.mark(tenant)

    def row(self, tenant: str) -> int:
        """Return the row of a tenant in the engine's ledger."""
        return self._limits.index(tenant)

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
