"""A connection of the FM door: its HELLO, its ends, and the worker's leave."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from support.fm_worker import FmWorker
from support.worker_parts import FakeFlow

from seedance.daemon.doors.errors import ApiError
from seedance.daemon.fm_door import FmConnection
from seedance.daemon.protocol.fm_client import ClientSession
from seedance.daemon.protocol.fm_messages import Accept, Infer
from seedance.daemon.protocol.fm_session import Welcomed
from seedance.engine.channel import Abort, Submit

BINARY, CLOSE, TEXT = 0x82, 0x88, 0x81


class Link:
    """A client on a WebSocket of the door."""

    def __init__(self, worker: FmWorker) -> None:
        self.worker = worker
        flow = worker.driver.open(20 + len(worker.driver.flows), worker.service.engine)
        assert isinstance(flow, FakeFlow)
        self.flow = flow
        self.connection = flow.endpoint = FmConnection(worker, flow)
        self.client = ClientSession("client")

    def send(self, opcode: int, payload: bytes) -> None:
        length = bytes((0x80 | len(payload),)) if len(payload) < 126 else b"\xfe" + struct.pack("!H", len(payload))
        self.connection.data_received(bytes((opcode,)) + length + bytes(4) + payload)
        self.worker.wait()

    def frames(self) -> list[tuple[int, bytes]]:
        """Return what was sent since the last call, by opcode."""
        data, self.flow.sent = bytes(self.flow.sent), bytearray()
        found = []
        while data:
            length, at = data[1], 2
            if length == 126:
                length, at = struct.unpack_from("!H", data, 2)[0], 4
            found.append((data[0], data[at : at + length]))
            data = data[at + length :]
        return found

    def talk(self) -> list[object]:
        """Carry messages both ways; returns the client's events."""
        for message in self.client.data_to_send(self.worker.loop.time()):
            self.send(BINARY, message)
        for opcode, payload in self.frames():
            if opcode == BINARY:
                self.client.receive_data(payload, self.worker.loop.time())
        return list(self.client.events_received())

    def connect(self) -> None:
        self.client.connect(self.worker.loop.time())
        assert [type(event) for event in self.talk()] == [Welcomed]

    def ask(self) -> None:
        self.client.infer(Infer(stream=self.client.next_stream, model="m", prompt="Hi"))
        assert [type(event) for event in self.talk()] == [Accept]


@pytest.fixture
def worker() -> Iterator[FmWorker]:
    worker = FmWorker()
    yield worker
    worker.close()


@pytest.fixture
def link(worker: FmWorker) -> Link:
    link = Link(worker)
    link.connect()
    link.ask()
    (submit,) = worker.heard()
    assert isinstance(submit, Submit)
    return link


def test_a_close_of_1000_ends_the_session(worker: FmWorker, link: Link) -> None:
    link.send(CLOSE, struct.pack("!H", 1000))
    assert len(worker.sessions) == 0
    assert [type(told) for told in worker.heard()] == [Abort]
    assert link.flow.ended == "closed"
    assert worker.forgotten == [link.connection]


@pytest.mark.parametrize("how", ["close", "eof", "lost", "broken"])
def test_any_other_end_leaves_the_session(worker: FmWorker, link: Link, how: str) -> None:
    if how == "close":
        link.send(CLOSE, struct.pack("!H", 1001))
    elif how == "eof":
        link.connection.eof_received()
    elif how == "lost":
        link.flow.abort()
    else:
        link.send(BINARY, b"FM\x02 another version")
        opcode, payload = link.frames()[-1]
        assert (opcode, payload[:2]) == (CLOSE, struct.pack("!H", 1002))
    assert link.flow.ended or how == "broken"
    assert (len(worker.sessions), worker.heard()) == (1, [])
    worker.wait(10.1)
    assert len(worker.sessions) == 0
    assert [type(told) for told in worker.heard()] == [Abort]


def test_what_does_not_begin_with_a_hello_is_refused(worker: FmWorker) -> None:
    link = Link(worker)
    link.send(BINARY, b"FM\x02")
    (opcode, payload), (close, reason) = link.frames()
    assert (opcode, close, reason[:2]) == (BINARY, CLOSE, struct.pack("!H", 1002))
    assert b"protocol_error" in payload
    assert len(worker.sessions) == 0


def test_text_is_refused(worker: FmWorker, link: Link) -> None:
    link.frames()
    link.send(TEXT, b"{}")
    ((opcode, payload),) = link.frames()
    assert (opcode, payload[:2]) == (CLOSE, struct.pack("!H", 1003))
    assert len(worker.sessions) == 1


def test_who_lets_far_too_much_wait_is_cut_off(worker: FmWorker, link: Link) -> None:
    ends = []
    for waiting_bytes in (2 * worker.max_backlog_bytes, 2 * worker.max_backlog_bytes + 1):
        link.connection.fell_behind(waiting_bytes)
        ends.append(link.flow.ended)
    assert ends == ["", "aborted"]
    assert (len(worker.sessions), worker.heard()) == (1, [])


def test_a_worker_that_leaves_closes_when_the_client_has_everything(worker: FmWorker, link: Link) -> None:
    worker.leaving = True
    assert link.connection.is_busy
    worker.step("word", 1)
    worker.wait()
    link.talk()
    assert link.connection.is_busy
    worker.service.engine.end_all(ApiError("overloaded", "cannot go on: the service is being stopped"))
    worker.wait()
    link.talk()
    assert [opcode for opcode, _ in link.frames()] == []
    worker.wait(0.2)
    link.client.timer_fired(worker.loop.time())
    for message in link.client.data_to_send(worker.loop.time()):
        link.send(BINARY, message)
    opcode, payload = link.frames()[-1]
    assert (opcode, payload[:2]) == (CLOSE, struct.pack("!H", 1001))
