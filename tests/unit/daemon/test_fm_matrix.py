"""Frames out of columns, beside those that one after the other would be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from seedance.daemon import fm_matrix
from seedance.daemon.protocol.fm_frame import tokens_frame, tokens_prefix
from seedance.daemon.protocol.frame import frame_binary

FRAME = st.tuples(
    st.integers(0, 2**34), st.integers(1, 2**32 - 1), st.integers(0, 1), st.binary(min_size=1, max_size=128)
)
MESSAGES = st.lists(st.lists(FRAME, min_size=1, max_size=40), min_size=1, max_size=6)


@given(MESSAGES)
def test_frames_are_those_that_one_after_the_other_would_be(messages: list[list[tuple[int, int, int, bytes]]]) -> None:
    rows = [row for message in messages for row in message]
    prefixes = [tokens_prefix(stream, encoding) for _, stream, encoding, _ in rows]
    texts = [text for *_, text in rows]
    width = max(map(len, texts))
    counts = np.array([len(message) for message in messages])
    packed = fm_matrix.pack(
        np.cumsum(counts) - counts,
        np.array([seq for seq, *_ in rows], np.int64),
        np.array([fm_matrix.head(prefix) for prefix in prefixes]),
        np.array(list(map(len, prefixes)), np.uint8),
        np.array([list(text.ljust(width, b"\0")) for text in texts], np.uint8),
        np.array(list(map(len, texts)), np.uint8),
    )
    frames = [tokens_frame(row[0], prefix, row[3]) for row, prefix in zip(rows, prefixes, strict=True)]
    assert cut(packed.data, packed.begins, packed.lengths) == frames
    left = iter(frames)
    expected = [frame_binary(b"".join(next(left) for _ in message)) for message in messages]
    assert cut(packed.data, packed.message_begins, packed.message_lengths) == expected
    assert packed.data.tobytes() == b"".join(expected)


def cut(data: NDArray[np.uint8], begins: NDArray[np.intp], lengths: NDArray[np.intp]) -> list[bytes]:
    return [data[at : at + size].tobytes() for at, size in zip(begins.tolist(), lengths.tolist(), strict=True)]
