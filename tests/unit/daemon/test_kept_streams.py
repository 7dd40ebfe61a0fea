"""Whose stream is whose, how long each waits, and what goes when there is no room for all."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import pytest
from support.fm_worker import FmPeer
from support.kept_parts import FakeReader, KeptWorker

from seedance.daemon.doors.errors import ApiError
from seedance.daemon.fm_streams import SESSION_COST_BYTES
from seedance.daemon.kept_request import RequestKey
from seedance.daemon.kept_stream import STREAM_COST_BYTES, KeptStream
from seedance.daemon.kept_streams import LEAST_STREAM_BYTES
from seedance.qos.quota import SessionQuota


@pytest.fixture
def worker() -> Iterator[KeptWorker]:
    worker = KeptWorker()
    yield worker
    worker.close()


def refusal(worker: KeptWorker, stream: KeptStream, door: str = "events") -> ApiError:
    with pytest.raises(ApiError) as caught:
        worker.streams.find(door, stream.kept.token)
    return caught.value


def visited(stream: KeptStream) -> KeptStream:
    """Have a client come and go."""
    reader = FakeReader()
    stream.connect(reader, stream.history.next_seq - 1)
    stream.disconnected(reader)
    return stream


def finished(stream: KeptStream) -> KeptStream:
    """Have a client read all of it."""
    reader = FakeReader()
    stream.connect(reader, 0)
    stream.finish()
    stream._streams.flush()
    assert reader.said[-1] == "all_taken"
    return stream


def test_a_stream_ends_when_its_time_is_up(worker: KeptWorker) -> None:
    stream = visited(worker.begin())
    worker.wait(9.9)
    assert worker.streams.find("events", stream.kept.token) is stream
    worker.wait(0.2)
    assert (len(worker.streams), stream.is_over, stream.answer.cancelled) == (0, True, True)
    error = refusal(worker, stream)
    assert (error.code, error.status, error.oldest_seq) == ("gone", 410, 1)
    assert worker.sessions.cancel(stream.id)  # only late


def test_who_is_there_may_stay(worker: KeptWorker) -> None:
    stream = visited(worker.begin())
    worker.wait(9.0)
    stream.connect(FakeReader(), 0)
    worker.wait(20.0)
    assert len(worker.streams) == 1


def test_the_time_is_the_quotas_also_for_who_is_away(worker: KeptWorker) -> None:
    stream = visited(worker.begin())
    worker.streams.quota_changed(msgspec.structs.replace(worker.quota, session=SessionQuota(resume_for_s=2.0)))
    assert worker.streams.resume_for_ms == 2000
    worker.wait(2.1)
    assert refusal(worker, stream).code == "gone"


def test_a_token_is_of_one_door(worker: KeptWorker, caplog: pytest.LogCaptureFixture) -> None:
    stream = worker.begin("messages")
    with caplog.at_level(logging.WARNING):
        error = refusal(worker, stream)
    assert (error.code, error.status, error.oldest_seq) == ("not_found", 404, None)
    assert caplog.messages == ["audit: a client asks for a stream that is not its own"]
    assert worker.streams.find("messages", stream.kept.token) is stream


def test_an_fm_sessions_token_is_none_of_a_stream(worker: KeptWorker) -> None:
    peer = FmPeer(worker, "events")
    peer.connect()
    assert peer.session is not None
    with pytest.raises(ApiError) as caught:
        worker.streams.find("events", peer.session.kept.token)
    assert caught.value.code == "gone"


def test_a_request_comes_again_under_its_key(worker: KeptWorker) -> None:
    key, streams = RequestKey.of("k", b"a"), worker.streams
    stream = streams.begin("events", key)
    assert streams.begun("events", key) is stream
    assert streams.begun("messages", key) is None
    assert streams.begun("events", RequestKey.of("other", b"a")) is None
    with pytest.raises(ApiError) as caught:
        streams.begun("events", RequestKey.of("k", b"b"))
    assert (caught.value.status, caught.value.param) == (422, "idempotency_key")
    stream.fail(ApiError("internal", "cannot"))
    assert streams.begun("events", key) is None
    assert len(streams) == 0


def test_the_key_of_what_has_expired_is_free_at_once(worker: KeptWorker) -> None:
    key, streams = RequestKey.of("k", b"a"), worker.streams
    stream = streams.begin("events", key)
    stream.answer = worker.begin().answer
    visited(stream)
    worker.loop._jumping.now += 10.0  # and no timer has fired yet
    assert streams.begun("events", key) is None
    again = streams.begin("events", RequestKey.of("k", b"b"))
    worker.wait(1.0)
    assert streams.begun("events", RequestKey.of("k", b"b")) is again


def test_what_is_over_can_be_let_go_of(worker: KeptWorker) -> None:
    running, over = visited(worker.begin()), finished(worker.begin())
    assert not worker.streams.release(running.id)
    assert worker.streams.release(over.id)
    assert not worker.streams.release(over.id)
    assert refusal(worker, over).code == "gone"


def test_what_is_abandoned_ends(worker: KeptWorker) -> None:
    running, over = worker.begin(), finished(worker.begin())
    for stream in (running, over):
        worker.streams.abandon(stream)
    assert (running.answer.cancelled, over.answer.cancelled) == (True, False)
    assert len(worker.streams) == 0


def test_any_client_ends_a_stream_by_its_name(worker: KeptWorker) -> None:
    stream, reader = worker.begin(), FakeReader()
    stream.connect(reader, 0)
    assert worker.sessions.cancel(stream.id)
    assert reader.taken == []  # before the journal has it
    worker.wait()
    assert reader.taken == [(1, b"abort")]


def test_those_that_run_have_equal_parts_of_half_the_bound() -> None:
    bound_bytes = 8 * LEAST_STREAM_BYTES
    worker = KeptWorker(memory_bytes=4 * bound_bytes)
    streams = [worker.begin()]
    assert worker.streams.stream_bytes == bound_bytes // 2
    streams += [worker.begin(), worker.begin()]
    assert worker.streams.stream_bytes == bound_bytes // 6
    streams += [worker.begin() for _ in range(10)]
    assert worker.streams.stream_bytes == LEAST_STREAM_BYTES
    for stream in streams:
        stream.finish()
    assert worker.streams.stream_bytes == bound_bytes // 2
    worker.close()


def test_what_was_read_to_its_end_goes_first_then_what_was_left_first() -> None:
    worker = KeptWorker(memory_bytes=4 * 4 * STREAM_COST_BYTES)
    away = [visited(worker.begin()) for _ in range(3)]
    read = [finished(worker.begin()) for _ in range(2)]
    worker.wait(1.1)
    assert refusal(worker, read[0]).code == "gone"
    assert worker.streams.find("events", read[1].kept.token) is read[1]
    more = [visited(worker.begin()) for _ in range(2)]
    worker.wait(1.1)
    assert [refusal(worker, stream).code for stream in (read[1], away[0])] == ["gone", "gone"]
    assert [worker.streams.find("events", stream.kept.token) for stream in away[1:] + more] == away[1:] + more
    worker.close()


def test_sessions_and_streams_share_the_bound() -> None:
    worker = KeptWorker(memory_bytes=4 * 4 * SESSION_COST_BYTES)
    peers = [FmPeer(worker, str(number)) for number in range(3)]
    for peer in peers:
        peer.connect()
    streams = [visited(worker.begin()) for _ in range(2)]
    worker.wait(1.1)
    assert refusal(worker, streams[0]).code == "gone"
    assert worker.streams.find("events", streams[1].kept.token) is streams[1]
    streams.append(visited(worker.begin()))
    peers[0].drop()
    worker.wait(1.1)
    assert len(worker.sessions) + len(worker.streams) == 4
    worker.close()
