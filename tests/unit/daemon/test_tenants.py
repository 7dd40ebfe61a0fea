"""The table of tenants over a real folder."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

import pytest

from seedance.daemon.links import GATEWAY_ORDERS, KEYS_PER_MESSAGE, Tenants
from seedance.daemon.tenants import MAX_FILE_CHARACTERS, TenantTable, read_files
from seedance.engine.packets import MAX_PACKET_BYTES
from seedance.errors import ConfigError, TenantRefused
from seedance.qos.quota import BUILT_IN_CLASSES, Quota, load


class FakeLimits:
    """A kernel that keeps what it is told, but for what `refused` says."""

    def __init__(self) -> None:
        self.in_force: dict[str, Quota] = {}
        self.refused: set[Quota] = set()
        self.unkept: set[str] = set()

    def check(self, quota: Quota, path: str) -> None:
        if quota.tenant in self.unkept:
            raise ConfigError(path, "cpu.max", "cannot be kept here")

    def apply(self, quotas: Mapping[str, Quota]) -> None:
        for quota in quotas.values():
            if quota in self.refused:
                raise TenantRefused(quota.tenant, "write 'cpuset.cpus'", errno.EINVAL)
        self.in_force = dict(quotas)

    def mark(self, tenant: str) -> int:
        return self.index(tenant) << 16

    def index(self, tenant: str) -> int:
        return sorted(self.in_force).index(tenant) + 1


def _table(folder: Path, limits: FakeLimits | None = None) -> TenantTable:
    return TenantTable(folder, BUILT_IN_CLASSES, limits or FakeLimits())


def _keys(count: int, start: int = 0) -> str:
    return "keys = [" + ", ".join(f'"sha256:{number:064x}"' for number in range(start, start + count)) + "]\n"


def test_a_reload_says_what_changed(tmp_path: Path) -> None:
    table = _table(tmp_path)
    (tmp_path / "a.toml").write_text(_keys(1))
    (tmp_path / "b.toml").write_text("")
    (tmp_path / "README").write_text("no tenant")
    changes = table.reload()
    assert (changes.added, changes.changed, changes.removed, changes.errors) == (["a", "b"], [], [], [])
    (tmp_path / "a.toml").write_text('class = "gold"')
    (tmp_path / "b.toml").unlink()
    (tmp_path / "c.toml").write_text("")
    changes = table.reload()
    assert (changes.added, changes.changed, changes.removed) == (["c"], ["a"], ["b"])
    changes = table.reload()
    assert (changes.added, changes.changed, changes.removed) == ([], [], [])


def test_a_bad_file_keeps_the_old_quota(tmp_path: Path) -> None:
    table = _table(tmp_path)
    (tmp_path / "a.toml").write_text('class = "gold"')
    table.reload()
    (tmp_path / "a.toml").write_text('class = "tin"')
    (tmp_path / "new.toml").write_text("keys = 1")
    changes = table.reload()
    assert [(Path(error.path).name, table.is_kept(error)) for error in changes.errors] == [
        ("a.toml", True),
        ("new.toml", False),
    ]
    assert table.quotas["a"].scheduling_class == "gold"


def test_what_this_machine_cannot_keep_makes_a_file_bad(tmp_path: Path) -> None:
    limits = FakeLimits()
    table = _table(tmp_path, limits)
    (tmp_path / "a.toml").write_text("")
    (tmp_path / "b.toml").write_text("")
    limits.unkept = {"a"}
    changes = table.reload()
    assert changes.added == ["b"]
    assert [(error.path, error.key) for error in changes.errors] == [(str(tmp_path / "a.toml"), "cpu.max")]
    assert set(limits.in_force) == {"b"}


def test_a_tenant_whose_limits_the_kernel_refuses_stays_as_it_was_alone(tmp_path: Path) -> None:
    limits = FakeLimits()
    table = _table(tmp_path, limits)
    for name in "abc":
        (tmp_path / f"{name}.toml").write_text("")
    table.reload()
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text('class = "gold"')
    (tmp_path / "c.toml").unlink()
    (tmp_path / "d.toml").write_text("")
    limits.refused = {load('class = "gold"', "a.toml", "a"), load("", "d.toml", "d")}
    changes = table.reload()
    assert (changes.added, changes.changed, changes.removed) == ([], ["b"], ["c"])
    assert [(error.path, error.reason) for error in changes.errors] == [
        (str(tmp_path / f"{name}.toml"), "cannot write 'cpuset.cpus': Invalid argument (errno 22)") for name in "ad"
    ]
    assert limits.in_force == table.quotas
    assert [quota.scheduling_class for quota in table.quotas.values()] == ["silver", "gold"]


def test_what_cannot_be_read_is_an_error_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "long.toml").write_text("#" * (MAX_FILE_CHARACTERS + 1))
    files = {Path(path).name: text for path, text in read_files(tmp_path).items()}
    for name, word in (("bytes.toml", "UTF-8"), ("folder.toml", "cannot read"), ("long.toml", "smaller")):
        error = files[name]
        assert isinstance(error, ConfigError)
        assert word in str(error)


def test_a_folder_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make the directory"):
        _table(tmp_path / "none").reload()


def test_the_list_for_the_gateway_comes_in_pieces_that_fit(tmp_path: Path) -> None:
    table = _table(tmp_path)
    for number in range(700):
        (tmp_path / f"t{number}.toml").write_text(_keys(2, start=2 * number))
    (tmp_path / "many.toml").write_text(_keys(800, start=1 << 40))
    table.reload()
    pieces = list(table.pieces())
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    names = [entry.name for entries, _ in pieces for entry in entries]
    assert names == list(table.quotas)
    for entries, last in pieces:
        assert len(GATEWAY_ORDERS.encode(Tenants(entries, last))) < MAX_PACKET_BYTES
        keys = sum(len(entry.keys) for entry in entries)
        assert keys <= KEYS_PER_MESSAGE or len(entries) == 1


def test_no_tenants_are_one_empty_piece(tmp_path: Path) -> None:
    table = _table(tmp_path)
    table.reload()
    assert list(table.pieces()) == [([], True)]
