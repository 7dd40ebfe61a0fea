"""API keys: made, hashed, found in a request, looked up; and added to a tenant's file or taken out of it."""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote_plus

from seedance.errors import ConfigError
from seedance.qos.quota import Quota
from seedance.qos.toml import loads

PREFIX: Final = "sk-seed-"
SUBPROTOCOL_PREFIX: Final = "seedance.key."
"""A browser's WebSocket cannot set Authorization; it offers this and its key as one more subprotocol."""

_KEY_BYTES: Final = 32
# Keys from elsewhere may be listed too; this is what one may look like on the wire (RFC 6750 section 2.1, b64token).
_KEY: Final = re.compile(r"[A-Za-z0-9._~+/=-]{8,256}", re.ASCII)


def new_key() -> str:
    """Return a new API key: 256 random bits, in characters that need no quoting in a URL or a header."""
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_key(key: str | bytes) -> str:
    """Return a key as tenant files list it.

    Plain SHA-256, without salt or stretching: those protect secrets that people choose. A key of 256 random bits
    cannot be searched for, however fast the hash, and every request pays for the hash.
    """
    data = key.encode() if isinstance(key, str) else key
    return "sha256:" + hashlib.sha256(data).hexdigest()


class KeyTable:
    """Which tenant a key belongs to."""

    __slots__ = ("_tenants",)

    def __init__(self, quotas: Iterable[Quota]) -> None:
        self._tenants = {key: quota.tenant for quota in quotas for key in quota.keys}

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant_of(self, key: str | bytes) -> str | None:
        """Return the key's tenant, or None for a key that nobody has."""
        # Not a comparison in constant time, and it need not be one: what could leak is how far the digest of a guess
        # agrees with a listed digest, and nobody can choose guesses by their digest.
        return self._tenants.get(hash_key(key))


def key_of(headers: Iterable[tuple[str, str]], query: str = "") -> str | None:
    """Return the API key that a request carries, or None.

    Looked for in this order: `Authorization: Bearer <key>`, a `Sec-WebSocket-Protocol` entry `seedance.key.<key>`,
    `key=<key>` in the query (without its "?"). The first place that names a key decides; when it names two different
    ones, or something that is no key, the request has none.
    """
    bearers: list[str] = []
    offers: list[str] = []
    for name, value in headers:
        lowered = name.lower()
        if lowered == "authorization":
            scheme, _, credentials = value.strip().partition(" ")
            if scheme.lower() == "bearer":
                bearers.append(credentials.strip())
        elif lowered == "sec-websocket-protocol":
            entries = (entry.strip() for entry in value.split(","))
            offers += [entry.removeprefix(SUBPROTOCOL_PREFIX) for entry in entries if is_key_subprotocol(entry)]
    found = bearers or offers or _keys_in_query(query)
    if len(set(found)) != 1 or not _KEY.fullmatch(found[0]):
        return None
    return found[0]


def is_key_subprotocol(entry: str) -> bool:
    """Say whether an offered subprotocol carries a key: such a one must never be chosen, as the answer names it."""
    return entry.startswith(SUBPROTOCOL_PREFIX)


def _keys_in_query(query: str) -> list[str]:
    # Keys hold no "+" that means a space when they are ours; those from elsewhere must be escaped, as everywhere.
    pairs = (pair.partition("=") for pair in query.split("&"))
    return [unquote_plus(value) for name, _, value in pairs if name == "key"]


def add_key_to_file(text: str, key_hash: str, path: str = "") -> str:
    """Return a tenant file's text with one more key hash, all else as it was, comments too.

    A file that has the key already stays as it is. The result has been read again: raises ConfigError when the text is
    not TOML, or is laid out so that the key must be added by hand.
    """
    before = loads(text, path)
    keys = before.get("keys", [])
    if isinstance(keys, list) and key_hash in keys:
        return text
    after = _append(text, key_hash) if "keys" in before else _insert(text, key_hash)
    try:
        understood = isinstance(keys, list) and tomllib.loads(after) == before | {"keys": [*keys, key_hash]}
    except tomllib.TOMLDecodeError:
        understood = False
    if not understood:
        raise ConfigError(path, "keys", f'cannot add a key to this list; add "{key_hash}" to it by hand')
    return after


def remove_key_from_file(text: str, key_hash: str, path: str = "") -> str:
    """Return a tenant file's text without one key hash, all else as it was, comments too.

    A file without the key stays as it is. The result has been read again: raises ConfigError when the text is not
    TOML, or is laid out so that the key must be removed by hand.
    """
    before = loads(text, path)
    keys = before.get("keys", [])
    if not isinstance(keys, list) or key_hash not in keys:
        return text
    after = _cut(text, key_hash)
    try:
        understood = tomllib.loads(after) == before | {"keys": [key for key in keys if key != key_hash]}
    except tomllib.TOMLDecodeError:
        understood = False
    if not understood:
        raise ConfigError(path, "keys", f'cannot remove a key from this list; remove "{key_hash}" from it by hand')
    return after


_COMMENT: Final = r"#[^\n]*"
_STRING: Final = r'"""(?:\\.|(?!""").)*"{3,5}|\'\'\'(?:(?!\'\'\').)*\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\''
_PIECE: Final = re.compile(rf"{_COMMENT}|{_STRING}|[\[\]]|.", re.DOTALL)
_KEYS_LIST: Final = re.compile(r"^[ \t]*(?:keys|\"keys\"|'keys')[ \t]*=[ \t]*\[", re.MULTILINE)


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _insert(text: str, key_hash: str) -> str:
    """Put a list of one key at the top, where no table has begun, below a heading comment if there is one."""
    newline = _newline(text)
    heading = re.match(r"(?:[ \t]*#[^\n]*\n)+(?=[ \t]*\r?(?:\n|\Z))", text)
    at = heading.end() if heading else 0
    line = f'keys = ["{key_hash}"]{newline}'
    return text[:at] + (newline if heading else "") + line + text[at:]


def _append(text: str, key_hash: str) -> str:
    """Put one more entry behind the last one of the list, in the list's own layout."""
    start = _KEYS_LIST.search(text)
    if start is None:
        return text
    last_end, comma, close = start.end(), True, -1
    for piece in _PIECE.finditer(text, start.end()):
        if piece[0] == "]":
            close = piece.start()
            break
        if piece[0][0] in "\"'":
            last_end, comma = piece.end(), False
        elif piece[0] == ",":
            last_end, comma = piece.end(), True
    if close < 0:
        return text
    entry = f'"{key_hash}"'
    line_start = text.rfind("\n", 0, close) + 1
    if line_start <= last_end or text[line_start:close].strip():
        gap = "" if last_end == start.end() else " " if comma else ", "
        return text[:last_end] + gap + entry + text[last_end:]
    indent = _indent_of(text, last_end) if last_end > start.end() else "    "
    separator = "" if comma else ","
    added = f"{indent}{entry},{_newline(text)}"
    return text[:last_end] + separator + text[last_end:line_start] + added + text[line_start:]


def _indent_of(text: str, at: int) -> str:
    line_start = text.rfind("\n", 0, at) + 1
    match = re.compile(r"[ \t]*").match(text, line_start)
    assert match is not None
    return match[0]


def _cut(text: str, key_hash: str) -> str:
    """Take the first entry that is this string out of the list, with its comma, and its line where it has one."""
    start = _KEYS_LIST.search(text)
    if start is None:
        return text
    entry: re.Match[str] | None = None
    comma_before = comma_after = -1
    for piece in _PIECE.finditer(text, start.end()):
        if piece[0] == "]" or (entry and piece[0][0] in "\"',"):
            comma_after = piece.start() if piece[0] == "," else -1
            break
        if piece[0] == ",":
            comma_before = piece.start()
        elif piece[0] in (f'"{key_hash}"', f"'{key_hash}'"):
            entry = piece
    return text if entry is None else _without(text, entry.start(), entry.end(), comma_before, comma_after)


def _without(text: str, first: int, end: int, comma_before: int, comma_after: int) -> str:
    """Cut `text[first:end]` out; a comma position of -1 is none. TOML takes a list that ends with a comma."""
    if comma_after >= 0 and text[end:comma_after].strip(" \t"):
        return text[:first] + text[end:comma_after] + text[comma_after + 1 :]
    end = max(end, comma_after + 1)
    rest_of_line = re.compile(rf"[ \t]*(?:{_COMMENT})?\r?\n").match(text, end)
    line_start = text.rfind("\n", 0, first) + 1
    if rest_of_line is not None and not text[line_start:first].strip():
        return text[:line_start] + text[rest_of_line.end() :]
    if comma_after >= 0:
        return text[:first] + text[end:].lstrip(" \t")
    return text[: comma_before if comma_before > line_start else first] + text[end:]
