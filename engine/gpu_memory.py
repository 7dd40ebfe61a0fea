"""What to do before a GPU's memory runs out: pure.

What runs an engine out of memory is mostly somebody else on the same GPU, or what its own allocator keeps and does not
use. Above the watermark nothing new is let in; if that is no help, the engine is asked to give back what it does not
use; if that is none either, its streams move: the engine is ended before CUDA does it in the middle of a step.

    below ──above──► HOLD ──5 s──► SHRINK ──10 s──► MOVE
      ▲                │              │
      └── 2 % below ───┴──────────────┘
"""

from __future__ import annotations

import enum
from typing import Final

SHRINK_AFTER_S: Final = 5.0
MOVE_AFTER_S: Final = 15.0
_MARGIN: Final = 0.02


class Action(enum.Enum):
    """What is to be done now; HOLD lasts until RELEASE."""

    NONE = "none"
    HOLD = "hold"
    SHRINK = "shrink"
    MOVE = "move"
    RELEASE = "release"


class Watermark:
    """The watch over one GPU's memory; `mark` is the part of it in use at which something is done."""

    def __init__(self, mark: float) -> None:
        self._mark = mark
        self._since_s: float | None = None
        self._done = Action.NONE

    def look(self, now_s: float, used: float | None) -> Action:
        """Return what is to be done, each thing once; `used` is None where nobody can say."""
        if used is None:
            return Action.NONE
        if self._since_s is None:
            return self._do(Action.HOLD, now_s) if used >= self._mark else Action.NONE
        if used < self._mark - _MARGIN:
            self._since_s = None
            self._done = Action.NONE
            return Action.RELEASE
        above_s = now_s - self._since_s
        if used >= self._mark and self._done is Action.HOLD and above_s >= SHRINK_AFTER_S:
            return self._do(Action.SHRINK, self._since_s)
        if used >= self._mark and self._done is Action.SHRINK and above_s >= MOVE_AFTER_S:
            return self._do(Action.MOVE, self._since_s)
        return Action.NONE

    def _do(self, action: Action, since_s: float) -> Action:
        self._since_s = since_s
        self._done = action
        return action
