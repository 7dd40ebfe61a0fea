"""The last records of a stream, for a client that says which of them it has: events of SSE, messages of JSON.

Such a client acknowledges nothing, so what is kept is bounded by bytes alone: the oldest records go first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

RECORD_COST_BYTES: Final = 64
"""What a record costs beside its bytes, roughly."""


class History:
    """Records numbered 1, 2, 3 …; `oldest_seq` is the oldest that is kept, `next_seq` the next to be given.

    `bound_bytes` may change, and counts from the next record on.
    """

    __slots__ = ("_records", "bound_bytes", "held_bytes", "next_seq")

    def __init__(self, bound_bytes: int) -> None:
        self.bound_bytes = bound_bytes
        self._records: deque[bytes] = deque()
        self.held_bytes = 0
        self.next_seq = 1

    @property
    def oldest_seq(self) -> int:
        """Return the sequence of the oldest record, that of the next one when none is kept."""
        return self.next_seq - len(self._records)

    def append(self, record: bytes, needed_from: float = math.inf) -> int:
        """Keep a record, letting go of old ones for it, and return its sequence; the newest is kept, long as it is.

        So are those from `needed_from` on, whatever they take: it is for the caller to see that they become no more.
        """
        self._records.append(record)
        self.held_bytes += len(record) + RECORD_COST_BYTES
        self.next_seq += 1
        seq = self.next_seq - 1
        while self.held_bytes > self.bound_bytes and self.oldest_seq < min(seq, needed_from):
            self.held_bytes -= len(self._records.popleft()) + RECORD_COST_BYTES
        return seq

    def after(self, seq: int) -> list[bytes] | None:
        """Return the records behind `seq`, None when the first of them is gone or `seq` was never given."""
        if not self.oldest_seq - 1 <= seq < self.next_seq:
            return None
        newest_first = islice(reversed(self._records), self.next_seq - 1 - seq)
        return list(newest_first)[::-1]

    def restore(self, first_seq: int, records: Sequence[bytes]) -> None:
        """Have records that were kept before, of which the first has this sequence."""
        self._records = deque(records)
        self.next_seq = first_seq + len(records)
        self.held_bytes = size_bytes(records)


def size_bytes(records: Sequence[bytes]) -> int:
    """Return what records take."""
    return sum(map(len, records)) + RECORD_COST_BYTES * len(records)
