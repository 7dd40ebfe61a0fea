"""One client connection of a worker, as HTTP: requests to doors, answers to the flow, deadlines."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import unquote

from seedance.daemon import openai_door
from seedance.daemon.doors import last_event, openai_response
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.doors.last_event import LastEvent
from seedance.daemon.event_streams import EventReader, KeptEvents
from seedance.daemon.fm_sessions import FmSessions
from seedance.daemon.infer_door import PAUSE_PART
from seedance.daemon.kept_request import RequestKey
from seedance.daemon.kept_stream import KeptStream
from seedance.daemon.kept_streams import EVENTS, KeptStreams
from seedance.daemon.keys import hash_key, key_of
from seedance.daemon.openai_door import error_response
from seedance.daemon.protocol import sse
from seedance.daemon.protocol.handshake import HandshakeRefused
from seedance.daemon.protocol.head import Limits, Request
from seedance.daemon.protocol.http import Event, HeadReceived, HttpServer, Phase, RequestReceived, chunk
from seedance.daemon.ring.driver import Flow
from seedance.daemon.service import Answer, Service
from seedance.daemon.urgency import deadline_of

_log = logging.getLogger(__name__)
_PING_BESIDE_IDS = sse.comment_line("ping")
_Door = Callable[[Service, openai_door.Exchange, bytes, int | None], Answer]
_POST_DOORS: dict[str, _Door] = {
    "/v1/chat/completions": openai_door.chat,
    "/v1/completions": openai_door.completion,
}
_MODELS = "/v1/models"
_STREAMS = "/v2/streams/"
_IDEMPOTENCY_KEY = "idempotency-key"
_NOTHING_MORE = 204
"""What ends the attempts of a browser's EventSource to connect again."""
WEBSOCKET_PATHS = ("/v2/infer", "/v2/stream", "/echo")
"""The last one exists only in the configuration that conformance tests use."""


class Owner(Protocol):
    """What a connection needs of its worker."""

    service: Service
    sessions: FmSessions
    streams: KeptStreams
    limits: Limits
    max_backlog_bytes: int
    test_echo: bool

    def hand_back(self, connection: HttpConnection, data: bytes) -> None:
        """Give the connection to the gateway, as it has shown another key."""

    def upgrade(self, connection: HttpConnection, request: Request) -> None:
        """Make the connection a WebSocket."""

    def forget(self, connection: HttpConnection) -> None:
        """The connection is gone."""


class HttpConnection:
    """An endpoint that speaks HTTP; see `openai_door.Exchange` for the part that answers write to.

    `deadline_s` says when it is closed if it is still in `phase_seen` then, and `left_bytes` what it had not sent at
    its last deadline.
    """

    __slots__ = (
        "_answer",
        "_behind",
        "_owner",
        "_pumping",
        "_reader",
        "_request_key",
        "deadline_s",
        "flow",
        "http",
        "left_bytes",
        "listener",
        "peer",
        "phase_seen",
    )

    flow: Flow

    def __init__(self, owner: Owner, peer: str, listener: str) -> None:
        self._owner = owner
        self._answer: Answer | None = None
        self._reader: EventReader | None = None  # in its place: what is answered is not this connection's own
        self._request_key: RequestKey | None = None
        self._pumping = False
        self._behind = False
        self.http = HttpServer(owner.limits)
        self.peer = peer
        self.listener = listener
        self.phase_seen: Phase | None = None
        self.deadline_s = math.inf
        self.left_bytes = 0

    # -- endpoint of the flow -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.http.receive_data(data)
        self.pump()

    def eof_received(self) -> None:
        # A client that has gone cannot be told from one that only sends no more; like other servers we take it as gone.
        if self._answer is not None or self._reader is not None:
            self._cancel()
            self.flow.abort()
            return
        self.http.receive_eof()
        self.pump()

    def backlog_drained(self) -> None:
        self._behind = False
        if self._answer is not None:
            self._owner.service.engine.set_paused(self._answer.streams, False)
        elif self._reader is not None:
            self._reader.stream.drained()
        self.pump()

    def connection_lost(self, error: OSError | None) -> None:
        self._cancel()
        self._owner.forget(self)

    def _cancel(self) -> None:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            self._owner.service.cancel(answer)
        elif self._reader is not None:
            reader, self._reader = self._reader, None
            reader.stream.disconnected(reader)

    def close_when_done(self) -> None:
        """Close once the current request, if any, has been answered."""
        self.http.close_when_done()
        self.pump()

    # -- requests -----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Act on what has arrived, send what that made, and adjust reading.

        A client that does not take its answers is not given more of them; a closed connection begins nothing.
        """
        if self._pumping:
            return  # an answer that came at once; the loop below goes on
        self._pumping = True
        http = self.http
        self._flush()
        while not self._behind and self.flow.fd >= 0 and (events := http.events_received()):
            for event in events:
                self._act_on(event)
            self._flush()
        self._pumping = False
        if http.phase is Phase.HANDED_OVER:
            return
        if http.should_close:
            self.flow.close()
        elif http.wants_read and not self._behind:
            self.flow.resume_reading()
        else:
            self.flow.pause_reading()

    def _act_on(self, event: Event) -> None:
        try:
            if isinstance(event, HeadReceived):
                self._head_received(event.request)
            elif isinstance(event, RequestReceived):
                self._request_received(event.request, event.body)
        except ApiError as error:
            self.fail(error)

    def _flush(self) -> None:
        data = self.http.data_to_send()
        if data:
            self._behind = self.flow.send(data) > self._owner.max_backlog_bytes

    def _head_received(self, request: Request) -> None:
        self.phase_seen = None  # in use: the clock starts anew, though the phase may look the same at the next look
        key = key_of(request.headers, request.query)
        if key is None or hash_key(key) not in self._owner.service.quota.keys:
            self._owner.hand_back(self, self.http.rewind())
        elif request.path in WEBSOCKET_PATHS and (request.path != "/echo" or self._owner.test_echo):
            self._owner.upgrade(self, request)
        elif request.path in _POST_DOORS:
            self._take_if(request, "POST")
        elif request.path == _MODELS or request.path.startswith(_MODELS + "/"):
            self._take_if(request, "GET", "HEAD")
        elif request.path.startswith(_STREAMS):
            self._take_if(request, "DELETE", "GET")
        else:
            raise ApiError("not_found", f"cannot find '{request.path[:200]}' here; the paths are in the documentation")

    def _take_if(self, request: Request, *methods: str) -> None:
        """Let the request in when its method is one of these."""
        if request.method in methods:
            self.http.accept_body()
            return
        message = f"cannot {request.method[:20]} '{request.path}': use {methods[0]}"
        headers, body = error_response(ApiError("invalid_request", message, status=405))
        self.respond(405, (*headers, ("Allow", ", ".join(methods))), body)

    def _request_received(self, request: Request, body: bytes) -> None:
        path = request.path
        if (door := _POST_DOORS.get(path)) is not None:
            if not self._goes_on(request, body):
                self._ask(door, request, body)
        elif not path.startswith(_STREAMS):
            self._models(path)
        elif request.method == "GET":
            name = unquote(path[len(_STREAMS) :])
            self._resume(last_event.of_path(name, request.get(last_event.FIELD)))
        else:
            self._end_stream_by_id(unquote(path[len(_STREAMS) :]))

    def _ask(self, door: _Door, request: Request, body: bytes) -> None:
        answer = door(self._owner.service, self, body, deadline_of(request.headers))
        # A request that was refused at once has been answered already.
        if self._reader is None and self.http.phase in (Phase.ANSWERING, Phase.STREAMING):
            self._answer = answer

    def _goes_on(self, request: Request, body: bytes) -> bool:
        """Go on with a kept stream, where the request is about one that there is."""
        self._request_key = None
        if (id := request.get(last_event.FIELD)) is not None:
            self._resume(last_event.parse(id))
            return True
        if (key := request.get(_IDEMPOTENCY_KEY)) is not None:
            self._request_key = RequestKey.of(key, b"%b\n%b" % (request.path.encode(), body))
            if (stream := self._owner.streams.begun(EVENTS, self._request_key)) is not None:
                self._read(stream, 0)
                return True
        return False

    def _resume(self, last: LastEvent) -> None:
        stream = self._owner.streams.find(EVENTS, last.token)
        if stream.is_over and last.seq == stream.history.next_seq - 1:
            self.respond(_NOTHING_MORE, (), b"")
        else:
            self._read(stream, last.seq)

    def _read(self, stream: KeptStream, last_seq: int) -> None:
        reader = self._reader = EventReader(self, stream)
        try:
            stream.connect(reader, last_seq)
        except ApiError:
            self._reader = None
            raise

    def keep(self) -> KeptEvents:
        stream = self._owner.streams.begin(EVENTS, self._request_key)
        self._read(stream, 0)
        return KeptEvents(stream)

    def _models(self, path: str) -> None:
        model = self._owner.service.require_engine().model
        name = unquote(path[len(_MODELS) + 1 :])
        if name and name != model.name:
            raise ApiError(
                "not_found",
                f"cannot find the model '{name[:200]}': this server has '{model.name}'",
                param="model",
            )
        body = openai_response.model_body(model) if name else openai_response.models_body([model])
        self.respond(200, (("Content-Type", "application/json"),), body)

    def _end_stream_by_id(self, id: str) -> None:
        id = id.partition(".")[0]  # a resume token begins with the id
        if not self._owner.streams.release(id) and not self._owner.sessions.cancel(id):
            raise ApiError("not_found", f"cannot find the stream '{id[:200]}'; its id came with its first answer")
        self.respond(204, (), b"")

    def refuse_upgrade(self, refusal: HandshakeRefused) -> None:
        """Answer a request that cannot become a WebSocket."""
        headers, body = error_response(ApiError("invalid_request", str(refusal), status=refusal.code))
        self.respond(refusal.code, (*headers, *refusal.headers), body)

    # -- answers ------------------------------------------------------------------------------------------------------

    def respond(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        self._answer = self._reader = None
        self.http.send_response(status, headers, body)
        self.pump()

    def fail(self, error: ApiError) -> None:
        headers, body = error_response(error)
        self.respond(error.status, headers, body)

    def start_stream(self, headers: Sequence[tuple[str, str]]) -> None:
        self.http.start_stream(200, headers)
        self._flush()

    @property
    def chunked(self) -> bool:
        return self.http.chunked

    def write(self, data: bytes) -> None:
        waiting_bytes = self.flow.send(chunk(data) if self.http.chunked else data)
        if waiting_bytes:
            self.fell_behind(waiting_bytes)

    def fell_behind(self, waiting_bytes: int) -> None:
        if waiting_bytes > self._owner.max_backlog_bytes:
            _log.info("a client of %s reads too slowly; its stream is ended", self.peer or self.listener)
            self._cancel()
            self.flow.abort()
        elif waiting_bytes > self._owner.max_backlog_bytes // PAUSE_PART and self._answer is not None:
            self._owner.service.engine.set_paused(self._answer.streams, True)

    def end_stream(self) -> None:
        self._answer = self._reader = None
        self.http.end_stream()
        self.pump()

    def ping(self) -> None:
        """Show a sign of life on a streamed answer, unless the client has something to take already."""
        if not self.flow.waiting_bytes:
            self.write(sse.PING if self._reader is None else _PING_BESIDE_IDS)
