"""Stop strings: a text ends before the first of them, and no part of one is told before it is sure to be none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from seedance.daemon.detokenizer import Detokenizer


class StopMatcher:
    """Look for stop strings in a text that comes in pieces.

    `stopped` is the stop string that ended the text, None while it goes on. Of several, the one that is complete
    first ends it, or of those the first in order; so it does not matter how the text was cut into pieces.
    """

    __slots__ = ("_first", "_held", "_include", "_longest", "_stop", "stopped")

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self._stop: Final = tuple(stop)
        self._include: Final = include
        self._longest: Final = max(map(len, self._stop))
        self._first: Final = frozenset(text[0] for text in self._stop)
        self._held = ""
        self.stopped: str | None = None

    def feed(self, text: str) -> str:
        """Return what can be told now; nothing after the end."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        if self._first.isdisjoint(text):
            self._held = ""
            return text
        ends = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            end, at, self.stopped = min(ends, key=lambda found: found[0])
            self._held = ""
            return text[: end if self._include else at]
        told = self._first_possible(text)
        self._held = text[told:]
        return text[:told]

    def finish(self) -> str:
        """Return what was held back, at the end of a text that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _first_possible(self, text: str) -> int:
        """Return where the longest end of the text begins that may be the beginning of a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first and any(stop.startswith(text[at:]) for stop in self._stop):
                return at
        return len(text)


class StopDetokenizer:
    """A detokenizer that ends at stop strings; the text of the first `min_tokens` tokens is not searched.

    `stopped` tells the stop string, and `surplus_tokens` how many tokens of the last `feed` came after the one that
    completed it: they do not count as output.
    """

    __slots__ = ("_inner", "_matcher", "_unsearched", "surplus_tokens")

    def __init__(
        self, inner: Detokenizer, stop: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._inner = inner
        self._matcher = StopMatcher(stop, include_stop)
        self._unsearched = min_tokens
        self.surplus_tokens = 0

    @property
    def stopped(self) -> str | None:
        """Return the stop string that ended the text, None while it goes on."""
        return self._matcher.stopped

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete and that is no part of a stop string."""
        parts = []
        for place, token_id in enumerate(token_ids):
            text = self._inner.feed((token_id,))
            if self._unsearched:
                self._unsearched -= 1
                parts.append(text)
                continue
            parts.append(self._matcher.feed(text))
            if self._matcher.stopped is not None:
                self.surplus_tokens = len(token_ids) - place - 1
                break
        return "".join(parts)

    def finish(self) -> str:
        """Return the rest of the text when it did not end at a stop string; it may still do so now."""
        if self._matcher.stopped is not None:
            return ""
        text = self._inner.finish()
        if self._unsearched:
            return text
        return self._matcher.feed(text) + self._matcher.finish()
