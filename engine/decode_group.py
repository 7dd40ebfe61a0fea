"""The decoding requests of one tenant, which advance together.

A tenant is scheduled or left out as a whole, so all its decoding requests advance by one token in the same steps. So
the group counts rounds, and a request's position is the round in which it joined and where it stood then: a step costs
the same however many they are. The rare request that misses a round (the engine found no block for it, or knows that
it has ended) is put back by one.

A request needs a new KV block when its position is a multiple of the block's size. Which round that is, modulo the
block's size, is known when it joins; a table counts the requests for each.
"""

from __future__ import annotations

from typing import Protocol


class Member(Protocol):
    """What a group keeps in a request: `computed` tokens when it joined, in round `joined`."""

    computed: int
    joined: int


class DecodeGroup:
    """Decoding requests of one tenant; `size` of them, whose contexts sum up to `context_tokens`."""

    __slots__ = ("_block_tokens", "_crossings", "context_tokens", "rounds", "size")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._crossings = [0] * block_tokens
        self.context_tokens = 0
        self.rounds = 0
        self.size = 0

    def join(self, member: Member) -> None:
        """Take in a request that stands at `computed` tokens."""
        member.joined = self.rounds
        self.size += 1
        self.context_tokens += member.computed
        self._crossings[(self.rounds - member.computed) % self._block_tokens] += 1

    def leave(self, member: Member) -> None:
        """Let a request go; its `computed` says where it stands."""
        self._crossings[(member.joined - member.computed) % self._block_tokens] -= 1
        member.computed += self.rounds - member.joined
        self.context_tokens -= member.computed
        self.size -= 1

    def position(self, member: Member) -> int:
        """Return how many tokens of a member have been computed."""
        return member.computed + self.rounds - member.joined

    def growth(self) -> int:
        """Return how many KV blocks the next round needs."""
        return self._crossings[self.rounds % self._block_tokens]

    def advance(self) -> int:
        """Count one token for every member; returns how many KV blocks that takes."""
        growth = self._crossings[self.rounds % self._block_tokens]
        self.context_tokens += self.size
        self.rounds += 1
        return growth

    def put_back(self, member: Member) -> int:
        """Undo the last round for a member that was not scheduled in it; returns the KV blocks it did not take."""
        self.leave(member)
        member.computed -= 1
        self.join(member)
        return 0 if member.computed % self._block_tokens else 1
