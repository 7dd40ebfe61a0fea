"""What each token id stands for in text, read off the decoder that a tokenizer names.

Three kinds of decoder can be told as a table, and cover nearly all language models: `ByteLevel` (GPT-2 and its kin),
sequences of `Replace`, `ByteFallback`, `Fuse` and `Strip` (sentencepiece with byte fallback), and `Metaspace`. An entry
is the token's text, or its bytes where they are not whole characters; the entries of special tokens are empty.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any, Final

from tokenizers import Tokenizer as HfTokenizer

Entry = str | bytes
Converter = Callable[[str], Entry]

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderTable:
    """Entries by token id, and how a decoder treats what stands in a row.

    With `byte_runs`, bytes in a row are judged as a whole (each is U+FFFD if the run is no UTF-8); otherwise all text
    is one byte string. `convert` makes an entry of a token. `strips` occurrences of the character `strip` are taken
    off the left of the whole text. `first_text`, where there is one, tells the text of a token that is the first of
    all.
    """

    entries: list[Entry]
    convert: Converter
    byte_runs: bool = False
    strip: str = ""
    strips: int = 0
    first_text: Callable[[int], str] | None = None


def decoder_table(hf: HfTokenizer) -> DecoderTable | None:
    """Return the table of a tokenizer, None if its decoder is none that a table can express."""
    decoder = json.loads(hf.to_str())["decoder"] or {"type": "None"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return _table(hf, _byte_level_entry)
        case ["Metaspace"]:
            return _metaspace_table(hf, steps[0])
        case _:
            return _fallback_table(hf, steps)


def special_token_ids(hf: HfTokenizer) -> set[int]:
    """Return the ids of the tokens that decoding skips."""
    return {token_id for token_id, token in hf.get_added_tokens_decoder().items() if token.special}


def whole_or_bytes(data: bytes) -> Entry:
    """Return bytes as text if they are whole characters, else as they are."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def entry_bytes(entry: Entry) -> bytes:
    """Return an entry as bytes."""
    return entry if isinstance(entry, bytes) else entry.encode()


def _table(hf: HfTokenizer, convert: Converter, **traits: Any) -> DecoderTable:
    vocabulary = hf.get_vocab(with_added_tokens=True)
    entries: list[Entry] = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        entries[token_id] = convert(token)
    for token_id in special_token_ids(hf):
        entries[token_id] = ""
    return DecoderTable(entries, convert, **traits)


def _byte_level_alphabet() -> dict[int, str]:
    """Return the map of GPT-2's printable stand-ins to latin-1 characters of the bytes they stand for.

    Printable latin-1 characters stand for themselves; the other 68 bytes are the characters from U+0100 on, in order.
    What stands for no byte is sent outside latin-1, so that such a token is noticed.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    alphabet = dict.fromkeys(others, "\uffff")
    alphabet.update({0x100 + place: chr(value) for place, value in enumerate(others)})
    return alphabet


_ALPHABET: Final = _byte_level_alphabet()
_SPACE: Final = "\u0120"


def _byte_level_entry(token: str) -> Entry:
    if token.isascii():
        return token  # printable characters stand for themselves, and others are not in the alphabet
    text = token.replace(_SPACE, " ")
    if text.isascii() and token.isprintable() and " " not in token:
        return text
    try:
        data = token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token  # not in the alphabet: added as it is, and decoded as it is
    return whole_or_bytes(data)


def _metaspace_table(hf: HfTokenizer, step: dict[str, Any]) -> DecoderTable:
    replacement = step["replacement"]

    def convert(token: str) -> Entry:
        return token.replace(replacement, " ")

    if step["prepend_scheme"] == "never":
        return _table(hf, convert)
    return _table(hf, convert, byte_runs=True, first_text=lambda token_id: hf.decode([token_id]))


def _fallback_table(hf: HfTokenizer, steps: list[dict[str, Any]]) -> DecoderTable | None:
    kinds = "".join({"Replace": "R", "ByteFallback": "B", "Fuse": "F", "Strip": "S"}.get(s["type"], "?") for s in steps)
    if not re.fullmatch(r"R*B?(FS?)?", kinds) or not kinds:
        return None
    replaces = [step for step in steps if step["type"] == "Replace"]
    if any("String" not in step["pattern"] for step in replaces):
        return None
    pairs = [(step["pattern"]["String"], step["content"]) for step in replaces]
    strip = steps[-1] if kinds.endswith("S") else {"content": "", "start": 0, "stop": 0}
    if strip["stop"]:
        return None
    falls_back = "B" in kinds

    def convert(token: str) -> Entry:
        for pattern, content in pairs:
            token = token.replace(pattern, content)
        if falls_back and token.startswith("<") and (found := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(found[1], 16)])
        return token

    return _table(hf, convert, byte_runs=True, strip=strip["content"], strips=strip["start"])
