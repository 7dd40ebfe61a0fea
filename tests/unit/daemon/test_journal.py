"""The journal of a worker: what the next one is told, what room it takes, and what happens without room."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import msgspec
import pytest
from support.fm_worker import MODEL, TOKENIZER, FmPeer, FmWorker

from seedance.daemon import shared_log
from seedance.daemon.journal import Journal
from seedance.daemon.journal_records import SessionRecord, encode
from seedance.daemon.protocol.fm_messages import Cancel, End, Error
from seedance.daemon.shared_log import SharedLog
from seedance.engine.channel import Abort, Submit
from seedance.engine.request import FinishReason


@pytest.fixture
def fd() -> Iterator[int]:
    fd = shared_log.create("test")
    yield fd
    os.close(fd)


class Life:
    """A worker and its client, through the worker's deaths."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.worker = FmWorker(log_fd=fd)
        self.peer = FmPeer(self.worker)
        self.peer.connect()

    def die(self, *, is_ready: bool = True) -> None:
        self.worker.die()
        self.peer.client.receive_eof()
        self.worker = self.peer.worker = FmWorker(log_fd=self.fd, is_ready=is_ready)

    def submit(self) -> Submit:
        (submit,) = self.worker.heard()
        assert isinstance(submit, Submit)
        return submit


@pytest.fixture
def life(fd: int) -> Iterator[Life]:
    life = Life(fd)
    yield life
    life.worker.close()


def test_a_stream_goes_on_in_the_next_worker_with_its_name_and_its_usage(life: Life) -> None:
    stream = life.peer.ask(max_tokens=50, seed=3)
    first = life.submit()
    life.worker.step("some", first.stream)
    life.peer.pump()
    life.worker.step(" words", first.stream)
    life.worker.wait()  # sent, and the client never gets it
    life.die()
    second = life.submit()
    assert (second.prompt_token_ids, second.sampling) == (first.prompt_token_ids, first.sampling)
    assert list(second.emitted_token_ids) == [*TOKENIZER.encode("some"), *TOKENIZER.encode(" words")]
    life.peer.connect()
    life.worker.step(" and more", second.stream, reason=FinishReason.LENGTH)
    life.peer.pump()
    assert life.peer.text(stream) == "some words and more"
    end = life.peer.last(stream)
    assert isinstance(end, End)
    more = TOKENIZER.encode(" and more")
    assert end.usage["completion_tokens"] == len(second.emitted_token_ids) + len(more)
    assert end.usage["prompt_tokens"] == len(first.prompt_token_ids)
    assert "first_token_ms" in end.slo
    assert life.peer.notes() == []


def test_what_a_client_was_told_is_never_told_otherwise(life: Life) -> None:
    """A frame that left has its number for good, though the worker died before it was acknowledged."""
    stream = life.peer.ask()
    submit = life.submit()
    life.worker.step("told", submit.stream)
    life.worker.wait()
    (told,) = life.peer.connection.messages
    life.die()
    life.peer.reads = False
    life.peer.connect()
    assert told in b"".join(life.peer.connection.messages)
    life.peer.reads = True
    life.peer.pump()
    assert life.peer.text(stream) == "told"
    life.die()  # what it has acknowledged meanwhile need not be known
    life.peer.connect()
    assert life.peer.text(stream) == "told"


def test_a_stream_can_be_ended_before_there_is_an_engine_again(life: Life) -> None:
    stream = life.peer.ask()
    life.submit()
    id = life.peer.id(stream)
    life.die(is_ready=False)
    life.peer.connect()
    life.peer.client.cancel(Cancel(stream=0, id=id))
    life.peer.pump()
    end = life.peer.last(stream)
    assert isinstance(end, End)
    assert end.finish_reason == "abort"
    life.worker.ready()
    assert life.worker.heard() == []
    life.die()
    assert life.worker.heard() == []


def test_a_stream_of_another_model_ends_with_a_typed_error(life: Life) -> None:
    stream = life.peer.ask()
    life.submit()
    life.die(is_ready=False)
    life.worker.ready(msgspec.structs.replace(MODEL, name="new"))
    life.peer.connect()
    error = life.peer.last(stream)
    assert isinstance(error, Error)
    assert (error.code, error.message) == (
        "engine_unavailable",
        "cannot go on with a stream of model 'm': 'new' is served now",
    )
    assert life.worker.heard() == []


def test_a_session_that_ended_is_none_for_the_next_worker(life: Life) -> None:
    life.peer.ask()
    submit = life.submit()
    assert life.peer.session is not None
    life.peer.session.end()
    assert life.worker.heard() == [Abort([submit.stream])]
    assert shared_log.count(life.fd) == 0
    life.die()
    assert (len(life.worker.sessions), life.worker.heard()) == (0, [])
    life.peer.connect()
    assert life.peer.refusal is not None
    assert life.peer.refusal.code == "gone"


def test_who_does_not_come_back_to_the_next_worker_has_gone(life: Life) -> None:
    life.peer.ask()
    submit = life.submit()
    assert shared_log.count(life.fd) == 1
    life.die()
    assert life.submit().prompt_token_ids == submit.prompt_token_ids
    life.worker.wait(10.1)
    assert len(life.worker.sessions) == 0
    assert shared_log.count(life.fd) == 0


def test_it_is_written_anew_when_it_is_full_and_stays_small(life: Life) -> None:
    stream = life.peer.ask(max_tokens=8000)
    submit = life.submit()
    text = ""
    for number in range(400):
        text += f"{number:20}"
        life.worker.step(f"{number:20}", submit.stream)
        life.peer.pump(0.2 if number % 30 == 29 else 0.0)
    assert life.worker.log is not None
    life.worker.journal.begin_anew()
    assert life.worker.log.used_bytes < 40_000
    life.die()
    life.peer.connect()
    assert life.peer.text(stream) == text
    assert TOKENIZER.detokenizer().feed(life.submit().emitted_token_ids) == text


def test_without_room_it_is_off_and_says_so_once(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(SharedLog(os.dup(fd)), 0)
    everything = [b"x" * 70_000]
    with caplog.at_level(logging.INFO):
        journal.begin(lambda: everything)
        journal.begin(lambda: everything)
        assert not journal.is_on
        everything[:] = [encode(SessionRecord(1, "name", "client", 0, 4096))]
        journal.begin_anew()
    assert journal.is_on
    assert [message.split(":")[0] for message in caplog.messages] == [
        "cannot keep a journal",
        "the journal of the sessions is kept again",
    ]
    journal.close()
    journal.close()
    again = Journal(SharedLog(os.dup(fd)))
    assert [record.name for record in again.read()] == ["name"]
    again.close()


def test_what_cannot_be_read_costs_the_sessions_and_not_the_service(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    log = SharedLog(os.dup(fd))
    assert log.replace([b"\x03\x05\x00\x00\x00junk!"])
    log.close()
    journal = Journal(SharedLog(os.dup(fd)))
    assert journal.read() == []
    assert "its sessions are lost" in caplog.text
    journal.close()


def test_without_a_log_nothing_is_kept() -> None:
    journal = Journal()
    assert (journal.read(), journal.is_kept) == ([], False)
    journal.begin(lambda: [b"x"])
    journal.note(SessionRecord(1, "name", "client", 0, 4096))
    journal.commit()
    journal.close()
