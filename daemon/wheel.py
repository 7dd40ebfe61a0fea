"""A wheel of members, each of which is visited once in a turn of it."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

SHORTEST_PLACE_S: Final = 0.01
MOST_PLACES: Final = 2048
TOGETHER: Final = 32
EARLY: Final = 0.1
_GOLDEN: Final = (5**0.5 - 1) / 2  # whose multiples lie evenly in a circle, however many there are

M = TypeVar("M")


class Wheel(Generic[M]):
    """Visits each member once in `period_s` or a little less, for the first time in the second half of it.

    However they come, they are spread evenly: what visits cost is never to be paid at once. But to wake up costs more
    than some visits, so up to TOGETHER are visited with the first, by that part of the period EARLY. `members`, in the
    order in which they came, is only to be read; `now` is any clock's, and `due` is to be asked when `next_s` says.
    """

    __slots__ = ("_ahead", "_begun_s", "_count", "_passed", "_place_s", "_places", "_spread", "members")

    def __init__(self, period_s: float, now: float) -> None:
        self._count = min(max(int(period_s / SHORTEST_PLACE_S), 1), MOST_PLACES)
        self._ahead = int(self._count * EARLY)
        self._place_s = period_s / (self._count + self._ahead)
        self._begun_s = now
        self._passed = 0  # places since then, some of them ahead of time
        self._spread = 0.0  # as a part of a turn
        self._places: dict[int, set[M]] = {}  # those with anybody in them
        self.members: dict[M, int] = {}

    def add(self, member: M) -> None:
        """Take a member."""
        self._spread = (self._spread + _GOLDEN) % 1.0
        place = self.members[member] = (self._passed + 1 + int((1 + self._spread) / 2 * self._count)) % self._count
        self._places.setdefault(place, set()).add(member)

    def remove(self, member: M) -> None:
        """Let a member go. Raises KeyError when it is none."""
        place = self.members.pop(member)
        left = self._places[place]
        left.discard(member)
        if not left:
            del self._places[place]

    def due(self, now: float) -> list[M]:
        """Return whom to visit now."""
        passed = int((now - self._begun_s) / self._place_s)
        first = max(self._passed + 1, passed - self._count + 1)
        due = [member for at in range(first, passed + 1) for member in self._places.get(at % self._count, ())]
        self._passed = max(self._passed, passed)
        if due:
            last = min(passed + self._ahead, first + self._count - 1)
            while len(due) < TOGETHER and self._passed < last:
                self._passed += 1
                due += self._places.get(self._passed % self._count, ())
        return due

    def next_s(self, now: float) -> float:
        """Return in how many seconds the next visit is due, at most a period."""
        at = next((at for at in self._after() if at % self._count in self._places), self._passed + self._count)
        return max(self._begun_s + at * self._place_s - now, 0.0)

    def _after(self) -> range:
        return range(self._passed + 1, self._passed + self._count + 1)
