"""A client of kept streams through the deaths of their workers: it reads records, and loses what was under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from support.kept_parts import KeptWorker
from support.worker_parts import FakeFlow

from seedance.daemon import openai_door
from seedance.daemon.answers import Farewell
from seedance.daemon.doors import infer
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.event_streams import KeptEvents
from seedance.daemon.infer_answers import KeptAnswer
from seedance.daemon.kept_request import INFER, KeptRequest, RequestKey
from seedance.daemon.kept_stream import KeptStream
from seedance.daemon.kept_streams import EVENTS, MESSAGES
from seedance.daemon.ring.driver import Flow


class KeptClient:
    """A reader of one stream, and the connection that it asks on; `read` are the records that have arrived.

    `take_in` has arrive what was sent.
    """

    chunked = True

    def __init__(self, worker: KeptWorker, key: RequestKey | None = None) -> None:
        self.worker = worker
        self.key = key
        self.flow: Flow = FakeFlow(-1, Farewell())
        self.stream: KeptStream | None = None
        self.token = ""
        self.door = ""
        self.sent: list[tuple[int, bytes]] = []
        self.read: list[bytes] = []
        self.error: ApiError | None = None

    @property
    def is_done(self) -> bool:
        """Whether the last record has arrived, or there will be none."""
        if not self.read:
            return self.error is not None
        last = self.read[-1]
        return b"[DONE]" in last or b'"error"' in last or (self.door == MESSAGES and b'"finish_reason"' in last)

    # -- what it asks -------------------------------------------------------------------------------------------------

    def asks(self, ask: Callable[..., None], **fields: Any) -> None:
        """Ask in one of these ways, and remember that."""
        self._ask = ask, fields
        ask(**fields)

    def ask_again(self) -> None:
        """Ask for the same under the same key."""
        assert self.key is not None
        stream = self.worker.streams.begun(self.door, self.key)
        if stream is not None:
            self._read(stream)
        else:
            ask, fields = self._ask
            ask(**fields)

    def complete(self, **fields: Any) -> None:
        """Ask for a completion."""
        self._ask_openai(openai_door.completion, {"prompt": "Hi", **fields})

    def chat(self, **fields: Any) -> None:
        """Ask for a chat completion."""
        self._ask_openai(openai_door.chat, {"messages": [{"role": "user", "content": "Hi"}], **fields})

    def infer(self, **fields: Any) -> None:
        """Ask at the JSON door, as `infer_door` does it."""
        self.door = MESSAGES
        body = msgspec.json.encode({"prompt": "Hi", "resumable": True, **fields})
        request = infer.read(body)
        self.worker.service.admit(request.model, 1)
        stream = self.worker.streams.begin(MESSAGES, self.key)
        answer = KeptAnswer(stream, self.worker.service)
        stream.begin()
        stream.accepted(answer, KeptRequest(INFER, body))
        self._read(stream)
        self.worker.service.begin_infer(request, answer)

    def _ask_openai(self, door: Any, fields: dict[str, Any]) -> None:
        self.door = EVENTS
        door(
            self.worker.service, self, msgspec.json.encode({"model": "m", "stream": True, "resumable": True, **fields})
        )

    # -- the connection: `openai_door.Exchange` -----------------------------------------------------------------------

    def keep(self) -> KeptEvents:
        stream = self.worker.streams.begin(EVENTS, self.key)
        self._read(stream)
        return KeptEvents(stream)

    def respond(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        raise AssertionError("a resumable request is streamed")

    def start_stream(self, headers: Sequence[tuple[str, str]]) -> None:
        raise AssertionError("its events are kept")

    def write(self, data: bytes) -> None:
        raise AssertionError("its events are kept")

    def end_stream(self) -> None:
        raise AssertionError("its events are kept")

    def fell_behind(self, waiting_bytes: int) -> None:
        raise AssertionError("its events are kept")

    # -- the reader: `kept_stream.Reader` -----------------------------------------------------------------------------

    def begin(self) -> None:
        assert self.stream is not None
        assert self.token in ("", self.stream.kept.token)
        self.token = self.stream.kept.token

    def take(self, first_seq: int, records: Sequence[bytes]) -> int:
        self.sent += enumerate(records, first_seq)
        return 0

    def all_taken(self) -> None:
        self.stream = None

    def tell(self, note: str, retry_after_ms: int) -> None:
        raise AssertionError("nobody stops the service here")

    def taken_over(self) -> None:
        raise AssertionError("there is no other reader")

    def sent_away(self) -> None:
        self.stream = None

    def fail(self, error: ApiError) -> None:
        self.error = error
        self.stream = None

    # -- what it does -------------------------------------------------------------------------------------------------

    def take_in(self) -> None:
        """Have arrive what was sent: it follows what has arrived, and what was read before is as it was."""
        sent, self.sent = self.sent, []
        for seq, record in sent:
            assert seq == len(self.read) + 1
            self.read.append(record)

    def lose(self) -> None:
        """Lose the connection, and what is under way."""
        self.sent = []
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.disconnected(self)

    def die(self, worker: KeptWorker) -> None:
        """Lose the connection as its worker died; the next one is this."""
        self.sent, self.stream, self.worker = [], None, worker

    def come_back(self) -> None:
        """Go on behind what has arrived."""
        assert self.token
        self.sent = []
        self._read(self.worker.streams.find(self.door, self.token))

    def _read(self, stream: KeptStream) -> None:
        self.stream = stream
        stream.connect(self, len(self.read))

    # -- what has come ------------------------------------------------------------------------------------------------

    def said(self) -> list[dict[str, Any]]:
        """Return what each record says, without DONE."""
        bodies = [line for record in self.read for line in record.split(b"\n") if line and not line.startswith(b":")]
        return [msgspec.json.decode(body) for each in bodies if (body := each.removeprefix(b"data: ")) != b"[DONE]"]

    def text(self, choice: int = 0) -> str:
        """Return the text so far."""
        if self.door == MESSAGES:
            return "".join(said.get("delta", "") for said in self.said())
        entries = [entry for said in self.said() for entry in said["choices"] if entry["index"] == choice]
        return "".join(entry["text"] if "text" in entry else entry["delta"].get("content", "") for entry in entries)

    def reasons(self) -> list[str]:
        """Return the reasons for which choices have ended."""
        said = self.said()
        entries = said if self.door == MESSAGES else [entry for each in said for entry in each["choices"]]
        return [entry["finish_reason"] for entry in entries if entry.get("finish_reason") is not None]

    def usage(self) -> dict[str, Any]:
        """Return the usage."""
        (usage,) = [said["usage"] for said in self.said() if said.get("usage")]
        return dict(usage)
