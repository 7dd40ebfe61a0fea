"""What the engine has brought, stream by stream."""

from __future__ import annotations

import array

from hypothesis import given
from hypothesis import strategies as st

from seedance.engine.channel import pack_singles
from seedance.engine.emitted import FOLD_BYTES, Emitted

NUMBERS = (1, 2, 1 + (1 << 16), 2**32 - 1, 7)
"""Some that end alike, and one of no stream."""


class Stream:
    def __init__(self) -> None:
        self.token_ids = array.array("I")


def test_tokens_of_streams_that_count_are_there_after_a_fold_in_order() -> None:
    streams = {7: Stream(), 8: Stream()}
    emitted = Emitted(streams)
    emitted.add(pack_singles([7, 1, 8, 2, 9, 3]))
    emitted.add(pack_singles([8, 7]), [(7, [4, 5]), (9, [6])])
    assert not streams[7].token_ids
    emitted.fold()
    emitted.fold()
    assert (streams[7].token_ids.tolist(), streams[8].token_ids.tolist()) == ([1, 4, 5], [2, 7])


def test_many_are_folded_without_being_asked_for() -> None:
    streams = {1: Stream()}
    emitted = Emitted(streams)
    batches = 10
    for at in range(batches):
        emitted.add(pack_singles([1, at] * (FOLD_BYTES // 8 // batches)))
    assert streams[1].token_ids.tolist() == [at for at in range(batches) for _ in range(FOLD_BYTES // 8 // batches)]


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(NUMBERS), st.integers(0, 99)),
            st.dictionaries(st.sampled_from(NUMBERS), st.lists(st.integers(0, 99), max_size=3)),
        )
    )
)
def test_it_is_as_if_each_token_had_been_appended(steps: list[tuple[dict[int, int], dict[int, list[int]]]]) -> None:
    streams = {number: Stream() for number in NUMBERS[:-1]}
    emitted = Emitted(streams)
    expected: dict[int, list[int]] = {number: [] for number in NUMBERS}
    for singles, deltas in steps:
        for number, token_id in singles.items():
            expected[number].append(token_id)
        for number, token_ids in deltas.items():
            expected[number] += token_ids
        packed = pack_singles(part for pair in singles.items() for part in pair)
        emitted.add(packed, deltas.items())
    emitted.fold()
    assert {number: one.token_ids.tolist() for number, one in streams.items()} == {
        number: expected[number] for number in streams
    }
