"""The FM sessions of a worker with the engine, the clients and the time in a test's hands."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from support.virtual_time import VirtualTimeLoop
from support.worker_parts import FakeDriver

from seedance.daemon import tokenizer
from seedance.daemon.engine_client import EngineClient
from seedance.daemon.fm_sessions import FmSessions
from seedance.daemon.fm_streams import FmSession
from seedance.daemon.journal import Journal
from seedance.daemon.protocol.fm_client import ClientSession
from seedance.daemon.protocol.fm_frame import split_message
from seedance.daemon.protocol.fm_logprobs import Candidate, ScoredTokens
from seedance.daemon.protocol.fm_messages import Accept, End, Error, Hello, Infer, Message, Note, Tokens
from seedance.daemon.protocol.fm_opening import HelloReceived, ServerOpening
from seedance.daemon.protocol.fm_session import Options
from seedance.daemon.protocol.frame import LENGTH_16, frame_binary
from seedance.daemon.ring.frame_store import StoredFrames
from seedance.daemon.service import Service
from seedance.daemon.shared_log import SharedLog
from seedance.daemon.stream_columns import FEWEST
from seedance.engine.adapter import EngineState
from seedance.engine.channel import Batch, Delta, EngineChanged, Receiver, ToHost, encode, pack_singles
from seedance.engine.request import FinishReason, ModelInfo
from seedance.engine.synthetic_vocabulary import VOCAB_SIZE
from seedance.qos.limiter import TenantLimiter
from seedance.qos.quota import MemoryQuota, Quota, SessionQuota

KEY = b"k" * 32
_NO_DESCRIPTOR = 1 << 20
MODEL = ModelInfo(
    name="m", tokenizer_dir="", max_model_len=8192, vocab_size=VOCAB_SIZE, eos_token_ids=(1,), created=1, engine="none"
)
TOKENIZER = tokenizer.synthetic()


class FakeConnection:
    """A connection that keeps what is sent, and how it was ended."""

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd
        self.messages: list[bytes] = []
        self.end_code: int | None = None

    def send_message(self, message: bytes) -> None:
        assert self.end_code is None
        self.messages.append(message)

    def end(self, close_code: int) -> None:
        self.end_code = close_code

    def fell_behind(self, waiting_bytes: int) -> None:
        raise AssertionError("nothing ever waits here")

    def all_sent(self) -> None:
        pass


class FmDriver(FakeDriver):
    """A driver that brings frames which are sent past the connections to those, as messages."""

    def __init__(self) -> None:
        super().__init__()
        self.connections: dict[int, FakeConnection] = {}
        self.frames = self.messages = 0

    def send_each(self, fds: memoryview, frames: StoredFrames) -> list[tuple[int, int]]:
        for fd, frame in frames.to(fds):
            message = frame[2:] if frame[1] < LENGTH_16 else frame[4:]
            assert frame == frame_binary(message)
            self.connections[fd].send_message(message)
            self.frames += sum(1 for _ in split_message(message, len(message)))
            self.messages += 1
        return []


class FmWorker:
    """A worker's part that FM is; what a door needs of its worker, too."""

    def __init__(
        self,
        *,
        resume_for_s: float = 10.0,
        memory_bytes: int | None = None,
        bound_bytes: int = 64 << 10,
        log_fd: int | None = None,
        is_ready: bool = True,
        fewest_in_columns: int = FEWEST,
    ) -> None:
        """`log_fd` is the log that its journal is in, which stays the caller's."""
        self.loop = VirtualTimeLoop()
        self.log = None if log_fd is None else SharedLog(os.dup(log_fd))
        self.journal = Journal(self.log)
        self.driver = FmDriver()
        self.quota = Quota(
            tenant="acme",
            session=SessionQuota(resume_for_s=resume_for_s),
            memory=MemoryQuota(max_bytes=memory_bytes),
        )
        limiter = TenantLimiter(self.quota)
        self.service = Service(self.loop, self.quota, limiter)
        self.service.engine = EngineClient(
            self.driver,
            limiter,
            self.loop.time,
            lambda change: None,
            str.encode,
            self.journal,
            fewest_in_columns=fewest_in_columns,
        )
        self.service.engine.connect(10)
        options = Options(bound_bytes=bound_bytes)
        self.sessions = FmSessions(self.loop, self.service, KEY, self.quota, options, self.journal)
        if is_ready:
            self.ready()
        self.max_backlog_bytes = bound_bytes
        self.ping_interval_s = 15.0
        self.leaving = False
        self.forgotten: list[object] = []
        self._receiver: Receiver[ToHost] = Receiver(ToHost)

    def ready(self, model: ModelInfo = MODEL) -> None:
        """Have an engine."""
        self.service.engine_changed(EngineChanged(EngineState.READY, "", model), TOKENIZER, None)

    def die(self) -> None:
        """Write nothing any more, not even what was to be written next."""
        assert self.log is not None
        self.log.close()
        self.loop.close()

    def forget(self, connection: object) -> None:
        self.forgotten.append(connection)

    def wait(self, seconds: float = 0.0) -> None:
        """Let time pass, one turn of the loop at least."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def heard(self) -> list[ToHost]:
        """Return what the engine was told since the last call."""
        flow = self.driver.flows[0]
        data, flow.sent = bytes(flow.sent), bytearray()
        return self._receiver.receive_data(data)

    def step(self, text: str, *numbers: int, reason: FinishReason | None = None) -> None:
        """Be the engine: a token of each stream, or with a reason their last ones."""
        token_ids = TOKENIZER.encode(text)
        if reason is None:
            batches = [
                Batch([], pack_singles([entry for number in numbers for entry in (number, token_id)]))
                for token_id in token_ids
            ]
        else:
            batches = [Batch([Delta(number, token_ids, finish_reason=reason) for number in numbers], pack_singles([]))]
        self.service.engine.data_received(b"".join(map(encode, batches)))

    def bring(self, *deltas: Delta) -> None:
        """Be the engine: bring what these say in one step."""
        self.service.engine.data_received(encode(Batch(list(deltas), pack_singles([]))))

    def close(self) -> None:
        self.sessions.close()
        self.loop.close()


class FmPeer:
    """A client of such a worker, on connections that carry everything at once."""

    def __init__(self, worker: FmWorker, client_id: str = "client") -> None:
        self.worker = worker
        self.client = ClientSession(client_id)
        self.connection = FakeConnection()
        self.session: FmSession | None = None
        self.refusal: Error | None = None
        self.sizes: list[int] = []
        self.said: list[Message | ScoredTokens] = []
        self.reads = True

    def connect(self) -> None:
        """Connect, with a HELLO."""
        self.client.receive_eof()
        self.client.connect(self.worker.loop.time())
        opening = ServerOpening()
        for message in self.client.data_to_send(self.worker.loop.time()):
            opening.receive_data(message)
        (event,) = opening.events_received()
        assert isinstance(event, HelloReceived)
        self.hello(event.hello)

    def hello(self, hello: Hello) -> None:
        """Ask for a session."""
        found = self.worker.sessions.find(hello)
        if isinstance(found, Error):
            self.refusal = found
            return
        connections = self.worker.driver.connections
        self.connection = FakeConnection(_NO_DESCRIPTOR + len(connections))
        connections[self.connection.fd] = self.connection
        self.session = found
        found.connect(self.connection, hello)
        self.pump()

    def drop(self) -> None:
        """Lose the connection, at both ends."""
        assert self.session is not None
        self.session.disconnected(self.connection)
        self.client.receive_eof()

    def ask(self, **fields: object) -> int:
        """Begin a stream; returns its number."""
        number = self.client.next_stream
        self.client.infer(Infer(stream=number, model="", prompt="Hi", sampling=dict(fields)))
        self.pump()
        return number

    def pump(self, seconds: float = 0.0) -> None:
        """Carry messages both ways until nobody has one, after some time."""
        self.worker.wait(seconds)
        assert self.session is not None
        while self.reads:
            now = self.worker.loop.time()
            self.client.timer_fired(now)
            arrived, self.connection.messages = self.connection.messages, []
            for message in arrived:
                self.sizes.append(len(message))
                self.client.receive_data(message, now)
            self.take()
            asked = self.client.data_to_send(now) if self.connection.end_code is None else []
            for message in asked:
                self.session.message_received(message)
            self.worker.wait()
            if not arrived and not asked and not self.connection.messages:
                break

    def take(self) -> None:
        """Keep what the client was told."""
        self.said += [event for event in self.client.events_received() if isinstance(event, Message | ScoredTokens)]

    def text(self, stream: int) -> str:
        """Return the text of a stream so far."""
        pieces = [
            said.data if isinstance(said, Tokens) else said.text.encode()
            for said in self.said
            if isinstance(said, Tokens | ScoredTokens) and said.stream == stream
        ]
        return b"".join(pieces).decode()

    def positions(self, stream: int) -> list[list[Candidate]]:
        """Return the log probabilities of a stream so far."""
        scored = [said for said in self.said if isinstance(said, ScoredTokens) and said.stream == stream]
        return [position for said in scored for position in said.positions]

    def id(self, stream: int) -> str:
        """Return the name of a stream."""
        (id,) = [said.id for said in self.said if isinstance(said, Accept) and said.stream == stream]
        return id

    def last(self, stream: int) -> End | Error:
        """Return a stream's last frame."""
        (last,) = [said for said in self.said if isinstance(said, End | Error) and said.stream == stream]
        return last

    def notes(self) -> Sequence[str]:
        """Return the notes about the connection."""
        return [said.note for said in self.said if isinstance(said, Note) and said.stream == 0]
