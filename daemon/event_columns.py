"""Streams of server-sent events in columns, each the only one of its HTTP connection.

What comes before the text in an event is the stream's own (its id), what comes behind it is the same in all streams of
one kind. So the *head* is kept by stream, and text and *tail* by token and kind, and a step's chunks are rows of one
matrix, which the kernel is sent from:

    zeros | size, three digits | head | text, tail | zeros
                                        the text begins in the same place in all rows

A chunk's size may have leading zeros (RFC 9112 §7.1).
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from seedance.daemon.ring.frame_store import StoredFrames
from seedance.daemon.stream_columns import ROWS, StreamColumns, doubled

HEAD_BYTES: Final = 384
"""A stream whose head is longer stays outside."""
END_BYTES: Final = 160
"""A token whose text and tail are longer goes another way."""
KINDS: Final = 4
"""So many tails there are; a stream with one more stays outside."""

_SIZE_DIGITS: Final = 3
_BEFORE: Final = _SIZE_DIGITS + 2
_BEHIND: Final = 2
_DIGITS: Final = np.array([list(b"%03x" % size) for size in range(HEAD_BYTES + END_BYTES)], np.uint8)
_SLOTS: Final = 256  # at first
_SEATS: Final = 64  # at first

_json: Final = msgspec.json.Encoder().encode


class EventColumns(StreamColumns):
    """Rows of streams, each with a seat, where its head is; and texts with tails by slot.

    There are only as many seats as there were streams at once, as heads are long.
    """

    __slots__ = (
        "_end_lengths",
        "_ends",
        "_free",
        "_head_lengths",
        "_heads",
        "_kinds",
        "_seats",
        "_slots",
        "_tails",
        "_used",
        "_width",
    )

    def __init__(self) -> None:
        super().__init__()
        self._seats = np.zeros(ROWS, np.intp)
        self._free: list[int] = []
        self._heads = np.zeros((0, HEAD_BYTES), np.uint8)
        self._head_lengths = np.zeros(0, np.intp)
        self._kinds = np.zeros(0, np.intp)
        self._width = 0  # of the longest head
        self._tails: list[bytes] = []
        self.use_vocabulary(0)

    def use_vocabulary(self, token_ids: int) -> None:
        self._used = 1  # UNKNOWN
        # By kind, one after the other; and of each one more, for all tokens that are not in the vocabulary.
        self._slots = np.zeros((KINDS, token_ids + 1), np.intp)
        self._ends = np.zeros((_SLOTS, END_BYTES), np.uint8)
        self._end_lengths = np.zeros(_SLOTS, np.intp)

    def add_stream(self, number: int, fd: int, before: bytes, behind: bytes) -> bool:
        """Take a stream in, not plain yet, whose events have this before and behind the text, which is a JSON string.

        Returns False where there is no room for it.
        """
        head, tail = b"0" * _SIZE_DIGITS + b"\r\n" + before, behind + b"\r\n"
        kind = self._kind_of(tail)
        if len(head) > HEAD_BYTES or kind is None or not self.add(number, fd):
            return False
        if not self._free:
            self._more_seats()
        seat = self._free.pop()
        self._seats[number % ROWS] = seat
        self._heads[seat, -len(head) :] = np.frombuffer(head, np.uint8)
        self._head_lengths[seat], self._kinds[seat] = len(head), kind
        self._width = max(self._width, len(head))
        return True

    def remove(self, number: int) -> int:
        self._free.append(int(self._seats[number % ROWS]))
        return super().remove(number)

    def learn(self, number: int, token_id: int, text: str) -> None:
        kind = int(self._kinds[self._seats[number % ROWS]])
        end = _json(text) + self._tails[kind]
        if self._slots[kind, token_id] or len(end) > END_BYTES:
            return
        slot = self._used
        if slot == len(self._ends):
            self._ends, self._end_lengths = doubled(self._ends), doubled(self._end_lengths)
        self._ends[slot, : len(end)] = np.frombuffer(end, np.uint8)
        self._end_lengths[slot] = len(end)
        self._slots[kind, token_id] = slot
        self._used += 1

    def _kind_of(self, tail: bytes) -> int | None:
        if tail not in self._tails:
            if len(self._tails) == KINDS:
                return None
            self._tails.append(tail)
        return self._tails.index(tail)

    def _more_seats(self) -> None:
        seats = len(self._heads)
        more = seats or _SEATS
        self._heads = np.concatenate((self._heads, np.zeros((more, HEAD_BYTES), np.uint8)))
        self._head_lengths = np.concatenate((self._head_lengths, np.zeros(more, np.intp)))
        self._kinds = np.concatenate((self._kinds, np.zeros(more, np.intp)))
        self._free.extend(range(seats + more - 1, seats - 1, -1))

    def _find_slots(self, rows: NDArray[np.uint32], token_ids: NDArray[np.uint32]) -> NDArray[np.intp]:
        slots: NDArray[np.intp]
        if len(self._tails) == 1:
            slots = self._slots[0].take(token_ids, mode="clip")
        else:
            last = self._slots.shape[1] - 1
            slots = self._slots[self._kinds[self._seats[rows]], np.minimum(token_ids, last)]
        return slots

    def _frames(self, rows: NDArray[np.uint32], slots: NDArray[np.intp]) -> StoredFrames:
        seats = self._seats[rows]
        head_lengths, end_lengths = self._head_lengths[seats], self._end_lengths[slots]
        lengths = head_lengths + end_lengths
        head_bytes, end_bytes = self._width, int(end_lengths.max())
        width = head_bytes + end_bytes
        matrix = np.empty((len(rows), width), np.uint8)
        matrix[:, :head_bytes] = self._heads.take(seats, axis=0)[:, HEAD_BYTES - head_bytes :]
        matrix[:, head_bytes:] = self._ends.take(slots, axis=0)[:, :end_bytes]
        flat = matrix.reshape(-1)
        begins = np.arange(head_bytes, flat.size + head_bytes, width) - head_lengths
        digits = _DIGITS[lengths - (_BEFORE + _BEHIND)]
        for digit in range(_SIZE_DIGITS):
            flat[begins + digit] = digits[:, digit]
        addresses = (begins + flat.ctypes.data).astype(np.uint64)
        return StoredFrames(addresses.data, lengths.astype(np.uint32).data, matrix)
