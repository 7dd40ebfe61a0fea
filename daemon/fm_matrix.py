"""TOKENS frames of many sessions out of columns, as rows of a matrix: those of a session below each other.

    empty | WebSocket header (2, 4) | FM header (11) | what the stream's payloads begin with (3 to 7) | text | empty
            of a session's first row                            the text begins in the same place in all rows ┘

What is empty is left out in the end. So the frames of a session are one message.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seedance.daemon.protocol.fm_frame import HEADER_BYTES, TOKENS_PREFIX_BYTES, tokens_frame
from seedance.daemon.protocol.frame import FIN_BIT, LENGTH_16, SHORT_HEADER_BYTES, Opcode

_LONG_HEADER_BYTES: Final = 4
HEAD_BYTES: Final = _LONG_HEADER_BYTES + HEADER_BYTES + TOKENS_PREFIX_BYTES
"""Of what `head` returns."""
_SEQ_AT: Final = -8  # from where the payload begins


class Packed(NamedTuple):
    """Frames, one behind the other, with a header before those of each message; and where in `data` they all lie."""

    data: NDArray[np.uint8]
    message_begins: NDArray[np.intp]
    message_lengths: NDArray[np.intp]
    begins: NDArray[np.intp]
    lengths: NDArray[np.intp]


def head(prefix: bytes) -> NDArray[np.uint8]:
    """Return what a row has before its text, where payloads begin so."""
    return np.frombuffer(tokens_frame(0, prefix, b"").rjust(HEAD_BYTES, b"\0"), np.uint8)


def pack(
    firsts: NDArray[np.intp],
    seqs: NDArray[np.int64],
    heads: NDArray[np.uint8],
    prefix_lengths: NDArray[np.uint8],
    texts: NDArray[np.uint8],
    text_lengths: NDArray[np.uint8],
) -> Packed:
    """Make frames of rows of these columns; a message begins with each of `firsts`, and is of less than 64 KiB.

    `heads` has what `head` returns for a prefix, `prefix_lengths` how long that is.
    """
    rows, width = len(seqs), HEAD_BYTES + texts.shape[1]
    matrix = np.empty((rows, width), np.uint8)
    matrix[:, :HEAD_BYTES] = heads
    matrix[:, HEAD_BYTES:] = texts
    flat = matrix.reshape(-1)
    payloads_at = np.arange(HEAD_BYTES, flat.size, width) - prefix_lengths.astype(np.intp)
    payload_lengths = prefix_lengths + text_lengths
    flat[payloads_at - 1] = payload_lengths
    for byte in range(4):
        flat[payloads_at + _SEQ_AT + byte] = seqs >> (24 - 8 * byte) & 0xFF
    lengths = payload_lengths.astype(np.intp) + HEADER_BYTES
    contents = np.add.reduceat(lengths, firsts)
    header_lengths = _write_headers(flat, payloads_at[firsts] - HEADER_BYTES, contents)

    begins_in_row = HEAD_BYTES - HEADER_BYTES - prefix_lengths.astype(np.intp)
    begins_in_row[firsts] -= header_lengths
    ends_in_row = HEAD_BYTES + text_lengths.astype(np.intp)
    columns = np.arange(width)
    data = matrix[(columns >= begins_in_row[:, None]) & (columns < ends_in_row[:, None])]
    ends = np.cumsum(ends_in_row - begins_in_row)
    message_lengths = contents + header_lengths
    return Packed(data, np.cumsum(message_lengths) - message_lengths, message_lengths, ends - lengths, lengths)


def _write_headers(flat: NDArray[np.uint8], at: NDArray[np.intp], lengths: NDArray[np.intp]) -> NDArray[np.intp]:
    """Write a header before each of these places, for so many bytes; return how long they are."""
    is_long = lengths >= LENGTH_16
    header_lengths = np.where(is_long, _LONG_HEADER_BYTES, SHORT_HEADER_BYTES)
    at = at - header_lengths
    flat[at] = FIN_BIT | Opcode.BINARY
    flat[at + 1] = np.where(is_long, LENGTH_16, lengths)
    long_at, long_lengths = at[is_long], lengths[is_long]
    flat[long_at + 2] = long_lengths >> 8
    flat[long_at + 3] = long_lengths & 0xFF
    return header_lengths
