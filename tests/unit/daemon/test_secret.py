"""The installation's secret: made once, private; and the salts that come from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from seedance.daemon.secret import cache_salt, load_secret, session_key
from seedance.errors import ConfigError


def test_a_secret_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "secret"
    secret = load_secret(path)
    assert len(secret) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_secret(path) == secret
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]
    assert load_secret(tmp_path / "other") != secret


def test_a_secret_that_is_not_whole_is_none(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"it has 0 bytes instead of 32; remove it"):
        load_secret(path)


def test_salts_differ_by_tenant_and_by_secret() -> None:
    salts = {cache_salt(secret, tenant) for secret in (b"a" * 32, b"b" * 32) for tenant in ("acme", "globex")}
    assert len(salts) == 4
    assert cache_salt(b"a" * 32, "acme") in salts


def test_keys_of_sessions_differ_by_tenant_and_by_secret_and_are_no_salts() -> None:
    keys = {session_key(secret, tenant) for secret in (b"a" * 32, b"b" * 32) for tenant in ("acme", "globex")}
    assert len(keys) == 4
    assert session_key(b"a" * 32, "acme") in keys
    assert bytes.fromhex(cache_salt(b"a" * 32, "acme")) not in keys
