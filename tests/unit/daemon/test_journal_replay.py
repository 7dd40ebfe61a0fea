"""What comes of a journal's records of kept streams; sessions are in `test_journal`."""

from __future__ import annotations

from typing import Any

import pytest

from seedance.daemon.journal_records import (
    ChoiceEnded,
    Deltas,
    KeptOver,
    KeptRecord,
    SessionEnded,
    StreamRecord,
    StreamSubmitted,
    encode,
    encode_kept,
    encode_tokens,
    token_bytes,
    token_list,
)
from seedance.daemon.journal_replay import replay
from seedance.engine.channel import pack_singles
from seedance.engine.request import Sampling

SAMPLING = Sampling(max_tokens=5)


def kept(number: int, **fields: Any) -> bytes:
    return encode(KeptRecord(number, "name", "events", "completion", b"{}", **fields))


def submitted(number: int, choice: int, engine: int) -> bytes:
    return encode(StreamSubmitted(number, choice, engine, "m", token_bytes([7, 8]), SAMPLING))


def one(*entries: bytes) -> KeptRecord:
    (record,) = replay(entries)
    assert isinstance(record, KeptRecord)
    return record


def test_records_follow_each_other_and_the_oldest_go() -> None:
    record = one(
        kept(1),
        encode_kept(1, 1, 0, 1, b"a") + encode_kept(1, 1, 1, 2, b"b"),
        encode_kept(1, 3, 2, 3, b"c"),
        encode_kept(2, 1, 0, 1, b"of none"),
    )
    assert (record.first_seq, record.records, record.sent_seq, record.is_begun) == (3, [b"c"], 2, False)


def test_what_was_written_as_a_whole_is_not_there_twice() -> None:
    whole = kept(1, first_seq=3, records=[b"c", b"d"], sent_seq=4)
    record = one(whole, encode_kept(1, 3, 4, 4, b"d"), encode_kept(1, 3, 4, 5, b"e"))
    assert (record.first_seq, record.records) == (3, [b"c", b"d", b"e"])


def test_a_generation_goes_on_from_all_that_came_of_it() -> None:
    singles = encode_tokens(pack_singles([4, 1, 5, 2, 4, 3]))
    deltas = encode(Deltas([(5, token_bytes([6, 7]), 2), (9, token_bytes([1]), 0)]))
    record = one(kept(1), submitted(1, 0, 4) + submitted(1, 1, 5), singles, deltas)
    assert record.is_begun
    assert [token_list(stream.token_ids) for stream in record.streams] == [[1, 3], [2, 6, 7]]
    assert [stream.cached_tokens for stream in record.streams] == [0, 2]
    assert [stream.engine for stream in record.streams] == [None, None]  # for the next worker to give
    assert [stream.sampling for stream in record.streams] == [SAMPLING, SAMPLING]


def test_a_generation_goes_on_under_another_number() -> None:
    whole = kept(1, streams=[StreamRecord(0, model="m", sampling=SAMPLING, token_ids=token_bytes([1, 2]))])
    record = one(whole, submitted(1, 0, 1), encode_tokens(pack_singles([1, 3])))
    assert token_list(record.streams[0].token_ids) == [1, 2, 3]


def test_a_choice_that_has_ended_gets_nothing_more() -> None:
    record = one(
        kept(1),
        submitted(1, 0, 4) + submitted(1, 1, 5),
        encode_tokens(pack_singles([4, 1, 5, 2])) + encode(ChoiceEnded(1, 0, 1)),
        encode_tokens(pack_singles([4, 9, 5, 3])),
    )
    assert [stream.ended_tokens for stream in record.streams] == [1, None]
    assert token_list(record.streams[1].token_ids) == [2, 3]


def test_what_is_over_keeps_its_records_alone() -> None:
    record = one(kept(1), submitted(1, 0, 4), encode_kept(1, 1, 0, 1, b"a") + encode(KeptOver(1)))
    assert (record.is_over, record.body, record.records, record.streams) == (True, b"", [b"a"], [])


@pytest.mark.parametrize("last", [encode(SessionEnded(1)), encode(KeptOver(1)) + encode(SessionEnded(1))])
def test_what_is_kept_no_longer_is_not_there(last: bytes) -> None:
    assert replay([kept(1), submitted(1, 0, 4), last, encode_kept(1, 1, 0, 1, b"a"), encode(KeptOver(1))]) == []
