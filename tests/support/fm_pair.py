"""Both ends of FM on a link that is good, for tests that say themselves what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence

from support.fm_vectors import read, write

from seedance.daemon.protocol.fm_client import ClientSession
from seedance.daemon.protocol.fm_frame import DEFAULT_PAYLOAD_BYTES, Encoding
from seedance.daemon.protocol.fm_messages import Infer, Message
from seedance.daemon.protocol.fm_opening import HelloReceived, ServerOpening
from seedance.daemon.protocol.fm_server import ServerSession
from seedance.daemon.protocol.fm_session import Event, Options, Session

TOKEN = "token"


def messages(data: Sequence[bytes]) -> list[Message]:
    """Return what WebSocket messages say."""
    return [message for each in data for _, message in read(each, DEFAULT_PAYLOAD_BYTES)]


def feed(session: Session, now: float, *frames: tuple[int, Message]) -> None:
    """Have a session receive frames in one WebSocket message."""
    session.receive_data(write(list(frames)), now)


class Pair:
    """A client and a server, connected at once."""

    def __init__(
        self, options: Options | None = None, *, encodings: Sequence[Encoding] = (Encoding.TEXT,), epoch: int = 1
    ) -> None:
        self.now = 100.0
        self.client = ClientSession("client", encodings=encodings, options=options)
        self.server = ServerSession("session", TOKEN, 60_000, epoch=epoch, options=options)
        self.client_events: list[Event] = []
        self.server_events: list[Event] = []
        self.connect()

    def connect(self) -> None:
        """Connect, by HELLO and WELCOME."""
        self.client.connect(self.now)
        opening = ServerOpening()
        for message in self.client.data_to_send(self.now):
            opening.receive_data(message)
        (event,) = opening.events_received()
        assert isinstance(event, HelloReceived)
        self.server.connect(event.hello, self.now)
        self.pump()

    def cut(self) -> None:
        """End the connection for both."""
        self.client.receive_eof()
        self.server.receive_eof()

    def pump(self) -> None:
        """Carry messages until nobody has one."""
        quiet = False
        while not quiet:
            quiet = True
            for sender, receiver in ((self.client, self.server), (self.server, self.client)):
                for message in sender.data_to_send(self.now):
                    quiet = False
                    receiver.receive_data(message, self.now)
            self.collect()

    def collect(self) -> None:
        """Take the events of both."""
        self.client_events += self.client.events_received()
        self.server_events += self.server.events_received()

    def wait(self, seconds: float) -> None:
        """Let time pass, with everything that is due in it."""
        end = self.now + seconds
        while (due_s := min(self.client.next_timer(), self.server.next_timer())) <= end:
            self.now = max(self.now, due_s)
            self.client.timer_fired(self.now)
            self.server.timer_fired(self.now)
            self.pump()
        self.now = end

    def begin(self, count: int = 1) -> None:
        """Have the client begin streams, and forget the events so far."""
        for _ in range(count):
            self.client.infer(Infer(stream=self.client.next_stream, model="m", prompt="p"))
        self.pump()
        self.client_events.clear()
        self.server_events.clear()
