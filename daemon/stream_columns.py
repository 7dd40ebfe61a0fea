"""Streams whose plain tokens go straight to a flow, as columns: a step of theirs is a few operations on arrays.

With thousands of streams, what a token costs is the objects that it touches: none of them is in the processor's cache
any more when its turn comes. Here a stream is a row, a token a slot, and what of its frame can be made beforehand is
made once. Who is in a step is looked up only when that has changed since the last one.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from seedance.daemon.ring.frame_store import StoredFrames

ROWS: Final = 1 << 16
"""A stream's row is its number modulo this; one whose row is taken stays outside."""

FEWEST: Final = 32
"""Fewer tokens than that in a step are cheaper one by one."""

UNKNOWN: Final = 0
"""The slot of a token of which nothing has been made yet."""

A = TypeVar("A", bound=np.generic)


def doubled(table: NDArray[A]) -> NDArray[A]:
    """Return a table with room for twice as much."""
    return np.concatenate((table, np.zeros_like(table)))


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


class StreamColumns:
    """Rows of streams; number 0 is no stream's. What their frames are is for those who extend this."""

    __slots__ = ("_counts", "_fds", "_members", "_numbers", "_size", "_steps", "_taken")

    def __init__(self) -> None:
        self._size = 0
        self._taken = bytearray(ROWS)
        self._numbers = np.zeros(ROWS, np.uint32)  # 0 where the next token is not plain
        self._fds = np.zeros(ROWS, np.uint32)
        self._counts = np.zeros(ROWS, np.uint32)
        self._members: _Members | None = None  # of the last step, unless one of them has changed since
        self._steps = 0  # for the members, not in their counts yet

    def __len__(self) -> int:
        return self._size

    def use_vocabulary(self, token_ids: int) -> None:
        """Begin anew with what is known of tokens, for a vocabulary of so many."""
        raise NotImplementedError

    def learn(self, number: int, token_id: int, text: str) -> None:
        """Make what can be made of a token in the vocabulary for frames like those of a stream, unless that is done."""
        raise NotImplementedError

    def add(self, number: int, fd: int) -> bool:
        """Take a stream in, not plain yet; returns False where there is no row for it."""
        row = number % ROWS
        if self._taken[row]:
            return False
        self._forget_members()
        self._taken[row] = True
        self._fds[row] = fd
        self._size += 1
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
        self._size -= 1
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
        slots = self._find_slots(members.rows, token_ids[members.plain])
        if np.count_nonzero(slots) < len(slots):
            return self._take_known(members, token_ids, slots)
        self._steps += 1  # no stream is twice in it
        sends = Sends(members.fds.data, self._frames(members.rows, slots))
        return sends, numbers[members.others], token_ids[members.others]

    def _take_known(
        self, members: _Members, token_ids: NDArray[np.uint32], slots: NDArray[np.intp]
    ) -> tuple[Sends | None, NDArray[np.uint32], NDArray[np.uint32]]:
        """Take a step in which some tokens are not known (yet)."""
        numbers = np.frombuffer(members.key, np.uint32)
        is_known = slots != UNKNOWN
        is_left = np.ones(len(token_ids), np.bool_)
        is_left[np.arange(len(numbers))[members.plain][is_known]] = False
        sends, rows = None, members.rows[is_known]
        if len(rows):
            self._counts[rows] += 1
            sends = Sends(members.fds[is_known].data, self._frames(rows, slots[is_known]))
        return sends, numbers[is_left], token_ids[is_left]

    def _find_slots(self, rows: NDArray[np.uint32], token_ids: NDArray[np.uint32]) -> NDArray[np.intp]:
        """Return where what was learned of each row's token is; UNKNOWN also for what is not in the vocabulary."""
        raise NotImplementedError

    def _frames(self, rows: NDArray[np.uint32], slots: NDArray[np.intp]) -> StoredFrames:
        """Return the frame of each row; none of the slots is UNKNOWN."""
        raise NotImplementedError

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
