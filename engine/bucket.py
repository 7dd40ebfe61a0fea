"""Credits that come at a rate: what holds a tenant's engine time or tokens to a hard limit."""

from __future__ import annotations


class Bucket:
    """Credits that come at `rate` a second, are kept up to `burst`, and may be owed up to `debt`.

    Charges come after the fact: what is charged beyond the credits is owed, and is paid first. So from any moment on,
    charges made only while there is credit are at most rate x time + burst + the last one. A charge that would lead
    deeper into debt than `debt` is cut there: one broken step must not shut a tenant out for minutes.

    `now_s` is in seconds of any monotonic clock. A bucket begins full.
    """

    __slots__ = ("_at_s", "_level", "burst", "debt", "rate")

    def __init__(self, rate: float, burst: float, debt: float, now_s: float) -> None:
        self.rate = rate
        self.burst = burst
        self.debt = debt
        self._level = burst
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return the credits; negative when some are owed."""
        if now_s > self._at_s:
            level = self._level + (now_s - self._at_s) * self.rate
            self._level = level if level < self.burst else self.burst
            self._at_s = now_s
        return self._level

    def charge(self, amount: float, now_s: float) -> float:
        """Take credits, and return how many are left."""
        level = self._level + (now_s - self._at_s) * self.rate
        level = (level if level < self.burst else self.burst) - amount
        self._level = level if level > -self.debt else -self.debt
        self._at_s = now_s
        return self._level

    def due_s(self, level: float, now_s: float) -> float:
        """Return when there will be that many credits, at most the burst; `now_s` or earlier means at once."""
        missing = min(level, self.burst) - self.level(now_s)
        return now_s + missing / self.rate

    def set_limits(self, rate: float, burst: float, debt: float, now_s: float) -> None:
        """Take over another rate; credits and debts stay, within the new bounds."""
        level = self.level(now_s)
        self.rate, self.burst, self.debt = rate, burst, debt
        self._level = max(-debt, min(burst, level))
