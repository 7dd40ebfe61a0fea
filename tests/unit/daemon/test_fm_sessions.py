"""Whose session is whose, how long each waits, and how many there may be."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import pytest
from support.fm_worker import FmPeer, FmWorker

from seedance.daemon.fm_streams import SESSION_COST_BYTES
from seedance.daemon.protocol.fm_messages import Cancel, End
from seedance.engine.channel import Abort, Submit
from seedance.qos.quota import SessionQuota


@pytest.fixture
def worker() -> Iterator[FmWorker]:
    worker = FmWorker()
    yield worker
    worker.close()


def connected(worker: FmWorker, client_id: str = "client") -> FmPeer:
    peer = FmPeer(worker, client_id)
    peer.connect()
    return peer


def test_a_session_ends_with_its_streams_when_its_time_is_up(worker: FmWorker) -> None:
    peer = connected(worker)
    peer.ask()
    (submit,) = worker.heard()
    assert isinstance(submit, Submit)
    peer.drop()
    worker.wait(9.9)
    assert (len(worker.sessions), worker.heard()) == (1, [])
    worker.wait(0.2)
    assert (len(worker.sessions), worker.heard()) == (0, [Abort([submit.stream])])
    peer.connect()
    assert peer.refusal is not None
    assert (peer.refusal.code, peer.refusal.oldest_seq) == ("gone", 1)


def test_who_comes_back_in_time_may_stay(worker: FmWorker) -> None:
    peer = connected(worker)
    peer.drop()
    worker.wait(9.0)
    peer.connect()
    worker.wait(20.0)
    assert len(worker.sessions) == 1
    assert peer.refusal is None


def test_the_time_is_the_quotas_also_for_who_is_away(worker: FmWorker) -> None:
    peer = connected(worker)
    peer.drop()
    worker.sessions.quota_changed(msgspec.structs.replace(worker.quota, session=SessionQuota(resume_for_s=2.0)))
    worker.wait(1.9)
    assert len(worker.sessions) == 1
    worker.wait(0.2)
    assert len(worker.sessions) == 0
    assert worker.sessions.resume_for_ms == 2000


def test_a_token_is_its_clients_own(worker: FmWorker, caplog: pytest.LogCaptureFixture) -> None:
    peer = connected(worker)
    thief = FmPeer(worker, "thief")
    thief.client._welcome = peer.client._welcome
    with caplog.at_level(logging.WARNING):
        thief.connect()
    assert thief.refusal is not None
    assert (thief.refusal.code, thief.refusal.oldest_seq) == ("not_found", None)
    assert caplog.messages == ["audit: client 'thief' asks for a session that is not its own"]


def test_sessions_are_bounded_by_a_part_of_the_tenants_memory() -> None:
    worker = FmWorker(memory_bytes=4 * 3 * SESSION_COST_BYTES)
    peers = [connected(worker, str(number)) for number in range(5)]
    for peer in peers:
        peer.drop()
    worker.wait(1.1)
    assert len(worker.sessions) == 3
    for peer in peers:
        peer.connect()
    assert [peer.refusal is not None for peer in peers] == [True, True, False, False, False]
    worker.close()


def test_any_client_of_the_tenant_ends_a_stream_by_its_name(worker: FmWorker, caplog: pytest.LogCaptureFixture) -> None:
    peer, other = connected(worker), connected(worker, "other")
    stream = peer.ask()
    (submit,) = worker.heard()
    assert isinstance(submit, Submit)
    peer.drop()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # the second one is only late
            other.client.cancel(Cancel(stream=0, id=peer.id(stream)))
            other.pump()
        assert (worker.heard(), other.notes(), caplog.messages) == ([Abort([submit.stream])], [], [])
        other.client.cancel(Cancel(stream=0, id="nobody's"))
        other.pump()
    assert other.notes() == ["cannot cancel 'nobody's': there is no such stream"]
    assert [message.partition(":")[0] for message in caplog.messages] == ["audit"]
    peer.connect()
    end = peer.last(stream)
    assert isinstance(end, End)
    assert end.finish_reason == "abort"


def test_names_are_not_told_by_one_another(worker: FmWorker) -> None:
    peer = connected(worker)
    ids = [peer.id(peer.ask()) for _ in range(20)]
    assert len(set(ids)) == 20
    assert {len(id) for id in ids} == {22}


def test_all_clients_get_a_note(worker: FmWorker) -> None:
    here, away = connected(worker), connected(worker, "away")
    away.drop()
    worker.sessions.tell_all("draining", 2000)
    here.pump()
    away.connect()
    assert here.notes() == away.notes() == ["draining"]
