"""Streams in columns whose frames are alike: the frame of a token is made once, for all of them.

It lies in a store, from where the kernel takes it as often as the token comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from seedance.daemon.ring.frame_store import FrameStore, StoredFrames
from seedance.daemon.stream_columns import StreamColumns, doubled

_SLOTS: Final = 256  # at first


class PlainStreams(StreamColumns):
    """Rows of streams, and frames of tokens by slot, in the order in which they came: few of a vocabulary ever do."""

    __slots__ = ("_addresses", "_frame", "_lengths", "_slots", "_store", "_used")

    def __init__(self, frame: Callable[[str], bytes]) -> None:
        """`frame` makes the frame of a text."""
        super().__init__()
        self._frame = frame
        self.use_vocabulary(0)

    def use_vocabulary(self, token_ids: int) -> None:
        self._store = FrameStore()
        self._used = 1  # UNKNOWN
        # One more, which stays unknown, for all tokens that are not in the vocabulary.
        self._slots = np.zeros(token_ids + 1, np.intp)
        self._addresses = np.zeros(_SLOTS, np.uint64)
        self._lengths = np.zeros(_SLOTS, np.uint32)

    def learn(self, number: int, token_id: int, text: str) -> None:
        if self._slots[token_id]:
            return
        slot, frame = self._used, self._frame(text)
        if slot == len(self._lengths):
            self._addresses, self._lengths = doubled(self._addresses), doubled(self._lengths)
        self._addresses[slot] = self._store.add(frame)
        self._lengths[slot] = len(frame)
        self._slots[token_id] = slot
        self._used += 1

    def _find_slots(self, rows: NDArray[np.uint32], token_ids: NDArray[np.uint32]) -> NDArray[np.intp]:
        return self._slots.take(token_ids, mode="clip")

    def _frames(self, rows: NDArray[np.uint32], slots: NDArray[np.intp]) -> StoredFrames:
        return StoredFrames(self._addresses[slots].data, self._lengths[slots].data, self._store)
