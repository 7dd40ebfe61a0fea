"""The example's files: right, private, and kept when made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from seedance.daemon import config, example, hints
from seedance.daemon.keys import KeyTable, hash_key
from seedance.daemon.tenants import read_files
from seedance.qos.quota import Loaded, load_directory


def _tables(folder: Path) -> tuple[config.Config, Loaded]:
    loaded = config.load(str(folder / example.CONFIG_FILE))
    table = load_directory(read_files(Path(loaded.paths.tenants)), loaded.classes)
    assert table.errors == []
    return loaded, table


def test_the_example_is_a_right_configuration_whose_keys_fit(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "example"
    written = example.create(folder, engine="vllm", model='a "quoted\\ name', name="m", port=8123)
    assert [path.relative_to(folder).as_posix() for path in written] == [
        "seedanced.toml",
        "keys.env",
        "tenants.d/acme.toml",
        "tenants.d/globex.toml",
    ]
    loaded, table = _tables(folder)
    assert (loaded.engine.kind, loaded.engine.model, loaded.engine.name) == ("vllm", 'a "quoted\\ name', "m")
    assert str(loaded.listen.tcp[0]) == "127.0.0.1:8123"
    keys = KeyTable(table.quotas.values())
    assert {keys.tenant_of(key) for key in hints.read_keys(loaded.path).values()} == {"acme", "globex"}
    for path in written:
        assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_made_again_it_keeps_the_keys_and_takes_the_new_settings(tmp_path: Path) -> None:
    example.create(tmp_path, engine="synthetic")
    keys = hints.read_keys(str(tmp_path / example.CONFIG_FILE))
    assert example.create(tmp_path, engine="synthetic") == []
    assert example.create(tmp_path, engine="synthetic", port=9000) == [tmp_path / example.CONFIG_FILE]
    loaded, _ = _tables(tmp_path)
    assert loaded.listen.tcp[0].port == 9000
    assert hints.read_keys(loaded.path) == keys


def test_a_tenant_that_was_deleted_comes_back_with_a_new_key(tmp_path: Path) -> None:
    example.create(tmp_path, engine="synthetic")
    before = hints.read_keys(str(tmp_path / example.CONFIG_FILE))
    (tmp_path / "tenants.d" / "acme.toml").unlink()
    example.create(tmp_path, engine="synthetic")
    loaded, table = _tables(tmp_path)
    after = hints.read_keys(loaded.path)
    assert after["globex"] == before["globex"]
    assert after["acme"] != before["acme"]
    assert KeyTable(table.quotas.values()).tenant_of(after["acme"]) == "acme"


def test_a_disk_that_is_full_in_between_loses_no_key(tmp_path: Path) -> None:
    (tmp_path / "tenants.d" / "globex.toml").mkdir(parents=True)  # exists, and so is left alone
    (tmp_path / "keys.env").mkdir()  # what cannot be replaced, as on a full disk
    with pytest.raises(IsADirectoryError, match=r"keys\.env"):
        example.create(tmp_path, engine="synthetic")
    assert not (tmp_path / "tenants.d" / "acme.toml").exists(), "its key would be lost"
    (tmp_path / "keys.env").rmdir()
    example.create(tmp_path, engine="synthetic")
    keys = hints.read_keys(str(tmp_path / example.CONFIG_FILE))
    text = (tmp_path / "tenants.d" / "acme.toml").read_text()
    assert hash_key(keys["acme"]) in text


@pytest.mark.parametrize("tenant", ["acme", "globex"])
def test_the_tenants_have_limits_to_look_at(tmp_path: Path, tenant: str) -> None:
    example.create(tmp_path, engine="synthetic")
    _, table = _tables(tmp_path)
    assert table.quotas[tenant].tokens.streams
    assert table.quotas[tenant].requests.per_minute
