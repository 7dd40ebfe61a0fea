"""The texts of a vocabulary's tokens as rows of a matrix, made as tokens come: few of a vocabulary ever do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from seedance.daemon.decoder_table import Entry
from seedance.daemon.stream_columns import doubled

TEXT_BYTES: Final = 128
"""Longer texts have no slot; vocabularies have some of nearly that, as of many spaces."""
UNSEEN, UNFIT, FIRST = range(3)
"""Slots of tokens that have none, and the first that is one."""
_SLOTS: Final = 256  # at first
_MOST_SLOTS: Final = 2**16 - 1


class TokenTexts:
    """Slots: in each a text, `texts` as wide as any may be, and its length in `lengths`; in UNSEEN an empty one."""

    __slots__ = ("_entries", "_slots", "_used", "lengths", "texts")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        # One more, which never fits, for all tokens that are not in the vocabulary.
        self._slots = np.zeros(len(entries) + 1, np.uint16)
        self._slots[-1] = UNFIT
        self._used = FIRST
        self.lengths = np.zeros(_SLOTS, np.uint8)
        self.texts = np.zeros((_SLOTS, TEXT_BYTES), np.uint8)

    def find(self, token_ids: NDArray[np.uint32]) -> NDArray[np.uint16]:
        """Return the slots of tokens, UNFIT for those that have no text by themselves, or one that is too long."""
        slots = self._slots.take(token_ids, mode="clip")
        if not slots.all():  # UNSEEN among them
            for token_id in set(token_ids[slots == UNSEEN].tolist()):
                self._learn(token_id)
            slots = self._slots.take(token_ids, mode="clip")
        return slots

    def _learn(self, token_id: int) -> None:
        entry, slot = self._entries[token_id], self._used
        text = entry.encode() if isinstance(entry, str) else b""
        if not 0 < len(text) <= TEXT_BYTES or slot > _MOST_SLOTS:
            self._slots[token_id] = UNFIT
            return
        if slot == len(self.lengths):
            self.lengths, self.texts = doubled(self.lengths), doubled(self.texts)
        self.texts[slot, : len(text)] = np.frombuffer(text, np.uint8)
        self.lengths[slot] = len(text)
        self._slots[token_id] = slot
        self._used += 1
