"""Whatever happens to a client's connections, it gets the text of the engine, once and in order."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fm_worker import FmPeer, FmWorker

from seedance.daemon.protocol.fm_messages import Cancel, End, Infer
from seedance.daemon.protocol.fm_states import State
from seedance.daemon.stream_columns import FEWEST
from seedance.engine.channel import Abort, SetPaused, Submit
from seedance.engine.request import FinishReason

BOUND_BYTES = 32 << 10
MOST_STREAMS = 6
ACTS = ("ask", "ask", *["step"] * 8, "finish", "cancel", "drop", "lose", "connect", "stall", "stall", "read", "wait")
ACTS_OF_ONE = (
    "ask",
    *["step"] * 20,
    "finish",
    "finish",
    "cancel",
    "drop",
    "lose",
    "connect",
    "stall",
    "read",
    "wait",
    "wait",
)
ACTS_OF_SEVERAL = (*["ask"] * 5, *ACTS_OF_ONE)


class Engine:
    """The engine as the host tells it: who runs, who is paused, and the text that each stream was given."""

    def __init__(self, worker: FmWorker) -> None:
        self.texts: dict[int, str] = defaultdict(str)
        self.paused: set[int] = set()
        self.running: list[int] = []
        self._worker = worker
        self._count = 0

    def listen(self) -> None:
        for told in self._worker.heard():
            if isinstance(told, Submit):
                self.running.append(told.stream)
            elif isinstance(told, Abort):
                self.running = [number for number in self.running if number not in told.streams]
            elif isinstance(told, SetPaused):
                change = self.paused.update if told.is_paused else self.paused.difference_update
                change(told.streams)

    def step(self, size: int, reason: FinishReason | None = None) -> None:
        """Give each stream that may run some text, all at once; with a reason the last of the first one."""
        self.listen()
        self._count += 1
        text = f"{self._count} " * size
        numbers = [number for number in self.running if number not in self.paused]
        if reason is not None:
            numbers = numbers[:1]
            self.running = [number for number in self.running if number not in numbers]
        for number in numbers:
            self.texts[number] += text
        if numbers:
            self._worker.step(text, *numbers, reason=reason)


class Life:
    """One client and what happens to it; requests reach the engine in the order in which they were made."""

    def __init__(self, bound_bytes: int, fewest_in_columns: int = FEWEST) -> None:
        self.worker = FmWorker(resume_for_s=1e6, bound_bytes=bound_bytes, fewest_in_columns=fewest_in_columns)
        self.engine = Engine(self.worker)
        self.peer = FmPeer(self.worker)
        self.peer.connect()
        self.streams: list[int] = []

    def act(self, what: str, size: int) -> None:
        peer, client = self.peer, self.peer.client
        if what == "ask" and len(self.streams) < MOST_STREAMS:
            self.streams.append(client.next_stream)
            client.infer(Infer(stream=client.next_stream, model="m", prompt="Hi"))
        elif what in ("step", "finish"):
            self.engine.step(size, FinishReason.STOP if what == "finish" else None)
        elif what == "cancel" and self.streams:
            client.cancel(Cancel(stream=self.streams[size % len(self.streams)]))
        elif what == "lose":
            client.data_to_send(self.worker.loop.time())  # it was under way
            peer.drop()
        elif what == "drop":
            peer.drop()
        elif what == "connect":
            peer.reads = True
            peer.connect()
        elif what in ("stall", "read"):
            peer.reads = what == "read"
        if client.state is State.CONNECTED:
            peer.pump(size / 100 if what == "wait" else 0.0)
        else:
            self.worker.wait(size / 100)

    def settle(self) -> None:
        """Have the client come back and take everything."""
        self.peer.reads = True
        self.peer.connect()
        for _ in range(20):
            self.peer.pump(0.2)
        self.engine.listen()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(1, 600)), min_size=30, max_size=60))
def test_all_text_comes_once_and_in_order(acts: list[tuple[str, int]]) -> None:
    lives(acts, Life(BOUND_BYTES), BOUND_BYTES)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(ACTS_OF_ONE), st.integers(1, 40)), min_size=30, max_size=100))
def test_all_text_comes_once_and_in_order_in_columns(acts: list[tuple[str, int]]) -> None:
    lives(acts, Life(4 * BOUND_BYTES, 1), 4 * BOUND_BYTES)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(ACTS_OF_SEVERAL), st.integers(1, 40)), min_size=30, max_size=100))
def test_all_text_of_several_streams_comes_once_and_in_order_in_columns(acts: list[tuple[str, int]]) -> None:
    lives(acts, Life(4 * BOUND_BYTES, 1), 4 * BOUND_BYTES)


@pytest.mark.parametrize("streams", [1, 5])
def test_plain_tokens_go_in_columns_and_a_step_of_a_session_is_one_message(streams: int) -> None:
    life = Life(4 * BOUND_BYTES, 1)
    for _ in range(streams):
        life.act("ask", 1)
    for _ in range(100):
        life.act("step", 1)
    driver = life.worker.driver
    assert driver.frames > 90 * streams
    assert driver.frames == streams * driver.messages
    life.settle()
    for number in range(1, streams + 1):
        assert life.peer.text(number) == life.engine.texts[number]
    life.worker.close()


def lives(acts: list[tuple[str, int]], life: Life, bound_bytes: int) -> None:
    for what, size in acts:
        life.act(what, size)
        session = life.peer.session
        assert session is not None
        if what != "step":  # to ask has it take its row back
            assert session.protocol.held_bytes < bound_bytes
    life.settle()
    assert not life.engine.paused & set(life.engine.running), "nobody is behind any more"
    for _ in life.streams:
        life.engine.step(1, FinishReason.LENGTH)
    life.settle()
    for number, stream in enumerate(life.streams, 1):  # as they are numbered on the channel
        assert isinstance(life.peer.last(stream), End)
        assert life.peer.text(stream) == life.engine.texts[number]
    assert len(life.worker.service.engine) == 0
    life.worker.close()
