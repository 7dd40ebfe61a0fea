"""Whether a text came whole, in order and once: as it comes, and afterwards."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Sequence


class NotOnce(Exception):
    """Something of a stream was lost, or came twice; the text says what."""


class Expected:
    """A stream's text as it must come, byte by byte; `name` is what it is called when it does not."""

    def __init__(self, name: str, text: str) -> None:
        self.seen = 0
        self._name = name
        self._whole = text.encode()

    def advance(self, piece: bytes) -> None:
        """Take the next bytes. Raises NotOnce at the first that is not the next one."""
        after = self.seen + len(piece)
        if self._whole[self.seen : after] == piece:
            self.seen = after
            return
        due = self._whole[self.seen : after]
        raise NotOnce(f"{self._name}: {self._how(piece)} at byte {self.seen}: {piece!r} came where {due!r} was due")

    def end(self) -> None:
        """Take the end. Raises NotOnce when text is missing."""
        if self.seen != len(self._whole):
            raise NotOnce(f"{self._name}: lost: it ended at byte {self.seen} of {len(self._whole)}")

    def _how(self, piece: bytes) -> str:
        if self.seen >= len(self._whole):
            return "more than all"
        later, earlier = self._whole.find(piece, self.seen), self._whole.rfind(piece, 0, self.seen + len(piece) - 1)
        if later > 0 and (earlier < 0 or later - self.seen <= self.seen - earlier):
            return f"lost ({later - self.seen} bytes)"
        return f"doubled ({self.seen - earlier} bytes)" if earlier >= 0 else "wrong"


def differences(expected: Sequence[Hashable], came: Sequence[Hashable]) -> tuple[int, int]:
    """Return how many items of a sequence did not come, and how many came that should not have."""
    if expected == came:
        return 0, 0
    blocks = difflib.SequenceMatcher(None, expected, came, autojunk=False).get_matching_blocks()
    same = sum(block.size for block in blocks)
    return len(expected) - same, len(came) - same
