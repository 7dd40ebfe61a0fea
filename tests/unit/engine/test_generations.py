"""Generations in columns, beside a table that a reader can follow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.engine.adapter import Output
from seedance.engine.channel import Submit, pack_singles
from seedance.engine.generations import Generations
from seedance.engine.host_channel import Generation
from seedance.engine.ledger import STREAMS
from seedance.engine.request import Sampling


class Channel:
    """As much of a worker's channel as is needed here."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.generations: dict[int, Generation] = {}


def begin(generations: Generations, channel: Any, stream: int, emitted: tuple[int, ...] = ()) -> Generation:
    submit = Submit(stream, [1], Sampling(max_tokens=9), emitted_token_ids=emitted)
    generation = Generation(generations.free_key([]), channel, submit)
    generations.add(generation)
    return generation


def steps_of(least: int) -> st.SearchStrategy[dict[int, int]]:
    """Token ids by key, of so many keys at least."""
    return st.dictionaries(st.integers(0, 45), st.integers(0, 2**32 - 1), min_size=least)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=40),
    st.lists(st.sampled_from((1, 8)).flatmap(steps_of), max_size=5),
)
def test_a_step_is_sorted_by_channel(places: list[tuple[int, bool]], steps: list[dict[int, int]]) -> None:
    generations = Generations()
    channels = [Channel(number) for number in range(5)]
    all_of_them = [begin(generations, channels[at], 100 + n) for n, (at, _) in enumerate(places)]
    for generation, (_, stays) in zip(all_of_them, places, strict=True):
        if not stays:
            generations.remove(generation)
    alive = {generation.key: generation for generation in generations}
    assert len(generations) == len(alive) == sum(stays for _, stays in places)
    tokens: dict[int, list[int]] = {key: [] for key in alive}
    for step in steps:
        expected: dict[Any, list[int]] = {}
        for key, token_id in step.items():
            if key in alive:
                tokens[key].append(token_id)
                expected.setdefault(alive[key].channel, []).extend((alive[key].stream, token_id))
        singles = pack_singles(part for pair in step.items() for part in pair)
        generations.brought(singles, [])
        assert dict(generations.by_channel(singles)) == {c: pack_singles(flat) for c, flat in expected.items()}
    generations.fold()
    assert {key: generation.token_ids.tolist() for key, generation in alive.items()} == tokens


def test_what_comes_is_kept_behind_what_there_was() -> None:
    generations, channel = Generations(), Channel(0)
    generation = begin(generations, channel, 7, (1, 2))
    generations.brought(pack_singles([generation.key, 3]), [])
    generations.brought(b"", [Output(generation.key, [4, 5]), Output(generation.key + 1, [6])])
    assert generation.token_ids.tolist() == [1, 2]
    generations.fold()
    assert generation.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert channel.generations == {7: generation}
    generations.remove(generation)
    assert channel.generations == {}
    assert generations.get(generation.key) is None


def test_keys_go_round() -> None:
    generations, channel = Generations(), Channel(0)
    first = begin(generations, channel, 0)
    assert first.key == 0
    assert generations.free_key([{1, 2}, {4}]) == 3
    assert generations.free_key([{1, 2}, {4}]) == 5
    generations._key = STREAMS - 1
    assert generations.free_key([{STREAMS - 1}]) == 1, "0 is somebody's"


def test_tokens_of_an_ended_generation_are_not_the_next_ones() -> None:
    generations, channel = Generations(), Channel(0)
    first = begin(generations, channel, 0)
    generations.brought(pack_singles([first.key, 7]), [])
    generations.remove(first)
    generations._key = STREAMS - 1
    begin(generations, channel, 1)
    second = begin(generations, channel, 2)
    assert second.key == first.key
    generations.fold()
    assert second.token_ids.tolist() == []


def test_a_key_is_known_once() -> None:
    generations, channel = Generations(), Channel(0)
    generation = begin(generations, channel, 0)
    generations.remove(generation)
    with pytest.raises(KeyError):
        generations.remove(generation)
