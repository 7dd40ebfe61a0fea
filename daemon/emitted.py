"""What the engine has brought so far, stream by stream, so that another engine can go on with it.

Tokens come by the step, for all streams at once, and are looked at one by one only when that is worth it: until then
what each step brought is kept as it came.
"""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from typing import Final

from seedance.daemon.stream import Stream
from seedance.engine.channel import Batch, Delta

FOLD_BYTES: Final = 64 << 10


class Emitted:
    """Token ids of streams by number, to be found in each `Stream.token_ids` after a `fold`."""

    __slots__ = ("_batches", "_size_bytes", "_streams")

    def __init__(self, streams: Mapping[int, Stream]) -> None:
        """`streams` are those that count, and stays the caller's."""
        self._streams = streams
        self._batches: list[tuple[bytes, Sequence[Delta]]] = []
        self._size_bytes = 0

    def add(self, batch: Batch) -> None:
        """Take what a step brought; lists in it are not to be changed any more."""
        self._batches.append((batch.singles, batch.deltas))
        self._size_bytes += len(batch.singles) + 64 * len(batch.deltas)
        if self._size_bytes >= FOLD_BYTES:
            self.fold()

    def fold(self) -> None:
        """Bring all streams up to date."""
        batches, self._batches, self._size_bytes = self._batches, [], 0
        find = self._streams.get
        for singles, deltas in batches:
            flat = iter(array.array("I", singles))
            for number, token_id in zip(flat, flat, strict=True):
                stream = find(number)
                if stream is not None:
                    stream.token_ids.append(token_id)
            for delta in deltas:
                stream = find(delta.stream)
                if stream is not None:
                    stream.token_ids.fromlist(delta.token_ids)
