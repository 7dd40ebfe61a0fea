"""The payloads of the fan-out comparison: one file, so that every server sends the same bytes.

The file holds, for each payload, a length byte and the bytes. Step s sends connection i payload i + STRIDE · s, so
that no two connections get the same frame in a step, and no connection the same frame in two steps that follow.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

COUNT: Final = 16384
MIN_BYTES: Final = 16
MAX_BYTES: Final = 60
STRIDE: Final = 7919


def save(path: Path, seed: int = 1) -> None:
    """Write COUNT payloads of MIN_BYTES to MAX_BYTES random bytes, the same ones for the same seed."""
    source = random.Random(seed)
    sizes = [source.randint(MIN_BYTES, MAX_BYTES) for _ in range(COUNT)]
    path.write_bytes(b"".join(bytes([size]) + source.randbytes(size) for size in sizes))


def load(path: Path) -> list[bytes]:
    """Return the payloads of a file."""
    data = path.read_bytes()
    payloads = []
    at = 0
    while at < len(data):
        payloads.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    return payloads
