"""The vocabulary of the synthetic engine: 256 bytes, one end-of-text token, words, and words cut inside a character.

Any text can be encoded and comes back exactly. The cut words put the bytes of one character into two or three tokens,
as real byte-level vocabularies do, so that what reads a generated stream must put characters together itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

EOS_ID: Final = 256

_WORDS: Final = (
    " a about after again air all an and any are as at away back be before below between both but by can cloud"
    " cold come could day deep do down each early earth east even every fall far field find fire first fish follow"
    " for from garden give go gold good green ground grow had half hand has have he hear here high hill his hold"
    " home hot house how ice if in into is it its keep kind know lake land large last late leaf leave left less"
    " light like line little long look low made make many may moon more morning most mountain move much must near"
    " never new next night no north not now of off old on once one only open or other our out over own part path"
    " people place plain point rain read rest right ring rise river road rock room root round run salt same sand"
    " sea season see seed set she shore short should side sky slow small snow so some song soon sound south spring"
    " star stay step still stone storm stream street such summer sun take tell than that the their them then there"
    " these they thing this three through time to today together too town tree turn two under until up us valley"
    " very village walk warm was water way we well went west what when where which while white who wide will wind"
    " window winter with wood word work world would year yes yet you young über naïve 東京 привет ☂ 🌊"
)
_MARKS: Final = (".", ",", ";", ":", "?", "!", " \u2013", "\n", "\n\n")
# Each row is one word; its characters é, ß, 水, € and 🌲 and the like are cut between the tokens.
_CUT_WORDS: Final = (
    (b" caf\xc3", b"\xa9"),
    (b" Stra\xc3", b"\x9fe"),
    (b" ma\xc3", b"\xb1ana"),
    (b" \xe6\xb0", b"\xb4"),
    (b" \xe5", b"\xb1\xb1"),
    (b" \xe2\x82", b"\xac"),
    (b" \xf0\x9f", b"\x8c\xb2"),
    (b" \xf0", b"\x9f\x8c", b"\x99"),
    (b" \xd0\xbc\xd0", b"\xbe\xd1", b"\x80\xd0\xb5"),
)

_word_bytes: Final = [
    *(word.encode() for word in re.findall(r" \S+", _WORDS)),
    *(mark.encode() for mark in _MARKS),
]
_FIRST_WORD_ID: Final = EOS_ID + 1
_FIRST_CUT_ID: Final = _FIRST_WORD_ID + len(_word_bytes)

TOKEN_BYTES: Final[tuple[bytes, ...]] = (
    *(bytes([value]) for value in range(256)),
    b"",
    *_word_bytes,
    *(piece for pieces in _CUT_WORDS for piece in pieces),
)
"""The bytes of each token id; those of EOS_ID are none."""

VOCAB_SIZE: Final = len(TOKEN_BYTES)


def _cut_ids() -> tuple[list[int], dict[int, int]]:
    heads, followers = [], {}
    token_id = _FIRST_CUT_ID
    for pieces in _CUT_WORDS:
        heads.append(token_id)
        followers.update({token_id + i: token_id + i + 1 for i in range(len(pieces) - 1)})
        token_id += len(pieces)
    return heads, followers


_heads, FOLLOWERS = _cut_ids()
"""For a token that ends inside a character, the only token that may come next."""

# Three times, so that about one word in ten is a cut one.
STARTERS: Final[tuple[int, ...]] = (*range(_FIRST_WORD_ID, _FIRST_CUT_ID), *(_heads * 3))
"""The tokens that may follow a whole character."""

# The first id of equal bytes wins, so that a lone byte is always its byte token.
_IDS: Final = {data: token_id for token_id, data in reversed(list(enumerate(TOKEN_BYTES)))}
_pieces: Final = sorted((data for data in _IDS if len(data) > 1), key=len, reverse=True)
# Piece by piece, not all in one call: that would hold the interpreter's lock to the end of a long text.
_find_pieces: Final = re.compile(b"|".join(map(re.escape, _pieces)) + b"|.", re.DOTALL).finditer


def encode_text(text: str) -> list[int]:
    """Return the token ids of a text, longest word first; a lone surrogate, which UTF-8 lacks, becomes '?'."""
    return [_IDS[piece[0]] for piece in _find_pieces(text.encode("utf-8", "replace"))]


def decode_bytes(token_ids: Iterable[int]) -> bytes:
    """Return the bytes of tokens; they may begin or end inside a character. Raises IndexError on an unknown id."""
    return b"".join([TOKEN_BYTES[token_id] for token_id in token_ids])


def decode_text(token_ids: Iterable[int]) -> str:
    """Return the text of tokens; a character that is not whole becomes U+FFFD."""
    return decode_bytes(token_ids).decode("utf-8", "replace")


def synthetic_token_text(token_id: int) -> str:
    """Return the text of one token by itself."""
    return decode_text([token_id])
