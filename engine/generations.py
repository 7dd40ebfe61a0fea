"""The generations that a host has, by key; what a step brings is sorted by columns, with no look at any of them."""

from __future__ import annotations

import array
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from seedance.engine.adapter import Output
from seedance.engine.channel import PAIR_BYTES, pack_singles
from seedance.engine.emitted import Emitted
from seedance.engine.host_channel import Channel, Generation
from seedance.engine.ledger import STREAMS

if TYPE_CHECKING:
    from seedance.engine.engine import Engine

_NOBODY: Final = 0
_FEWEST: Final = 8
"""Fewer generations than that in a step are cheaper one by one."""


class Generations:
    """Generations by key, below STREAMS; each is in its channel's, too."""

    __slots__ = ("_by_key", "_channel_numbers", "_channels", "_emitted", "_key", "_streams")

    def __init__(self) -> None:
        self._by_key: dict[int, Generation] = {}
        self._emitted = Emitted(self._by_key)
        self._key = 0
        self._channels: dict[int, Channel] = {}  # with a generation, by number and one
        # By key.
        self._channel_numbers = np.zeros(STREAMS, np.uint32)
        self._streams = np.zeros(STREAMS, np.uint32)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._by_key.values())

    def get(self, key: int) -> Generation | None:
        """Return the generation of a key, None when there is none."""
        return self._by_key.get(key)

    def free_key(self, others: Sequence[Collection[int]]) -> int:
        """Return a key that is no generation's and in none of the others; not one that was somebody's just now."""
        key = self._key
        while key in self._by_key or any(key in keys for keys in others):
            key = self._next(key)
        self._key = self._next(key)
        return key

    def _next(self, key: int) -> int:
        if key + 1 == STREAMS:
            self._emitted.fold()  # what is kept by key is never taken for that of the next one with the key
        return (key + 1) % STREAMS

    def add(self, generation: Generation) -> None:
        """Take a generation in; its key is free."""
        key, channel = generation.key, generation.channel
        self._by_key[key] = channel.generations[generation.stream] = generation
        number = channel.number + 1
        self._channels[number] = channel
        self._channel_numbers[key], self._streams[key] = number, generation.stream

    def remove(self, generation: Generation) -> None:
        """Let a generation go."""
        key, channel = generation.key, generation.channel
        del self._by_key[key]
        del channel.generations[generation.stream]
        self._channel_numbers[key] = _NOBODY
        if not channel.generations:
            del self._channels[channel.number + 1]

    def take_back(self, engine: Engine) -> list[Generation]:
        """Have an engine drop what it has of them; those are returned, up to date, and have no engine."""
        self.fold()
        taken = [generation for generation in self if generation.engine is engine]
        engine.adapter.abort([generation.key for generation in taken])
        for generation in taken:
            generation.engine = None
        return taken

    def brought(self, singles: bytes, outputs: Sequence[Output]) -> None:
        """Keep what a step has brought: `singles` as in `channel.Batch`, with keys in the place of streams."""
        self._emitted.add(singles, [(output.key, output.token_ids) for output in outputs] if outputs else ())

    def fold(self) -> None:
        """Bring the `token_ids` of all generations up to date."""
        self._emitted.fold()

    def by_channel(self, singles: bytes) -> list[tuple[Channel, bytes]]:
        """Return for each channel its part of `singles`, by stream; what is nobody's is left out."""
        if len(singles) < _FEWEST * PAIR_BYTES:
            return self._few_by_channel(singles)
        pairs = np.frombuffer(singles, np.uint32).reshape(-1, 2)
        keys = pairs[:, 0]
        numbers = self._channel_numbers[keys]
        pairs = np.column_stack((self._streams[keys], pairs[:, 1]))
        first = int(numbers[0])
        if (numbers == first).all():
            return [] if first == _NOBODY else [(self._channels[first], pairs.tobytes())]
        order = np.argsort(numbers, kind="stable")
        numbers, pairs = numbers[order], pairs[order]
        begins = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()]
        parts = zip(numbers[begins].tolist(), begins, [*begins[1:], len(numbers)], strict=True)
        return [(self._channels[number], pairs[at:end].tobytes()) for number, at, end in parts if number != _NOBODY]

    def _few_by_channel(self, singles: bytes) -> list[tuple[Channel, bytes]]:
        parts: dict[Channel, list[int]] = {}
        flat = iter(array.array("I", singles))
        for key, token_id in zip(flat, flat, strict=True):
            if (generation := self._by_key.get(key)) is not None:
                parts.setdefault(generation.channel, []).extend((generation.stream, token_id))
        return [(channel, pack_singles(part)) for channel, part in parts.items()]
