"""The backlog of a slow worker: one delta a stream, and nothing lost or out of order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seedance.engine.backlog import BATCH_TOKENS, Backlog
from seedance.engine.channel import Batch, Delta, EngineChanged, QueueBound, Receiver, Refused, ToWorker
from seedance.engine.request import FinishReason, TokenLogprobs

DEAD = EngineChanged("dead", "", None)


def drain(backlog: Backlog) -> list[ToWorker]:
    receiver: Receiver[ToWorker] = Receiver(ToWorker)
    messages = []
    while data := backlog.pop():
        messages += receiver.receive_data(data)
    assert (backlog.tokens, backlog.message_bytes) == (0, 0)
    return messages


def logprobs(token_id: int) -> TokenLogprobs:
    return TokenLogprobs([token_id], [-1.0], 1)


def test_empty_backlog_has_nothing() -> None:
    assert drain(Backlog()) == []


def test_deltas_of_a_stream_become_one() -> None:
    backlog = Backlog()
    backlog.add_deltas([Delta(1, [10], None, [logprobs(10)], 16), Delta(2, [20])])
    backlog.add_deltas([Delta(1, [11, 12], None, [logprobs(11), logprobs(12)])])
    backlog.add_deltas([Delta(2, [21]), Delta(1, [], FinishReason.ERROR, None, 0, "cannot go on")])
    assert backlog.tokens == 5
    assert drain(backlog) == [
        Batch(
            [
                Delta(1, [10, 11, 12], FinishReason.ERROR, [logprobs(i) for i in (10, 11, 12)], 16, "cannot go on"),
                Delta(2, [20, 21]),
            ]
        )
    ]
    assert backlog.batches == 1


def test_of_the_queue_s_bounds_only_the_last_is_kept() -> None:
    backlog = Backlog()
    for most in range(1000):
        backlog.add_message(QueueBound(most, 1.0, 32))
    assert backlog.message_bytes == 0
    assert drain(backlog) == [QueueBound(999, 1.0, 32)]


def test_engine_change_keeps_its_place() -> None:
    backlog = Backlog()
    refused = Refused(3, "overloaded", "cannot")
    backlog.add_message(refused)
    backlog.add_deltas([Delta(1, [10])])
    backlog.add_message(DEAD)
    backlog.add_deltas([Delta(1, [11])])
    backlog.add_message(refused)
    assert backlog.message_bytes > 0
    assert drain(backlog) == [Batch([Delta(1, [10])]), refused, DEAD, Batch([Delta(1, [11])]), refused]


def test_discarded_streams_are_gone() -> None:
    backlog = Backlog()
    backlog.add_deltas([Delta(1, [10]), Delta(2, [20])])
    backlog.add_message(DEAD)
    backlog.add_deltas([Delta(1, [11])])
    assert backlog.holds(1)
    backlog.discard([1, 3])
    assert not backlog.holds(1)
    assert drain(backlog) == [Batch([Delta(2, [20])]), DEAD]


def test_large_backlog_leaves_in_bounded_batches() -> None:
    backlog = Backlog()
    for _ in range(10):
        backlog.add_deltas([Delta(stream, [5] * 1_000) for stream in range(10)])
        backlog.add_deltas([Delta(10, [6] * 3_000)])
    messages = drain(backlog)
    sizes = [sum(len(delta.token_ids) for delta in batch.deltas) for batch in messages if isinstance(batch, Batch)]
    assert sum(sizes) == 130_000
    assert max(sizes) == 30_000, "a stream is not cut"
    assert all(size <= BATCH_TOKENS for size in sizes[:-1])
    assert len(sizes) == backlog.batches == len(messages)


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 99), max_size=4)), max_size=6)))
def test_streams_are_what_was_added(steps: list[list[tuple[int, list[int]]]]) -> None:
    backlog = Backlog()
    expected: dict[int, list[int]] = {}
    for step in steps:
        backlog.add_deltas([Delta(stream, list(token_ids)) for stream, token_ids in step])
        for stream, token_ids in step:
            expected.setdefault(stream, []).extend(token_ids)
    assert backlog.tokens == sum(map(len, expected.values()))
    deltas = [delta for message in drain(backlog) if isinstance(message, Batch) for delta in message.deltas]
    assert {delta.stream: delta.token_ids for delta in deltas} == expected
    assert len(deltas) == len(expected)
