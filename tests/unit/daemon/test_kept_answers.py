"""Kept streams whose worker dies: the next one goes on with the same answer, its ids, its usage and its key."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

import msgspec
import pytest
from support.fm_worker import MODEL, TOKENIZER
from support.kept_client import KeptClient
from support.kept_parts import KeptWorker

from seedance.daemon import shared_log
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.kept_request import RequestKey
from seedance.daemon.kept_streams import EVENTS, MESSAGES
from seedance.engine.channel import Abort, Batch, Delta, Submit, encode, pack_singles
from seedance.engine.request import FinishReason, TokenLogprobs

KEY = RequestKey.of("k", b"request")


class Life:
    """A worker and its clients, through the worker's deaths."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.worker = KeptWorker(log_fd=fd)
        self.clients: list[KeptClient] = []

    def client(self, key: RequestKey | None = None) -> KeptClient:
        client = KeptClient(self.worker, key)
        self.clients.append(client)
        return client

    def die(self, *, is_ready: bool = True) -> None:
        self.worker.die()
        self.worker = KeptWorker(log_fd=self.fd, is_ready=is_ready)
        for client in self.clients:
            client.die(self.worker)

    def submits(self) -> list[Submit]:
        heard = self.worker.heard()
        assert all(isinstance(each, Submit) for each in heard)
        return [each for each in heard if isinstance(each, Submit)]

    def step(self, text: str, *numbers: int, reason: FinishReason | None = None) -> None:
        """Have the engine bring something, and the clients get it."""
        self.worker.step(text, *numbers, reason=reason)
        self.pump()

    def pump(self) -> None:
        self.worker.wait()
        for client in self.clients:
            client.take_in()


@pytest.fixture
def life() -> Iterator[Life]:
    fd = shared_log.create("test")
    life = Life(fd)
    yield life
    life.worker.close()
    os.close(fd)


Ask = Callable[[KeptClient], None]
ASKS: dict[str, Ask] = {
    "completion": lambda client: client.complete(stream_options={"include_usage": True}, max_tokens=50, seed=3),
    "chat": lambda client: client.chat(stream_options={"include_usage": True}, max_tokens=50, seed=3),
    "infer": lambda client: client.infer(max_tokens=50, seed=3),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_stream_goes_on_in_the_next_worker_with_its_name_and_its_usage(life: Life, ask: Ask) -> None:
    client = life.client()
    ask(client)
    (first,) = life.submits()
    life.step("some", first.stream)
    life.worker.step(" words", first.stream)
    life.worker.wait()
    under_way = client.sent  # and the client never gets it
    assert under_way
    life.die()
    (second,) = life.submits()
    assert (second.prompt_token_ids, second.sampling) == (first.prompt_token_ids, first.sampling)
    assert list(second.emitted_token_ids) == [*TOKENIZER.encode("some"), *TOKENIZER.encode(" words")]
    life.worker.step(" and", second.stream)
    client.come_back()
    life.worker.wait()
    assert client.sent[: len(under_way)] == under_way
    life.step(" more", second.stream, reason=FinishReason.LENGTH)
    assert client.text() == "some words and more"
    assert client.reasons() == ["length"]
    emitted = [token_id for text in ("some", " words", " and", " more") for token_id in TOKENIZER.encode(text)]
    usage = client.usage()
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(first.prompt_token_ids), len(emitted))
    assert len({(said.get("id"), said.get("created")) for said in client.said()}) == 1
    assert life.worker.service._limiter.statistics().streams == 0
    assert (client.stream, life.worker.journal.streams) == (None, 0)


def test_nothing_leaves_before_the_journal_has_it(life: Life) -> None:
    client = life.client()
    client.complete()
    assert client.token == ""  # it would be good for nothing yet
    (submit,) = life.submits()
    life.worker.wait()
    assert client.token
    life.worker.step("never told", submit.stream)
    assert client.sent == []
    life.die()  # before the turn has ended
    (submit,) = life.submits()
    assert list(submit.emitted_token_ids) == []
    client.come_back()
    life.step("told", submit.stream)
    assert client.text() == "told"


def test_a_stream_that_ended_while_its_client_was_away_is_there_in_the_next_worker(life: Life) -> None:
    client, other = life.client(), life.client()
    client.infer()
    other.complete(stop=["END"])
    first, second = life.submits()
    life.step("text", first.stream, second.stream)
    client.lose()
    other.lose()
    life.step(" to the end", first.stream, reason=FinishReason.STOP)
    life.step(" to the END and on", second.stream)
    assert life.worker.heard() == [Abort([second.stream])]
    for _ in range(2):
        life.die()
        assert life.submits() == []
    for each in (client, other):
        each.come_back()
        life.pump()
        assert (each.text(), each.reasons(), each.stream) == ("text to the end"[: len(each.text())], ["stop"], None)
    assert (client.text(), other.text()) == ("text to the end", "text to the ")


def test_a_stop_string_that_was_begun_before_the_death_is_found_after_it(life: Life) -> None:
    client = life.client()
    client.complete(stop=["END"])
    (submit,) = life.submits()
    life.step("text EN", submit.stream)
    assert client.text() == "text "
    life.die()
    (submit,) = life.submits()
    client.come_back()
    life.step("D and on", submit.stream)
    assert (client.text(), client.reasons()) == ("text ", ["stop"])


def test_of_several_choices_only_those_that_run_go_on(life: Life) -> None:
    client = life.client()
    client.complete(prompt=["Hi", "Ho"], n=2, seed=1, stream_options={"include_usage": True})
    submits = life.submits()
    numbers = [submit.stream for submit in submits]
    life.step("x", *numbers)
    life.step("yz", numbers[1], reason=FinishReason.LENGTH)
    life.die(is_ready=False)
    life.die()
    again = life.submits()
    assert [submit.sampling.seed for submit in again] == [submits[index].sampling.seed for index in (0, 2, 3)]
    client.come_back()
    life.step("!", *(submit.stream for submit in again), reason=FinishReason.STOP)
    assert [client.text(choice) for choice in range(4)] == ["x!", "xyz", "x!", "x!"]
    assert sorted(client.reasons()) == ["length", "stop", "stop", "stop"]
    emitted = sum(len(TOKENIZER.encode(text)) for text in ("x!", "xyz", "x!", "x!"))
    usage = client.usage()
    prompts = sum(len(submit.prompt_token_ids) for submit in (submits[0], submits[2]))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompts, emitted)
    assert life.worker.service._limiter.statistics().streams == 0


def test_the_offsets_of_log_probabilities_go_on(life: Life) -> None:
    client = life.client()
    client.complete(logprobs=0)
    texts = ("some", " more")
    for text in texts:
        (submit,) = life.submits()
        token_ids = TOKENIZER.encode(text)
        positions = [TokenLogprobs([token_id], [-1.0], 1) for token_id in token_ids]
        batch = Batch([Delta(submit.stream, token_ids, logprobs=positions)], pack_singles([]))
        life.worker.service.engine.data_received(encode(batch))
        life.pump()
        life.die()
        client.come_back()
    offsets = [offset for said in client.said() for offset in said["choices"][0]["logprobs"]["text_offset"]]
    lengths = [len(TOKENIZER.vocabulary.token_text(each)) for text in texts for each in TOKENIZER.encode(text)]
    assert offsets == [sum(lengths[:place]) for place in range(len(lengths))]


def test_a_stream_can_be_ended_before_there_is_an_engine_again(life: Life) -> None:
    clients = [life.client(), life.client()]
    clients[0].infer()
    clients[1].complete()
    life.step("text", *(submit.stream for submit in life.submits()))
    life.die(is_ready=False)
    for client in clients:
        client.come_back()
        assert client.stream is not None
        assert life.worker.sessions.cancel(client.stream.id)
        life.pump()
        assert (client.text(), client.reasons()) == ("text", ["abort"])
    life.worker.ready()
    assert life.worker.heard() == []
    assert life.worker.service._limiter.statistics().streams == 0


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_stream_of_another_model_ends_with_a_typed_error(life: Life, ask: Ask) -> None:
    client = life.client()
    ask(client)
    life.submits()
    life.pump()
    life.die(is_ready=False)
    life.worker.ready(msgspec.structs.replace(MODEL, name="new"))
    client.come_back()
    life.pump()
    assert client.said()[-1]["error"]["message"] == "cannot go on with a stream of model 'm': 'new' is served now"
    assert life.worker.heard() == []
    assert life.worker.service._limiter.statistics().streams == 0


def test_a_key_leads_to_what_the_request_began_before_the_death(life: Life) -> None:
    client = life.client(KEY)
    client.complete()
    (submit,) = life.submits()
    life.step("text", submit.stream)
    life.die()
    stream = life.worker.streams.begun(EVENTS, KEY)
    assert stream is not None
    assert stream.kept.token == client.token
    with pytest.raises(ApiError) as caught:
        life.worker.streams.begun(EVENTS, RequestKey.of("k", b"another"))
    assert caught.value.status == 422
    assert life.worker.streams.begun(MESSAGES, KEY) is None


def test_a_request_that_had_not_begun_is_served_by_the_next_worker_if_it_has_a_key(life: Life) -> None:
    """A long prompt is tokenised in a thread; the worker dies meanwhile."""
    model = msgspec.structs.replace(MODEL, max_model_len=20_000)
    life.worker.ready(model)
    keyed, other = life.client(KEY), life.client()
    for client in (keyed, other):
        client.complete(prompt="x" * 9000, max_tokens=5)
    life.worker.sessions.flush()
    life.worker.service.close()
    life.die(is_ready=False)
    life.worker.ready(model)
    assert len(life.worker.streams) == 1
    stream = life.worker.streams.begun(EVENTS, KEY)
    assert stream is not None
    keyed._read(stream)
    life.worker.loop.run_until_complete(life.worker.service.in_thread(int))
    life.pump()
    (submit,) = life.submits()
    life.step("text", submit.stream, reason=FinishReason.LENGTH)
    assert (keyed.token, keyed.text(), keyed.reasons()) == (stream.kept.token, "text", ["length"])
    life.worker.service.close()


def test_who_does_not_come_back_to_the_next_worker_has_gone(life: Life) -> None:
    client = life.client()
    client.complete()
    life.submits()
    life.pump()
    assert shared_log.count(life.fd) == 1
    life.die()
    assert len(life.submits()) == 1
    life.worker.wait(10.1)
    assert (len(life.worker.streams), shared_log.count(life.fd)) == (0, 0)
    with pytest.raises(ApiError) as caught:
        client.come_back()
    assert caught.value.code == "gone"
    life.die()
    assert (len(life.worker.streams), life.submits()) == (0, [])


def test_a_stream_that_waits_for_its_client_is_paused_in_the_next_worker_too(life: Life) -> None:
    client = life.client()
    client.complete(max_tokens=8000)
    (submit,) = life.submits()
    life.pump()
    client.lose()
    while life.worker.heard() == []:
        life.step("x", submit.stream)
    life.die()
    heard = life.worker.heard()
    assert [type(each).__name__ for each in heard] == ["SetPaused", "Submit", "SetPaused"]
    client.come_back()
    life.pump()
    assert set(client.text()) == {"x"}
    assert [type(each).__name__ for each in life.worker.heard()] == ["SetPaused"]


def test_what_cannot_be_asked_again_is_lost_with_a_line(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    client = life.client()
    client.complete()
    life.pump()
    stream = client.stream
    assert stream is not None
    assert stream._request is not None
    stream._request = msgspec.structs.replace(stream._request, body=b"junk")
    life.worker.journal.begin_anew()
    with caplog.at_level(logging.ERROR):
        life.die()
    assert "cannot go on with a stream of the last worker" in caplog.text
    assert len(life.worker.streams) == 0
