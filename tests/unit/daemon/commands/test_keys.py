"""Which key is meant."""

from __future__ import annotations

import pytest

from seedance.daemon.commands.keys import ListedKey, find
from seedance.daemon.keys import hash_key

KEY = "sk-seed-abcDEF_123-xyz"
FIRST = ListedKey("acme", hash_key(KEY))
SECOND = ListedKey("acme", "sha256:" + "12345" + "0" * 59)
THIRD = ListedKey("globex", "sha256:" + "12344" + "0" * 59)
LISTED = [FIRST, SECOND, THIRD]


@pytest.mark.parametrize(
    ("which", "found"),
    [
        (KEY, [FIRST]),
        (FIRST.hash, [FIRST]),
        (FIRST.hash.removeprefix("sha256:")[:8], [FIRST]),
        ("12345", [SECOND]),
        ("sha256:12344", [THIRD]),
        ("1234", [SECOND, THIRD]),
        ("123", []),
        ("", []),
        ("99999", []),
        ("sha256:", []),
        ("12345x", []),
        ("sk-seed-other", []),
    ],
)
def test_find(which: str, found: list[ListedKey]) -> None:
    assert find(which, LISTED) == found


def test_a_key_that_looks_like_the_start_of_a_hash_is_that_key() -> None:
    odd = ListedKey("odd", hash_key("12345"))
    assert find("12345", [*LISTED, odd]) == [odd]
