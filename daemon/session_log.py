"""What the clients of one tenant may come back for: sessions and streams that outlive their connections.

Whatever is kept has a name for its tenant and a token for its client. A name is 128 random bits. A token is the name
and a MAC of it and the client under a key of the tenant's own: nobody can make one, and one of another tenant, or of
another client, is found out without anything being remembered. So the three answers differ:

* a token that is none here: `not_found`, and worth a line in the audit log, as only a mistake or an attack shows it;
* a token that is right, and nothing kept any more: `gone`;
* else what is kept.

Something that its client has left is kept for `resume_for_s`. All that is kept is bounded by bytes: what has been left
the longest goes first, and what is connected bounds itself.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import msgspec

NEVER: Final = float("inf")
REMEMBERED: Final = 1024
"""Of so many that are gone it is remembered where they began."""

_NAME_BYTES: Final = 16
_MAC_BYTES: Final = 16


class Resumable(Protocol):
    """What can be kept."""

    @property
    def held_bytes(self) -> int:
        """Return what it takes."""

    @property
    def oldest_seq(self) -> int:
        """Return the oldest sequence that a client may go on from."""


T = TypeVar("T", bound=Resumable)


class Absent(msgspec.Struct, frozen=True):
    """There is nothing for a token: `not_found`, or `gone` and, if that is remembered, the oldest that was kept."""

    code: str
    oldest_seq: int | None = None

    @property
    def is_suspicious(self) -> bool:
        """Tell whether it belongs into the audit log."""
        return self.code == "not_found"


class Kept(Generic[T]):
    """Something that is kept; `left_at_s` is when its client left, None while it is there."""

    __slots__ = ("item", "left_at_s", "name", "token")

    def __init__(self, name: str, token: str, item: T) -> None:
        self.name = name
        self.token = token
        self.item = item
        self.left_at_s: float | None = None


class SessionLog(Generic[T]):
    """All that is kept for one tenant. `now` is in seconds of a clock that never goes back."""

    __slots__ = (
        "_bound_bytes",
        "_kept",
        "_key",
        "_left",
        "_lost",
        "_oldest",
        "_random_bytes",
        "beside_bytes",
        "resume_for_s",
    )

    def __init__(
        self,
        key: bytes,
        resume_for_s: float,
        bound_bytes: int,
        random_bytes: Callable[[int], bytes],
        beside_bytes: Callable[[], int] = int,
    ) -> None:
        """`key` is the tenant's own, and the same after a restart; `random_bytes` is `os.urandom`.

        `beside_bytes` returns what counts against the bound, too, and is kept elsewhere.
        """
        self.beside_bytes = beside_bytes
        self._key = key
        self._bound_bytes = bound_bytes
        self._random_bytes = random_bytes
        self.resume_for_s = resume_for_s
        self._kept: dict[str, Kept[T]] = {}
        self._left: OrderedDict[str, Kept[T]] = OrderedDict()  # the one that was left first comes first
        self._lost: deque[Kept[T]] = deque()
        self._oldest: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def items(self) -> list[T]:
        """Return all that is kept."""
        return [kept.item for kept in self._kept.values()]

    def add(self, client_id: str, make: Callable[[str, str], T]) -> Kept[T]:
        """Keep what `make` makes of a new name and token, for a client that is there."""
        name = _text(self._random_bytes(_NAME_BYTES))
        token = self._token(name, client_id)
        kept = self._kept[name] = Kept(name, token, make(name, token))
        return kept

    def restore(self, name: str, client_id: str, make: Callable[[str, str], T]) -> Kept[T]:
        """Keep what had a name in another process, whose key was the same; its client is there until it `left`."""
        token = self._token(name, client_id)
        kept = self._kept[name] = Kept(name, token, make(name, token))
        return kept

    def find(self, token: str, client_id: str, now: float) -> Kept[T] | Absent:
        """Return what a client may go on with."""
        name = token.partition(".")[0]
        if not hmac.compare_digest(
            token.encode(errors="replace"), self._token(name, client_id).encode(errors="replace")
        ):
            return Absent("not_found")
        return self._look_up(name, now, "gone")

    def find_by_name(self, name: str, now: float) -> Kept[T] | Absent:
        """Return what has a name, for any client of the tenant: to end it, say."""
        return self._look_up(name, now, "not_found")

    def left(self, kept: Kept[T], now: float) -> None:
        """Take note that the client of something has left."""
        if kept.left_at_s is None and self._kept.get(kept.name) is kept:
            kept.left_at_s = now
            self._left[kept.name] = kept

    def returned(self, kept: Kept[T]) -> None:
        """Take note that it is back."""
        kept.left_at_s = None
        self._left.pop(kept.name, None)

    def remove(self, kept: Kept[T]) -> None:
        """Keep something no longer, as its client has all of it."""
        self._kept.pop(kept.name, None)
        self._left.pop(kept.name, None)

    def expire(self, now: float) -> list[Kept[T]]:
        """Let go of what was left for too long, or there is no room for; return it, for its streams to be ended."""
        excess_bytes = self.excess_bytes()
        while (first := self._first_left()) is not None:
            if now < self._expiry(first) and excess_bytes <= 0:
                break
            excess_bytes -= first.item.held_bytes
            self._lose(first)
        lost = list(self._lost)
        self._lost.clear()
        return lost

    def next_expiry(self) -> float:
        """Return when `expire` has something to do, NEVER while nobody is away; bytes are to be looked at besides."""
        if self._lost:
            return 0.0
        first = self._first_left()
        return NEVER if first is None else self._expiry(first)

    def held_bytes(self) -> int:
        """Return what all that is kept takes."""
        return sum(kept.item.held_bytes for kept in self._kept.values())

    def excess_bytes(self) -> int:
        """Return by how much that is over the bound; negative when there is room."""
        return self.held_bytes() + self.beside_bytes() - self._bound_bytes

    def _look_up(self, name: str, now: float, code: str) -> Kept[T] | Absent:
        kept = self._kept.get(name)
        if kept is not None and now >= self._expiry(kept):
            self._lose(kept)
            kept = None
        if kept is not None:
            return kept
        oldest_seq = self._oldest.get(name)
        return Absent(code if oldest_seq is None else "gone", oldest_seq)

    def _expiry(self, kept: Kept[T]) -> float:
        return NEVER if kept.left_at_s is None else kept.left_at_s + self.resume_for_s

    def _first_left(self) -> Kept[T] | None:
        return next(iter(self._left.values()), None)

    def _lose(self, kept: Kept[T]) -> None:
        self.remove(kept)
        self._lost.append(kept)
        self._oldest[kept.name] = kept.item.oldest_seq
        if len(self._oldest) > REMEMBERED:
            self._oldest.popitem(last=False)

    def _token(self, name: str, client_id: str) -> str:
        signed = name.encode(errors="replace") + b"\0" + client_id.encode(errors="replace")
        return f"{name}.{_text(hmac.digest(self._key, signed, hashlib.sha256)[:_MAC_BYTES])}"


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
