"""The secret of this installation, from which cache salts and the keys of sessions come."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from typing import Final

from seedance.daemon.files import replace_file
from seedance.errors import ConfigError

_BYTES: Final = 32


def load_secret(path: Path) -> bytes:
    """Return this installation's secret, made at the first call; only its owner can read it.

    Cache salts come from it: were they guessable, one tenant could find out from timing what another one has asked.
    So do the keys under which sessions' tokens are made: who had one could go on with the tenant's sessions.
    Raises OSError when it cannot be read or made, and ConfigError when it is not whole.
    """
    if not path.exists():
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        replace_file(path, os.urandom(_BYTES))
    secret = path.read_bytes()
    if len(secret) != _BYTES:
        reason = f"it has {len(secret)} bytes instead of {_BYTES}; remove it, and sessions from before are not known"
        raise ConfigError(str(path), "", reason)
    return secret


def cache_salt(secret: bytes, tenant: str) -> str:
    """Return what separates a tenant's prefix cache from the others': the same after every restart, unguessable."""
    return hmac.digest(secret, tenant.encode(), hashlib.sha256).hex()


def session_key(secret: bytes, tenant: str) -> bytes:
    """Return the key of a tenant's resume tokens: the same after every restart."""
    return hmac.digest(secret, b"session\0" + tenant.encode(), hashlib.sha256)  # no tenant's name holds a NUL
