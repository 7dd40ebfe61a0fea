"""What the user_data of our operations says: the kind, and whose it is.

    63      56 55       32 31        0
    |  kind   | generation |  index   |

The index finds the owner (a flow or a listener) at once. The generation tells the owner's successor in the same place
apart; nothing of an old owner is in flight when its place is given away, so a mismatch is a bug and asserts.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

KIND_SHIFT: Final = 56
KIND_POLL: Final = 1  # the selector's; its lower bits are its own
KIND_ACCEPT: Final = 2
KIND_RECEIVE: Final = 3
KIND_SEND: Final = 4
KIND_WRITABLE: Final = 5
KIND_CANCEL: Final = 6

TAG_MASK: Final = (1 << KIND_SHIFT) - 1
_GENERATION_SHIFT: Final = 32
_INDEX_MASK: Final = (1 << _GENERATION_SHIFT) - 1
_GENERATION_MASK: Final = (1 << (KIND_SHIFT - _GENERATION_SHIFT)) - 1

T = TypeVar("T")


class Owners(Generic[T]):
    """The owners of operations by tag; a tag is the part of user_data below the kind."""

    __slots__ = ("_free", "_generation", "_owners", "_tags")

    def __init__(self) -> None:
        self._owners: list[T | None] = []
        self._tags: list[int] = []
        self._free: list[int] = []
        self._generation = 0

    def new_tag(self) -> int:
        """Reserve a place; `put` says for whom."""
        if self._free:
            index = self._free.pop()
        else:
            index = len(self._owners)
            self._owners.append(None)
            self._tags.append(0)
        self._generation = (self._generation + 1) & _GENERATION_MASK
        tag = self._generation << _GENERATION_SHIFT | index
        self._tags[index] = tag
        return tag

    def put(self, tag: int, owner: T) -> None:
        """Name the owner of a reserved place."""
        self._owners[tag & _INDEX_MASK] = owner

    def get(self, tag: int) -> T:
        """Return the owner."""
        index = tag & _INDEX_MASK
        owner = self._owners[index]
        assert owner is not None and self._tags[index] == tag, "cannot match a completion to its owner"
        return owner

    def remove(self, tag: int) -> None:
        """Free the place; nothing of its owner may be in flight."""
        index = tag & _INDEX_MASK
        self._owners[index] = None
        self._free.append(index)

    def all(self) -> list[T]:
        """Return every owner."""
        return [owner for owner in self._owners if owner is not None]
