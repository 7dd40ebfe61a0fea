"""Log probabilities in frames: as they are read, written, and spread over several frames."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fm_vectors import cases

from seedance.daemon.protocol.fm_logprobs import Candidate, ScoredText, decode_scored, encode_scored
from seedance.errors import RemoteProtocolError

CANDIDATES = st.builds(Candidate, st.integers(0, 2**32 - 1), st.floats(allow_nan=False), st.binary(max_size=20))
POSITIONS = st.lists(st.lists(CANDIDATES, min_size=1, max_size=5), max_size=30)


@given(st.text(max_size=300), POSITIONS, st.integers(256, 5000))
def test_what_is_spread_over_frames_comes_back(text: str, positions: list[list[Candidate]], most_bytes: int) -> None:
    pieces = encode_scored(text, positions, most_bytes)
    assert all(len(piece) <= most_bytes for piece in pieces)
    found = [decode_scored(piece) for piece in pieces]
    assert "".join(piece.text for piece in found) == text
    assert [position for piece in found for position in piece.positions] == positions


def test_what_fits_is_one_frame() -> None:
    positions = [[Candidate(1, -0.5, b"a")]] * 10
    assert len(encode_scored("a" * 10, positions, 4096)) == 1
    assert len(encode_scored("", [], 10)) == 1


def test_a_position_that_is_too_long_is_an_error() -> None:
    position = [Candidate(1, -0.5, b"a" * 100)]
    with pytest.raises(ValueError, match=r"^cannot send the log probabilities of a token"):
        encode_scored("a", [position, position], 100)


@given(st.binary(max_size=60))
def test_any_bytes_are_log_probabilities_or_an_error(data: bytes) -> None:
    try:
        found = decode_scored(data)
    except RemoteProtocolError as error:
        assert str(error).startswith("cannot ")
    else:
        assert all(position and not math.isnan(len(position)) for position in found.positions)


@pytest.mark.parametrize("case", [pytest.param(case, id=case["summary"]) for case in cases("logprobs.json")])
def test_vectors(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["hex"])
    if "text" not in case:
        with pytest.raises(RemoteProtocolError, match="^cannot "):
            decode_scored(data)
        return
    positions = [
        [Candidate(token_id, logprob, bytes.fromhex(token)) for token_id, logprob, token in position]
        for position in case["positions"]
    ]
    assert decode_scored(data) == ScoredText(case["text"], positions)
    if case.get("canonical", True):
        assert encode_scored(case["text"], positions, len(data)) == [data]
