"""What the engine has brought so far, stream by stream, so that another engine can go on with it.

Tokens come by the step, for all streams at once, and are kept as they came. Only when there are many of them, or
somebody asks, are they sorted by stream: that is a few operations on arrays, and one on each stream.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from seedance.engine.channel import pack_singles

FOLD_BYTES: Final = 512 << 10
_OBJECT_BYTES: Final = 48


class Emitting(Protocol):
    """Something that tokens come of, as unsigned 32-bit ids."""

    token_ids: array.array[int]


class Emitted:
    """Token ids of streams by number, to be found in the `token_ids` of each after a `fold`."""

    __slots__ = ("_size_bytes", "_streams", "_tokens")

    def __init__(self, streams: Mapping[int, Emitting]) -> None:
        """`streams` are those that count, and stays the caller's."""
        self._streams = streams
        self._tokens: list[bytes] = []
        self._size_bytes = 0

    def add(self, singles: bytes, others: Iterable[tuple[int, Sequence[int]]] = ()) -> None:
        """Take what a step brought: `singles` as in `channel.Batch`, and of others the number and its token ids."""
        self._tokens.append(singles)
        self._size_bytes += len(singles) + _OBJECT_BYTES
        for number, token_ids in others:
            more = pack_singles(part for token_id in token_ids for part in (number, token_id))
            self._tokens.append(more)
            self._size_bytes += len(more) + _OBJECT_BYTES
        if self._size_bytes >= FOLD_BYTES:
            self.fold()

    def fold(self) -> None:
        """Bring all streams up to date."""
        flat = np.frombuffer(b"".join(self._tokens), np.uint32)
        self._tokens, self._size_bytes = [], 0
        if not len(flat):
            return
        numbers, token_ids = flat[0::2], flat[1::2]
        # Numbers that end alike may be mixed, in pieces, each stream's in order: the sort of 16 bits is by far faster.
        order = np.argsort(numbers.astype(np.uint16), kind="stable")
        numbers, data = numbers[order], token_ids[order].tobytes()
        ends = [*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        find, at = self._streams.get, 0
        for number, end in zip(numbers[[at - 1 for at in ends]].tolist(), ends, strict=True):
            stream = find(number)
            if stream is not None:
                stream.token_ids.frombytes(data[4 * at : 4 * end])
            at = end
