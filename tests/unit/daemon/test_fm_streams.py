"""An FM session and its streams: what the engine is told, what the client gets, and when each may wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fm_worker import TOKENIZER, FmPeer, FmWorker

from seedance.daemon.protocol.fm_frame import HEADER_BYTES, Kind
from seedance.daemon.protocol.fm_logprobs import Candidate
from seedance.daemon.protocol.fm_messages import Accept, Cancel, End, Error, Infer, Modality, Part
from seedance.daemon.protocol.frame import CloseCode
from seedance.engine.channel import Abort, Delta, SetPaused, Submit
from seedance.engine.request import FinishReason, TokenLogprobs


@pytest.fixture
def worker() -> Iterator[FmWorker]:
    worker = FmWorker()
    yield worker
    worker.close()


@pytest.fixture
def peer(worker: FmWorker) -> FmPeer:
    peer = FmPeer(worker)
    peer.connect()
    return peer


def test_a_stream_from_its_beginning_to_its_end(worker: FmWorker, peer: FmPeer) -> None:
    stream = peer.ask(max_tokens=7)
    (submit,) = worker.heard()
    assert isinstance(submit, Submit)
    assert submit.sampling.max_tokens == 7
    assert [type(said) for said in peer.said] == [Accept]
    worker.step("one", submit.stream)
    peer.pump(0.5)
    worker.step(" two", submit.stream, reason=FinishReason.LENGTH)
    peer.pump()
    assert peer.text(stream) == "one two"
    end = peer.last(stream)
    assert isinstance(end, End)
    assert end.finish_reason == "length"
    assert end.usage["total_tokens"] == end.usage["prompt_tokens"] + end.usage["completion_tokens"]
    assert end.slo == {"first_token_ms": 0.0, "total_ms": pytest.approx(500.0)}
    assert peer.session is not None
    peer.pump(0.2)
    assert not peer.session.is_busy


def test_what_a_step_brings_for_a_session_is_one_message(worker: FmWorker, peer: FmPeer) -> None:
    streams = [peer.ask() for _ in range(5)]
    numbers = [submit.stream for submit in worker.heard() if isinstance(submit, Submit)]
    peer.sizes.clear()
    worker.step("word", *numbers)
    peer.pump()
    assert [peer.text(stream) for stream in streams] == ["word"] * 5
    assert len(peer.sizes) == 1


def test_who_is_behind_pauses_all_its_streams_until_it_has_caught_up(worker: FmWorker, peer: FmPeer) -> None:
    streams = [peer.ask() for _ in range(2)]
    numbers = [submit.stream for submit in worker.heard() if isinstance(submit, Submit)]
    peer.reads = False
    text = ""
    while not (told := worker.heard()):
        text += "some text "
        worker.step("some text ", *numbers)
        worker.wait()
    assert told == [SetPaused(numbers, True)]
    peer.reads = True
    peer.pump()
    for _ in range(5):
        peer.pump(0.2)
    assert worker.heard() == [SetPaused(numbers, False)]
    assert [peer.text(stream) for stream in streams] == [text, text]


def test_who_is_far_behind_loses_its_connection_and_no_text(worker: FmWorker, peer: FmPeer) -> None:
    stream = peer.ask()
    (submit,) = worker.heard()
    assert isinstance(submit, Submit)
    peer.reads = False
    text = ""
    while peer.connection.end_code is None:
        text += "some text " * 20
        worker.step("some text " * 20, submit.stream)
        worker.wait()
    assert peer.connection.end_code == CloseCode.ABNORMAL
    assert len(text) < worker.max_backlog_bytes
    peer.reads = True
    peer.connect()
    for _ in range(5):
        peer.pump(0.2)
    assert peer.text(stream) == text
    assert worker.heard() == [SetPaused([submit.stream], True), SetPaused([submit.stream], False)]


def test_an_engine_that_does_not_pause_ends_the_stream_at_the_bound(worker: FmWorker, peer: FmPeer) -> None:
    stream = peer.ask()
    (submit,) = worker.heard()
    assert isinstance(submit, Submit)
    peer.drop()
    text = ""
    while not any(isinstance(told, Abort) for told in worker.heard()):
        worker.step("some text " * 20, submit.stream)
        text += "some text " * 20
    assert peer.session is not None
    assert peer.session.held_bytes < 2 * worker.max_backlog_bytes
    peer.connect()
    for _ in range(5):
        peer.pump(0.2)
    assert text.startswith(peer.text(stream))
    last = peer.last(stream)
    assert isinstance(last, Error)
    assert last.code == "overloaded"


def test_streams_go_on_while_the_client_is_away(worker: FmWorker, peer: FmPeer) -> None:
    stream = peer.ask()
    (submit,) = worker.heard()
    assert isinstance(submit, Submit)
    peer.drop()
    worker.step("one", submit.stream)
    worker.wait(9.0)
    worker.step(" two", submit.stream, reason=FinishReason.STOP)
    peer.connect()
    assert peer.text(stream) == "one two"
    assert worker.heard() == []


def test_a_cancelled_stream_ends_with_what_there_was(worker: FmWorker, peer: FmPeer) -> None:
    stream = peer.ask()
    (submit,) = worker.heard()
    assert isinstance(submit, Submit)
    worker.step("one", submit.stream)
    peer.client.cancel(Cancel(stream=stream))
    peer.pump()
    assert worker.heard() == [Abort([submit.stream])]
    end = peer.last(stream)
    assert isinstance(end, End)
    assert (end.finish_reason, peer.text(stream)) == ("abort", "one")


def in_parts(peer: FmPeer, **fields: object) -> int:
    number = peer.client.next_stream
    peer.client.infer(Infer(stream=number, model="", more=True, sampling=dict(fields)))
    peer.pump()
    return number


def part(peer: FmPeer, stream: int, data: bytes, *, more: bool, modality: Modality = Modality.TEXT) -> None:
    peer.client.part(Part(stream=stream, modality=modality, data=data, more=more))
    peer.pump()


def places(worker: FmWorker) -> int:
    return worker.service._limiter.statistics().streams


def test_a_prompt_in_parts_is_accepted_at_once_and_served_when_it_is_whole(worker: FmWorker, peer: FmPeer) -> None:
    stream = in_parts(peer, max_tokens=7)
    assert (peer.id(stream), worker.heard(), places(worker)) == (peer.id(stream), [], 1)
    part(peer, stream, "Grüß".encode()[:3], more=True)
    assert worker.heard() == []
    part(peer, stream, "Grüß".encode()[3:], more=False)
    (submit,) = worker.heard()
    assert isinstance(submit, Submit)
    assert list(submit.prompt_token_ids) == TOKENIZER.encode("Grüß")
    assert submit.sampling.max_tokens == 7
    worker.step("one", submit.stream, reason=FinishReason.LENGTH)
    peer.pump()
    assert peer.text(stream) == "one"
    assert isinstance(peer.last(stream), End)
    assert places(worker) == 0


@pytest.mark.parametrize(
    ("data", "modality"),
    [(b"\xff", Modality.TEXT), (b"\0", Modality.TOKENS), (b"\0", Modality.AUDIO), (b"", Modality.TEXT)],
)
def test_parts_that_make_no_prompt_end_their_stream(
    worker: FmWorker, peer: FmPeer, data: bytes, modality: Modality
) -> None:
    stream = in_parts(peer)
    part(peer, stream, data, more=False, modality=modality)
    last = peer.last(stream)
    assert isinstance(last, Error)
    assert last.code == "invalid_request"
    assert last.message.startswith("cannot ")
    assert (worker.heard(), places(worker)) == ([], 0)


def test_a_prompt_that_is_not_whole_can_be_cancelled_and_left(worker: FmWorker, peer: FmPeer) -> None:
    first, second = in_parts(peer), in_parts(peer)
    part(peer, second, b"Hi", more=True)
    peer.client.cancel(Cancel(stream=first))
    peer.pump()
    last = peer.last(first)
    assert isinstance(last, End)
    assert (last.finish_reason, places(worker)) == ("abort", 1)
    assert peer.session is not None
    peer.pump(0.2)
    held_bytes = peer.session.held_bytes
    part(peer, second, b"x" * 1000, more=True)
    peer.pump(0.2)
    assert peer.session.held_bytes == held_bytes + 1000
    peer.drop()
    worker.wait(11.0)
    assert (len(worker.sessions), places(worker), worker.heard()) == (0, 0, [])


def test_log_probabilities_come_with_their_text(worker: FmWorker, peer: FmPeer) -> None:
    plain, scored = peer.ask(), peer.ask(logprobs=1)
    numbers = [submit.stream for submit in worker.heard() if isinstance(submit, Submit)]
    ids = TOKENIZER.encode("ab")
    logprobs = [TokenLogprobs([token_id, 300], [-0.5, -2.0], 1) for token_id in ids]
    worker.step("ab", numbers[0])
    worker.bring(Delta(numbers[1], ids[:1], logprobs=logprobs[:1]))
    peer.pump()
    worker.bring(Delta(numbers[1], ids[1:], FinishReason.LENGTH, logprobs=logprobs[1:]))
    peer.pump()
    assert (peer.text(plain), peer.text(scored), peer.positions(plain)) == ("ab", "ab", [])
    other = TOKENIZER.vocabulary.token_bytes(300)
    assert peer.positions(scored) == [
        [Candidate(ids[0], -0.5, b"a"), Candidate(300, -2.0, other)],
        [Candidate(ids[1], -0.5, b"b"), Candidate(300, -2.0, other)],
    ]
    end = peer.last(scored)
    assert isinstance(end, End)
    assert end.slo["first_token_ms"] == 0.0


def test_log_probabilities_wait_for_who_is_behind_as_text_does(worker: FmWorker, peer: FmPeer) -> None:
    stream = peer.ask(logprobs=5)
    (submit,) = worker.heard()
    assert isinstance(submit, Submit)
    peer.reads = False
    (token_id,) = TOKENIZER.encode("a")
    logprobs, count = TokenLogprobs([token_id] * 6, [-1.0] * 6, 1), 0
    while not (told := worker.heard()):
        worker.bring(Delta(submit.stream, [token_id], logprobs=[logprobs]))
        worker.wait()
        count += 1
    assert told == [SetPaused([submit.stream], True)]
    peer.reads = True
    for _ in range(5):
        peer.pump(0.2)
    assert (peer.text(stream), len(peer.positions(stream))) == ("a" * count, count)


def test_a_part_for_a_prompt_that_is_whole_ends_its_stream(worker: FmWorker, peer: FmPeer) -> None:
    stream = peer.ask()
    peer.client.part(Part(stream=stream, modality=Modality.TEXT, data=b"more"))
    peer.pump()
    assert [type(told) for told in worker.heard()] == [Submit, Abort]
    last = peer.last(stream)
    assert isinstance(last, Error)
    assert last.code == "invalid_request"


def test_a_refused_request_has_no_accept(worker: FmWorker, peer: FmPeer) -> None:
    stream = peer.client.next_stream
    peer.client.infer(Infer(stream=stream, model="another", prompt="Hi"))
    peer.pump()
    assert [type(said) for said in peer.said] == [Error]
    assert worker.heard() == []
    assert peer.session is not None
    assert not peer.session.protocol.streams


def test_a_client_that_says_nothing_any_more_is_given_up(worker: FmWorker, peer: FmPeer) -> None:
    peer.reads = False
    worker.wait(40.0)
    assert peer.connection.end_code is None
    worker.wait(20.0)
    assert peer.connection.end_code == CloseCode.ABNORMAL
    assert len(worker.sessions) == 1
    worker.wait(10.0)
    assert len(worker.sessions) == 0


def test_a_newer_connection_ends_the_older_one(peer: FmPeer) -> None:
    older = peer.connection
    peer.connect()
    assert older.end_code == CloseCode.ABNORMAL
    assert peer.connection.end_code is None
    assert peer.session is not None
    peer.session.disconnected(older)  # told late
    stream = peer.ask()
    assert peer.id(stream)


def test_no_pings_while_tokens_and_acks_come_and_go() -> None:
    worker = FmWorker(bound_bytes=1 << 20, fewest_in_columns=1)
    peer = FmPeer(worker)
    peer.connect()
    peer.ask()
    pings = []
    for second in range(100):
        if second < 60:
            worker.step("1 ", 1)
        worker.wait(1.0)
        kinds = [message[HEADER_BYTES] for message in peer.connection.messages]
        pings += [second] * kinds.count(Kind.PING)
        peer.pump()
    assert worker.driver.frames > 50
    assert min(pings) >= 60, "then nothing else shows that we are there"
    assert len(pings) >= 2
    worker.close()
