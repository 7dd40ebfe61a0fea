"""What the engine has brought, stream by stream."""

from __future__ import annotations

from support.worker_parts import FakeSink

from seedance.daemon import tokenizer
from seedance.daemon.emitted import FOLD_BYTES, Emitted
from seedance.daemon.stream import Stream
from seedance.engine.channel import Batch, Delta, pack_singles


def stream() -> Stream:
    return Stream(FakeSink(), tokenizer.synthetic().detokenizer(), None)


def test_tokens_of_streams_that_count_are_there_after_a_fold_in_order() -> None:
    streams = {7: stream(), 8: stream()}
    emitted = Emitted(streams)
    emitted.add(Batch([], pack_singles([7, 1, 8, 2, 9, 3])))
    emitted.add(Batch([Delta(7, [4, 5]), Delta(9, [6])], pack_singles([8, 7])))
    assert not streams[7].token_ids
    emitted.fold()
    emitted.fold()
    assert (streams[7].token_ids.tolist(), streams[8].token_ids.tolist()) == ([1, 4, 5], [2, 7])


def test_many_are_folded_without_being_asked_for() -> None:
    streams = {1: stream()}
    emitted = Emitted(streams)
    for token_id in range(FOLD_BYTES // 8):
        emitted.add(Batch([], pack_singles([1, token_id])))
    assert streams[1].token_ids.tolist() == list(range(FOLD_BYTES // 8))
