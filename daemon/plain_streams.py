"""The streams whose plain tokens go straight to a flow, as columns: a step of theirs is a few operations on arrays.

With thousands of streams, what a token costs is the objects that it touches: none of them is in the processor's cache
any more when its turn comes. Here a stream is a row, a token an index, and its frame lies in a store from where the
kernel takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seedance.daemon.ring.frame_store import FrameStore, StoredFrames

ROWS: Final = 1 << 16
"""A stream's row is its number modulo this; one whose row is taken stays outside."""

FEWEST: Final = 32
"""Fewer tokens than that in a step are cheaper one by one."""


class Sends(NamedTuple):
    """Frames, and the flows that get them."""

    fds: memoryview
    frames: StoredFrames


class PlainStreams:
    """Rows of streams, and frames of tokens; number 0 is no stream's."""

    __slots__ = ("_addresses", "_counts", "_fds", "_frame", "_lengths", "_numbers", "_store", "_taken")

    def __init__(self, frame: Callable[[str], bytes]) -> None:
        """`frame` makes the frame of a text."""
        self._frame = frame
        self._taken = bytearray(ROWS)
        self._numbers = np.zeros(ROWS, np.uint32)  # 0 where the next token is not plain
        self._fds = np.zeros(ROWS, np.uint32)
        self._counts = np.zeros(ROWS, np.uint32)
        self.use_vocabulary(0)

    def use_vocabulary(self, token_ids: int) -> None:
        """Begin anew with the frames, for a vocabulary of so many tokens."""
        self._store = FrameStore()
        # One more, which has no frame, for all tokens that are not in the vocabulary.
        self._addresses = np.zeros(token_ids + 1, np.uint64)
        self._lengths = np.zeros(token_ids + 1, np.uint32)

    def learn(self, token_id: int, text: str) -> None:
        """Make the frame of a token in the vocabulary, unless there is one."""
        if not self._lengths[token_id]:
            frame = self._frame(text)
            self._addresses[token_id] = self._store.add(frame)
            self._lengths[token_id] = len(frame)

    def add(self, number: int, fd: int) -> bool:
        """Take a stream in, not plain yet; returns False where there is no row for it."""
        row = number % ROWS
        if self._taken[row]:
            return False
        self._taken[row] = True
        self._fds[row] = fd
        return True

    def set_plain(self, number: int, is_plain: bool) -> None:
        """Say whether the next token of a stream stands for just its text."""
        self._numbers[number % ROWS] = number if is_plain else 0

    def remove(self, number: int) -> int:
        """Let a stream go; returns how many of its tokens went through here."""
        row = number % ROWS
        self._taken[row] = False
        self._numbers[row] = 0
        count = int(self._counts[row])
        self._counts[row] = 0
        return count

    def take(
        self, numbers: NDArray[np.uint32], token_ids: NDArray[np.uint32]
    ) -> tuple[Sends | None, NDArray[np.uint32], NDArray[np.uint32]]:
        """Count what of a step goes straight to flows, and return it; and what is left."""
        rows = numbers % ROWS
        is_plain = self._numbers[rows] == numbers
        is_plain &= self._lengths.take(token_ids, mode="clip") > 0
        left_numbers, left_ids = numbers[:0], token_ids[:0]
        if not is_plain.all():
            left = ~is_plain
            left_numbers, left_ids = numbers[left], token_ids[left]
            rows, token_ids = rows[is_plain], token_ids[is_plain]
        if not len(rows):
            return None, left_numbers, left_ids
        self._counts[rows] += 1  # no stream is twice in it
        frames = StoredFrames(view(self._addresses[token_ids], "Q"), view(self._lengths[token_ids], "I"), self._store)
        return Sends(view(self._fds[rows], "I"), frames), left_numbers, left_ids


def view(column: NDArray[np.uint32] | NDArray[np.uint64], kind: str) -> memoryview:
    """Return a column by the name that the standard library has for its type."""
    return memoryview(column).cast("B").cast(kind)  # type: ignore[arg-type, call-overload, no-any-return]
