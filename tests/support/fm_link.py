"""A client and a server of FM on a simulated link, in virtual time.

The link drops messages, doubles them, lets them overtake each other, and is cut; which end notices, and when, is
chance, too. Both owners do what an owner has to do, and no more: they reconnect, and heed the back pressure.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable
from random import Random

from seedance.daemon.protocol.fm_client import ClientSession
from seedance.daemon.protocol.fm_messages import (
    RING_FRAMES,
    Accept,
    Cancel,
    End,
    Error,
    Infer,
    Modality,
    Note,
    Part,
    Tokens,
)
from seedance.daemon.protocol.fm_opening import HelloReceived, ServerOpening
from seedance.daemon.protocol.fm_sender import Backpressure
from seedance.daemon.protocol.fm_server import ServerSession
from seedance.daemon.protocol.fm_session import Drained, Options, PeerGone, Session, Welcomed
from seedance.daemon.protocol.fm_states import State

STEP_S = 0.02
GIVE_UP_S = 900.0
GIVE_UP_COUNT = 300_000
DELTAS_A_NOTE = 5


@dataclasses.dataclass(frozen=True)
class Faults:
    """What a link does to messages: shares of those dropped and doubled, the delay, and seconds between cuts."""

    drop: float = 0.0
    double: float = 0.0
    delay_s: tuple[float, float] = (0.005, 0.005)
    cut_s: float = 0.0
    overtakes: bool = False
    first_seq: int = 1
    """Where both ends begin to count."""
    until_s: float = 15.0
    """From here on the link is good, or a run might not end."""

    @property
    def lossless(self) -> bool:
        return not (self.drop or self.double or self.overtakes)


@dataclasses.dataclass
class Script:
    """One stream: what the client sends for it, and the deltas that the server answers with."""

    parts: list[bytes]
    deltas: list[bytes]


class Connection:
    """A connection of the link; each end knows by itself whether it is there."""

    def __init__(self) -> None:
        self.client_up = self.server_up = True
        self.last_arrival_s = [0.0, 0.0]
        self.opening = ServerOpening()
        self.is_open = False  # the server has taken its HELLO


class Simulation:
    """Run scripts over a link until every stream is over at the client, and every part is at the server."""

    def __init__(self, scripts: list[Script], faults: Faults, options: Options, random: Random) -> None:
        self.now = 0.0
        self.scripts: dict[int, Script] = {}  # by stream, as they are asked
        self.faults = faults
        self.options = options
        self.random = random
        self.client = ClientSession("client", options=options)
        self.server: ServerSession | None = None
        self.connection: Connection | None = None  # the client's
        self.server_connection: Connection | None = None
        self.connections = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        # What came out, to be compared with the scripts.
        self.text: dict[int, list[bytes]] = {}
        self.accepted: list[int] = []
        self.ended: list[int] = []
        self.parts: dict[int, list[bytes]] = {}
        self.cancelled: list[int] = []
        # What is still to be done.
        self._total = len(scripts)
        self._longest_bytes = max((len(each) for script in scripts for each in script.deltas + script.parts), default=0)
        self._to_ask: list[Script] = []
        self._to_send: dict[int, list[bytes]] = {}
        self._running: dict[int, list[bytes]] = {}
        self._paused: set[int] = set()
        self.pauses = self.parks = self.refusals = self.overloads = 0
        for script in scripts:
            self.at(random.choice((0.0, random.uniform(0, 3))), functools.partial(self._to_ask.append, script))

    # The clock.

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._count), act))

    def run(self) -> None:
        self.at(0.0, self.client_connects)
        self.at(STEP_S, self.step)
        if self.faults.cut_s:
            self.at(self.random.uniform(0, self.faults.cut_s), self.cut)
        while not self.is_done():
            assert self.now < GIVE_UP_S, "the streams do not end"
            assert next(self._count) < GIVE_UP_COUNT, "time does not go on"
            timers = [end.next_timer() for end in (self.client, self.server) if end is not None]
            timer = min(timers)
            if self._queue and self._queue[0][0] <= timer:
                self.now, _, act = heapq.heappop(self._queue)
                act()
            else:
                self.now = max(self.now, timer)
                for end, due in zip((self.client, self.server), timers, strict=False):
                    if end is not None and due <= self.now:
                        end.timer_fired(self.now)
            self.settle()

    def is_done(self) -> bool:
        return len(self.ended) == self._total and self.all_parts()

    def all_parts(self) -> bool:
        return sum(map(len, self.parts.values())) == sum(len(script.parts) for script in self.scripts.values())

    def settle(self) -> None:
        """Take the events of both ends, send what they have to say, and look at their bounds."""
        for event in self.client.events_received():
            self.client_event(event)
        for event in self.server.events_received() if self.server else ():
            self.server_event(event)
        self.client_flushes()
        self.server_flushes()
        for end in (self.client, self.server):
            if end is not None:
                self.check_bounds(end)

    def check_bounds(self, end: Session) -> None:
        held = end.statistics()
        assert held.frames_under_way <= RING_FRAMES
        assert held.early_frames < RING_FRAMES
        assert held.early_bytes <= self.options.ring_bytes
        # Beyond the bound: what was taken just below it, and some small frames for each stream.
        owed_bytes = 2 * self._longest_bytes + 256 + self.client.next_stream * 3 * 256
        assert held.held_bytes <= self.options.bound_bytes + owed_bytes

    # The link.

    def good(self) -> bool:
        return self.now >= self.faults.until_s

    def carry(self, connection: Connection, message: bytes, *, to_server: bool) -> None:
        faults = self.faults
        if not self.good() and self.random.random() < faults.drop:
            return
        twice = not self.good() and self.random.random() < faults.double
        for _ in range(2 if twice else 1):
            arrival_s = self.now + self.random.uniform(*faults.delay_s)
            if not faults.overtakes or self.good():
                arrival_s = max(arrival_s, connection.last_arrival_s[to_server])
                connection.last_arrival_s[to_server] = arrival_s
            act = self.server_reads if to_server else self.client_reads
            self.at(arrival_s - self.now, lambda act=act: act(connection, message))  # type: ignore[misc]

    def cut(self) -> None:
        """Cut the client's connection; the server learns of it now, later, or from the next connection."""
        connection = self.connection
        if connection is not None:
            self.client_loses(connection)
            if self.random.random() < 2 / 3:
                self.at(self.random.uniform(0, 0.5), lambda: self.server_loses(connection))
        if not self.good():
            self.at(self.random.uniform(0, 2 * self.faults.cut_s), self.cut)

    def client_loses(self, connection: Connection) -> None:
        connection.client_up = False
        if self.connection is connection:
            self.connection = None
            self.client.receive_eof()
            assert self.client.state is State.RECONNECTING
            self.at(self.random.uniform(0, 0.3), self.client_connects)

    def server_loses(self, connection: Connection) -> None:
        connection.server_up = False
        if self.server_connection is connection:
            self.server_connection = None
            assert self.server is not None
            self.server.receive_eof()

    # The client.

    def client_connects(self) -> None:
        if self.connection is None:
            self.connection = Connection()
            self.connections += 1
            self.client.connect(self.now)
            self.settle()

    def client_reads(self, connection: Connection, message: bytes) -> None:
        if connection.client_up:
            self.client.receive_data(message, self.now)

    def client_flushes(self) -> None:
        connection = self.connection
        self.client_asks()
        messages = self.client.data_to_send(self.now)
        if connection is None:
            assert not messages
            return
        for message in messages:
            self.carry(connection, message, to_server=True)
        if self.client.should_close:
            self.client_loses(connection)
            self.at(0.05, lambda: self.server_loses(connection))

    def client_asks(self) -> None:
        if self.client.state is not State.CONNECTED:
            return
        while self._to_ask:
            stream, script = self.client.next_stream, self._to_ask[0]
            ask = Infer(stream=stream, model="m", prompt=str(stream), more=bool(script.parts))
            if self.client.infer(ask) is Backpressure.REFUSED:
                break
            self.scripts[stream] = self._to_ask.pop(0)
            self._to_send[stream] = [*script.parts]
        for stream, parts in self._to_send.items():
            while parts and stream in self.client.streams:
                part = Part(stream=stream, modality=Modality.TEXT, data=parts[0], more=len(parts) > 1)
                if self.client.part(part) is Backpressure.REFUSED:
                    return
                parts.pop(0)

    def client_event(self, event: object) -> None:
        match event:
            case Accept(stream=stream):
                assert stream not in self.text, "accepted twice"
                self.accepted.append(stream)
                self.text[stream] = []
            case Tokens(stream=stream, data=data):
                self.text[stream].append(data)
            case End(stream=stream, usage=usage):
                assert usage == {"completion_tokens": len(self.scripts[stream].deltas)}
                self.ended.append(stream)
            case Error(stream=stream, code="overloaded"):
                assert stream not in self.text
                self.overloads += 1
                self.at(0.5, functools.partial(self._to_ask.append, self.scripts.pop(stream)))
                del self._to_send[stream]
            case Note(stream=stream, note=note):
                assert int(note) == sum(map(len, self.text[stream])), "a note out of its place"
            case Welcomed() | Drained() | PeerGone():
                pass
            case _:
                raise AssertionError(event)

    def set_window(self, frames: int) -> None:
        self.client.set_window(frames, self.now)

    # The server.

    def server_reads(self, connection: Connection, message: bytes) -> None:
        if not connection.server_up:
            return
        if connection.is_open:
            if self.server_connection is connection:
                assert self.server is not None
                self.server.receive_data(message, self.now)
            return
        connection.opening.receive_data(message)
        for event in connection.opening.events_received():
            assert isinstance(event, HelloReceived), event
            if self.server_connection is not None:
                self.supersede(self.server_connection)
            connection.is_open = True
            self.server_connection = connection
            self.server_session(event).connect(event.hello, self.now)

    def supersede(self, connection: Connection) -> None:
        """Close a connection whose session has another one; the session is not to be told."""
        connection.server_up = False
        self.at(0.01, lambda: self.client_loses(connection))

    def server_session(self, event: HelloReceived) -> ServerSession:
        token = event.hello.resume_token
        if token is None:
            # Whoever never heard of a session has none; what the server began for it then is of no use to anybody.
            assert self.server is None or not self.server.streams
            seq = self.faults.first_seq
            token = f"token-{self.connections}"
            self.server = ServerSession("session", token, 1000, next_seq=seq, expected_seq=seq, options=self.options)
            return self.server
        assert self.server is not None
        assert token == self.server.resume_token
        return self.server

    def server_flushes(self) -> None:
        connection = self.server_connection
        if self.server is None:
            return
        messages = self.server.data_to_send(self.now)
        if connection is None:
            assert not messages
            return
        for message in messages:
            self.carry(connection, message, to_server=False)
        if self.server.should_close:
            self.server_closes(connection)

    def server_closes(self, connection: Connection) -> None:
        self.server_loses(connection)
        self.at(0.05, lambda: self.client_loses(connection))

    def server_event(self, event: object) -> None:
        assert self.server is not None
        match event:
            case Infer(stream=stream, prompt=prompt):
                assert prompt == str(stream)
                assert stream not in self._running, "begun twice"
                assert stream not in self.text, "begun twice"
                self.server.accept(stream, f"stream-{stream}")
                self._running[stream] = [*self.scripts[stream].deltas]
            case Part(stream=stream, data=data):
                self.parts.setdefault(stream, []).append(data)
            case Cancel(stream=stream):
                self.cancelled.append(stream)
            case Drained():
                self._paused.clear()
            case PeerGone():
                pass
            case _:
                raise AssertionError(event)

    def step(self) -> None:
        """Let every stream that runs have its next delta, as a step of an engine does, connected or not."""
        for stream in [*self._running]:
            if stream not in self._paused:
                self.advance(stream)
        self.at(STEP_S, self.step)

    def advance(self, stream: int) -> None:
        assert self.server is not None
        deltas = self._running[stream]
        if deltas:
            pressure = self.server.send_tokens(stream, deltas[0])
            if pressure is not Backpressure.REFUSED:
                deltas.pop(0)
            self.heed(stream, pressure)
            if pressure is not Backpressure.REFUSED and len(deltas) % DELTAS_A_NOTE == 0:
                sent = self.scripts[stream].deltas[: len(self.scripts[stream].deltas) - len(deltas)]
                self.server.note(Note(stream=stream, note=str(sum(map(len, sent)))))
        elif self.parts.get(stream, []) == self.scripts[stream].parts:
            del self._running[stream]
            usage = {"completion_tokens": len(self.scripts[stream].deltas)}
            self.server.end_stream(End(stream=stream, finish_reason="stop", usage=usage))

    def heed(self, stream: int, pressure: Backpressure) -> None:
        if pressure >= Backpressure.PAUSE:
            self._paused.add(stream)
            self.pauses += 1
        if pressure is Backpressure.REFUSED:
            self.refusals += 1
        if pressure >= Backpressure.PARK and self.server_connection is not None:
            self.parks += 1
            self.server_closes(self.server_connection)


def check_run(simulation: Simulation) -> None:
    """Run, and compare all that came out with what went in: each thing once, in order."""
    simulation.run()
    scripts = simulation.scripts
    assert sorted(simulation.accepted) == sorted(scripts)
    assert sorted(simulation.ended) == sorted(scripts)
    for stream, script in scripts.items():
        assert b"".join(simulation.text[stream]) == b"".join(script.deltas)
        assert simulation.parts.get(stream, []) == script.parts
