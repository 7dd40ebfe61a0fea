"""The secret of this installation, from which cache salts and the keys of sessions come."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from pathlib import Path
from typing import Final

_BYTES: Final = 32


def load_secret(path: Path) -> bytes:
    """Return this installation's secret, made at the first call; only its owner can read it. Raises OSError.

    Cache salts come from it: were they guessable, one tenant could find out from timing what another one has asked.
    So do the keys under which sessions' tokens are made: who had one could go on with the tenant's sessions.
    """
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(os.urandom(_BYTES))
        file.flush()
        os.fsync(fd)
    new.rename(path)
    return path.read_bytes()


def cache_salt(secret: bytes, tenant: str) -> str:
    """Return what separates a tenant's prefix cache from the others': the same after every restart, unguessable."""
    return hmac.digest(secret, tenant.encode(), hashlib.sha256).hex()


def session_key(secret: bytes, tenant: str) -> bytes:
    """Return the key of a tenant's resume tokens: the same after every restart."""
    return hmac.digest(secret, b"session\0" + tenant.encode(), hashlib.sha256)  # no tenant's name holds a NUL
