"""The streams whose plain tokens go straight to a flow, as columns: a step of theirs is a few operations on arrays.

With thousands of streams, what a token costs is the objects that it touches: none of them is in the processor's cache
any more when its turn comes. Here a stream is a row, a token an index, and its frame lies in a store from where the
kernel takes it. Who is in a step is looked up only when that has changed since the last one.
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


class _Members(NamedTuple):
    """Who is in a step: `key` has the streams' numbers; which places the plain ones have, and their rows and flows."""

    key: bytes
    plain: NDArray[np.intp] | slice
    others: NDArray[np.intp] | slice
    rows: NDArray[np.uint32]
    fds: NDArray[np.uint32]


class PlainStreams:
    """Rows of streams, and frames of tokens; number 0 is no stream's."""

    __slots__ = (
        "_addresses",
        "_counts",
        "_fds",
        "_frame",
        "_lengths",
        "_members",
        "_numbers",
        "_steps",
        "_store",
        "_taken",
    )

    def __init__(self, frame: Callable[[str], bytes]) -> None:
        """`frame` makes the frame of a text."""
        self._frame = frame
        self._taken = bytearray(ROWS)
        self._numbers = np.zeros(ROWS, np.uint32)  # 0 where the next token is not plain
        self._fds = np.zeros(ROWS, np.uint32)
        self._counts = np.zeros(ROWS, np.uint32)
        self._members: _Members | None = None  # of the last step, unless one of them has changed since
        self._steps = 0  # for the members, not in their counts yet
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
        self._forget_members()
        self._taken[row] = True
        self._fds[row] = fd
        return True

    def set_plain(self, number: int, is_plain: bool) -> None:
        """Say whether the next token of a stream stands for just its text."""
        row, plain_number = number % ROWS, number if is_plain else 0
        if self._numbers[row] != plain_number:
            self._forget_members()
            self._numbers[row] = plain_number

    def remove(self, number: int) -> int:
        """Let a stream go; returns how many of its tokens went through here."""
        self._forget_members()
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
        members = self._members
        key = numbers.tobytes()
        if members is None or members.key != key:
            members = self._look_up(numbers, key)
        if not len(members.fds):
            return None, numbers, token_ids
        plain_ids = token_ids[members.plain].astype(np.intp)
        lengths = self._lengths.take(plain_ids, mode="clip")
        if np.count_nonzero(lengths) < len(lengths):
            return self._take_known(members, token_ids, lengths > 0)
        self._steps += 1  # no stream is twice in it
        frames = StoredFrames(self._addresses.take(plain_ids).data, lengths.data, self._store)
        return Sends(members.fds.data, frames), numbers[members.others], token_ids[members.others]

    def _take_known(
        self, members: _Members, token_ids: NDArray[np.uint32], is_known: NDArray[np.bool_]
    ) -> tuple[Sends | None, NDArray[np.uint32], NDArray[np.uint32]]:
        """Take a step in which some tokens have no frame (yet)."""
        numbers = np.frombuffer(members.key, np.uint32)
        at = np.arange(len(numbers))[members.plain][is_known]
        is_left = np.ones(len(token_ids), np.bool_)
        is_left[at] = False
        left_numbers, left_ids = numbers[is_left], token_ids[is_left]
        if not len(at):
            return None, left_numbers, left_ids
        self._counts[members.rows[is_known]] += 1
        known_ids = token_ids[at]
        frames = StoredFrames(self._addresses[known_ids].data, self._lengths[known_ids].data, self._store)
        return Sends(members.fds[is_known].data, frames), left_numbers, left_ids

    def _look_up(self, numbers: NDArray[np.uint32], key: bytes) -> _Members:
        """Find out who is in a step."""
        self._forget_members()
        rows = numbers % ROWS
        is_plain = self._numbers[rows] == numbers
        plain: NDArray[np.intp] | slice = slice(None)
        others: NDArray[np.intp] | slice = slice(0)
        if not is_plain.all():
            plain, others = np.flatnonzero(is_plain), np.flatnonzero(~is_plain)
        rows = rows[plain]
        self._members = _Members(key, plain, others, rows, self._fds[rows])
        return self._members

    def _forget_members(self) -> None:
        if self._steps:
            assert self._members is not None
            self._counts[self._members.rows] += self._steps
            self._steps = 0
        self._members = None
