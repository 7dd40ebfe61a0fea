"""Log probabilities in frames: TOKENS in the encoding LOGPROBS, for streams that were asked for them.

The data of such a frame is one msgpack array, `[text, positions]`: the text that the tokens gave, as far as it is whole
characters, and each token with those that might have come in its place. A position is an array of candidates, the token
itself first, then the others, the likeliest first; a candidate is `[token id, log probability, the token's bytes]`.
Such frames are never merged, so each can be read by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from seedance.daemon.protocol.fm_frame import broken

MOST_CANDIDATES: Final = 256


class Candidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token that came, or that might have come."""

    token_id: Annotated[int, Meta(ge=0, lt=2**32)]
    logprob: float
    data: bytes


Position = Annotated[list[Candidate], Meta(min_length=1, max_length=MOST_CANDIDATES)]


class ScoredText(msgspec.Struct, frozen=True, array_like=True):
    """What a frame says."""

    text: str
    positions: list[Position]


class ScoredTokens(msgspec.Struct, frozen=True):
    """Text of a stream with log probabilities: the event of a client."""

    stream: int
    text: str
    positions: list[list[Candidate]]


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(ScoredText)


def encode_scored(text: str, positions: Sequence[list[Candidate]], most_bytes: int) -> list[bytes]:
    """Return text and positions as the data of one frame; of more, the text first, if that has over `most_bytes`.

    Raises ValueError when a position is too long by itself.
    """
    data = _encode(ScoredText(text, list(positions)))
    if len(data) <= most_bytes:
        return [data]
    if text and positions:
        return encode_scored(text, [], most_bytes) + encode_scored("", positions, most_bytes)
    half = max(len(text), len(positions)) // 2
    if not half:
        raise ValueError(f"cannot send the log probabilities of a token, {len(data)} bytes, in frames of {most_bytes}")
    first = encode_scored(text[:half], positions[:half], most_bytes)
    return first + encode_scored(text[half:], positions[half:], most_bytes)


def decode_scored(data: bytes) -> ScoredText:
    """Return what the data of a frame says; raises RemoteProtocolError."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise broken(f"its log probabilities: {exc}") from None
