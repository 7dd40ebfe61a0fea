"""A worker may die at any moment: with the journal the next one gives every client its text, once and in order.

The clients are those of FM sessions.
"""

from __future__ import annotations

import os

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.fm_worker import TOKENIZER, FmPeer, FmWorker
from support.ruled_engine import RuledEngine, expected_ids, expected_text

from seedance.daemon import shared_log
from seedance.daemon.fm_answer import FmAnswer
from seedance.daemon.protocol.fm_messages import Accept, Error, Infer, Modality, Part
from seedance.daemon.stream_columns import FEWEST

LENGTH = st.integers(1, 40)
PARTS = 3


class Dying(RuleBasedStateMachine):
    """One client with several streams, whose workers and engine hosts die."""

    at_once = 6
    fewest_in_columns = FEWEST
    bound_bytes = 64 << 10

    def __init__(self) -> None:
        super().__init__()
        self.fd = shared_log.create("test")
        self.worker = self.new_worker()
        self.peer = FmPeer(self.worker)
        self.engine = RuledEngine(self.worker)
        self.asked: dict[int, tuple[int, int]] = {}
        self.unsent: dict[int, list[Part]] = {}
        self.scored: set[int] = set()
        self.cancelled: set[int] = set()

    def teardown(self) -> None:
        try:
            self.come_back()
            for number in list(self.unsent):
                for _ in range(PARTS):
                    self.send_part(number)
            for _ in range(60):
                self.engine.step()
                self.peer.pump(0.2)
            for number, (seed, length) in self.asked.items():
                end = self.peer.last(number)
                if isinstance(end, Error):  # it came before there was an engine again, and was not accepted
                    assert (end.code, self.peer.text(number)) == ("engine_unavailable", "")
                    assert not any(isinstance(said, Accept) and said.stream == number for said in self.peer.said)
                    continue
                if number in self.cancelled:
                    assert end.finish_reason == "abort"
                    assert expected_text(seed, length).startswith(self.peer.text(number))
                    continue
                assert self.peer.text(number) == expected_text(seed, length)
                assert end.usage["completion_tokens"] == length
                if number in self.scored:
                    told = [position[0].token_id for position in self.peer.positions(number)]
                    assert told == expected_ids(seed, length)
            assert self.engine.prompts <= {tuple(TOKENIZER.encode("Hi"))}
            assert self.worker.service._limiter.statistics().streams == 0
        finally:
            self.worker.close()
            os.close(self.fd)

    def new_worker(self, is_ready: bool = True) -> FmWorker:
        return FmWorker(
            log_fd=self.fd,
            resume_for_s=1e9,
            is_ready=is_ready,
            fewest_in_columns=self.fewest_in_columns,
            bound_bytes=self.bound_bytes,
        )

    @initialize()
    def begin(self) -> None:
        self.peer.connect()
        self.engine.hear()

    @rule(seed=st.integers(0, 1000), length=LENGTH, in_parts=st.booleans(), scored=st.booleans())
    def ask(self, seed: int, length: int, in_parts: bool, scored: bool) -> None:
        may_ask = len(self.asked) < 6 and len(self.engine.running) + len(self.unsent) < self.at_once
        if may_ask and self.peer.connection.end_code is None and self.connected:
            sampling = {"seed": seed, "max_tokens": length} | ({"logprobs": 1} if scored else {})
            prompt = {"more": True} if in_parts else {"prompt": "Hi"}
            number = self.peer.client.next_stream
            self.peer.client.infer(Infer(stream=number, model="", sampling=sampling, **prompt))
            self.peer.pump()
            self.asked[number] = seed, length
            if scored:
                self.scored.add(number)
            if in_parts:
                pieces = [b"H", b"", b"i"]
                self.unsent[number] = [
                    Part(stream=number, modality=Modality.TEXT, data=piece, more=left > 0)
                    for left, piece in zip(reversed(range(PARTS)), pieces, strict=True)
                ]
            self.engine.hear()

    @precondition(lambda self: self.unsent and self.connected)
    @rule(data=st.data())
    def go_on_with_a_prompt(self, data: st.DataObject) -> None:
        self.send_part(data.draw(st.sampled_from(sorted(self.unsent))))

    def send_part(self, number: int) -> None:
        parts = self.unsent.get(number, [])
        if parts:
            self.peer.client.part(parts.pop(0))
            self.peer.pump()
            self.engine.hear()
        if not parts:
            self.unsent.pop(number, None)

    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        self.engine.step(data)

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.05, 0.3]))
    def pump(self, seconds: float) -> None:
        if self.connected:
            self.peer.pump(seconds)
        else:
            self.worker.wait(seconds)

    @rule()
    def turn(self) -> None:
        """Let the worker send, and the client read nothing of it yet."""
        self.worker.wait()

    @rule(reads=st.booleans())
    def be_slow(self, reads: bool) -> None:
        self.peer.reads = reads

    @precondition(lambda self: self.connected)
    @rule()
    def drop(self) -> None:
        self.peer.drop()
        self.peer.connection.end_code = 1006

    @rule()
    def come_back(self) -> None:
        self.peer.reads = True
        if self.connected:
            self.peer.pump()
        else:
            self.peer.connect()
            assert self.peer.refusal is None
        self.engine.hear()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Have another client of the tenant end a stream; that it has ended is known from the next turn on."""
        number = data.draw(st.sampled_from(sorted(self.asked)))
        answers = [answer for answer in self.worker.sessions._streams.values() if isinstance(answer, FmAnswer)]
        ids = [answer.id for answer in answers if answer.number == number]
        if ids:
            assert self.worker.sessions.cancel(ids[0])
            self.cancelled.add(number)
            self.engine.hear()
            self.turn()

    @rule()
    def write_all_anew(self) -> None:
        self.worker.sessions.flush()
        self.worker.journal.begin_anew()

    @rule()
    def lose_the_host(self) -> None:
        self.engine.lose()

    @rule(arrives=st.booleans(), is_ready=st.booleans())
    def die(self, arrives: bool, is_ready: bool) -> None:
        """Kill the worker; what it has sent arrives or does not."""
        if arrives:
            for message in self.peer.connection.messages:
                self.peer.client.receive_data(message, self.worker.loop.time())
            self.peer.take()
        if self.connected:
            self.peer.client.receive_eof()
        self.peer.connection.end_code = 1006
        self.worker.die()
        self.worker = self.peer.worker = self.new_worker(is_ready)
        self.engine.follow(self.worker)
        if not is_ready:
            self.come_back()
            self.worker.ready()
        self.engine.hear()

    @precondition(lambda self: self.connected and self.engine.running)
    @rule(data=st.data(), steps=st.integers(1, 12), anew=st.booleans())
    def die_while_nobody_is_there(self, data: st.DataObject, steps: int, anew: bool) -> None:
        """Kill a worker that has text, and ends, for a client that is away."""
        self.drop()
        for _ in range(steps):
            self.engine.step(data)
        self.turn()
        if anew:
            self.write_all_anew()
        self.die(arrives=False, is_ready=True)

    @property
    def connected(self) -> bool:
        return self.peer.session is not None and self.peer.connection.end_code is None


Dying.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDying = Dying.TestCase


class DyingInColumns(Dying):
    """The same with one stream at a time, which is taken in columns whenever it can be."""

    at_once = 1
    fewest_in_columns = 1
    bound_bytes = 256 << 10


DyingInColumns.TestCase.settings = Dying.TestCase.settings
TestDyingInColumns = DyingInColumns.TestCase


class DyingWithSeveralInColumns(DyingInColumns):
    """The same with several, which leave in one message when all bring plain tokens."""

    at_once = 6


DyingWithSeveralInColumns.TestCase.settings = Dying.TestCase.settings
TestDyingWithSeveralInColumns = DyingWithSeveralInColumns.TestCase
