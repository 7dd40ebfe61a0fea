"""A stream of an FM session: what its request has come to, and its own sink."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Final, Protocol

from seedance.daemon.doors import fm
from seedance.daemon.doors.errors import ApiError, invalid
from seedance.daemon.doors.infer import InferRequest
from seedance.daemon.doors.openai_response import Usage
from seedance.daemon.journal import Journal, fill
from seedance.daemon.journal_records import FirstToken, PartTaken, StreamRecord, token_list
from seedance.daemon.protocol.fm_messages import Infer, Note, Part, decode_payload, encode_payload
from seedance.daemon.protocol.fm_parts import Parts
from seedance.daemon.protocol.fm_sender import Backpressure
from seedance.daemon.protocol.fm_server import ServerSession
from seedance.daemon.protocol.fm_session import Options
from seedance.daemon.service import Answer, Service
from seedance.daemon.session_log import Kept
from seedance.daemon.stream import Sink
from seedance.engine.request import FinishReason, TokenLogprobs

_ID_BYTES: Final = 16


class Sessions(Protocol):
    """What a session needs of the tenant's sessions."""

    loop: asyncio.AbstractEventLoop
    service: Service
    options: Options
    journal: Journal

    @property
    def resume_for_ms(self) -> int:
        """How long a session waits for its client."""

    def touched(self, session: Any) -> None:
        """Have a session's frames sent at the next turn of the loop."""

    def flush(self) -> None:
        """Send the frames of all that were touched now."""

    def left(self, kept: Kept[Any]) -> None:
        """Take note that a session's client is away."""

    def remove(self, kept: Kept[Any]) -> None:
        """Keep a session no longer."""

    def stream_began(self, answer: FmAnswer) -> None:
        """Take note that there is a stream of this name."""

    def stream_ended(self, id: str) -> None:
        """Take note that a stream is over."""

    def cancel(self, id: str) -> bool:
        """End a stream of any session; tells whether there is one, or was."""


class Session(Protocol):
    """What a stream needs of its session."""

    number: int

    @property
    def protocol(self) -> ServerSession:
        """The protocol's part, whole."""

    def touch(self) -> None:
        """Have what there is to send sent soon."""

    def sent_in_columns(self, answer: FmAnswer, data: bytes) -> bool:
        """Send text of a stream that is `in_columns`; False where that cannot be, and nothing is done."""

    def tell(self, note: Note) -> None:
        """Send a note, if there is room for it."""

    def pressed(self, pressure: Backpressure) -> None:
        """Do what the protocol says of a client that takes too little."""

    def stream_ended(self, answer: FmAnswer, last: Backpressure) -> None:
        """Take note that a stream is over; `last` is what sending its last frame gave."""


class FmAnswer(Answer):
    """One stream of a session, and its own sink; `id` is its name for all of the tenant's clients.

    `infer` is the payload that asked for it, `text_bytes` how much of its text the session was given. `record` is what
    the journal of the last worker has of it, until there is an engine that goes on with it. `in_columns` says that its
    session is a row (`fm_columns`). While the prompt is not all there, `parts` are what has come of it. With
    `has_logprobs` each text goes with its tokens' log probabilities.
    """

    __slots__ = (
        "_first_s",
        "_part_payloads",
        "_session",
        "_sessions",
        "begun_s",
        "has_logprobs",
        "id",
        "in_columns",
        "infer",
        "number",
        "parts",
        "record",
        "text_bytes",
    )

    def __init__(self, sessions: Sessions, session: Session, number: int, record: StreamRecord | None = None) -> None:
        super().__init__()
        self._sessions = sessions
        self._session = session
        self.number = number
        self.in_columns = False
        self.record = record
        self.has_logprobs = False
        self.parts: Parts | None = None
        self._part_payloads: list[bytes] = []
        if record is None:
            self.begun_s, self._first_s = sessions.loop.time(), None
            self.id, self.infer, self.text_bytes = secrets.token_urlsafe(_ID_BYTES), b"", 0
            return
        self.begun_s, self._first_s = record.begun_s, record.first_s
        self.id, self.infer, self.text_bytes = record.id, record.infer, record.told_bytes
        self.prompt_tokens = len(token_list(record.prompt_token_ids))
        if record.sampling is None and (infer := _infer(record)).more:
            self._await_parts(infer, record.parts)

    def _await_parts(self, infer: Infer, payloads: list[bytes]) -> None:
        self.parts, self._part_payloads = Parts(infer, self._sessions.options.payload_bytes), payloads
        for payload in payloads:
            part = decode_payload(payload, 0, len(payload))
            assert isinstance(part, Part)
            self.parts.take(part)

    def saved(self, waiting_bytes: int) -> StreamRecord:
        """Return what the journal needs of it; so much of its text has no number yet."""
        if self.record is not None:
            return self.record
        record = StreamRecord(self.number, self.id, self.infer, self.begun_s, first_s=self._first_s)
        record.parts = self._part_payloads
        record.told_bytes = self.text_bytes - waiting_bytes
        for stream in self.streams:
            fill(record, stream, self.model)
        return record

    @property
    def is_coming(self) -> bool:
        """Return whether the engine is about to hear of it: all is there for that."""
        return not self.streams and self.parts is None and self.record is None

    @property
    def has_text(self) -> bool:
        """Return whether text has come."""
        return self._first_s is not None

    def over(self) -> None:
        """Take note that it is in the journal no longer."""
        self._sessions.journal.left(len(self.streams))
        if self.parts is not None and self.record is None:
            self._sessions.service.release(1)
            self.parts = None

    # -- the request --------------------------------------------------------------------------------------------------

    def begin(self, infer: Infer, request: InferRequest) -> None:
        """Have an admitted request served, once its prompt is whole."""
        if infer.more:
            self.parts = Parts(infer, self._sessions.options.payload_bytes)
        else:
            self._serve(request)

    def part_arrived(self, part: Part) -> None:
        """Take more of the prompt."""
        try:
            if self.parts is None:
                raise ValueError("cannot take a part: the prompt is whole, and a stream that runs takes no more of it")
            self.parts.take(part)
            payload = encode_payload(part)
            self._part_payloads.append(payload)
            self._sessions.journal.note(PartTaken(self._session.number, self.number, payload))
            if self.record is None:
                self._serve_if_whole(self.parts)
        except ValueError as error:
            self._sessions.service.cancel(self)
            self.stream_failed(invalid(str(error)))

    def resume(self, record: StreamRecord) -> None:
        """Go on with a stream that another worker had, now that there is an engine."""
        service = self._sessions.service
        self.record = None
        if self.cancelled:
            service.release(1)
        elif self.parts is not None:
            try:
                self._serve_if_whole(self.parts)
            except ValueError as error:
                self.stream_failed(invalid(str(error)))
        elif record.sampling is None:
            self._serve(fm.parse(_infer(record)))
        else:
            self._go_on(record)

    def _serve_if_whole(self, parts: Parts) -> None:
        if parts.is_complete:
            infer = parts.whole()
            self.infer, self.parts, self._part_payloads = encode_payload(infer), None, []
            try:
                request = fm.parse(infer)
            except ApiError as error:
                self._sessions.service.release(1)
                self.stream_failed(error)
            else:
                self._serve(request)

    def _serve(self, request: InferRequest) -> None:
        self.has_logprobs = request.logprobs is not None
        self._sessions.service.begin_infer(request, self)

    def _go_on(self, record: StreamRecord) -> None:
        request = fm.parse(_infer(record))
        self.has_logprobs = request.logprobs is not None
        try:
            (text,) = self._sessions.service.resume(request, self, [record])
        except ApiError as error:
            self.stream_failed(error)
            return
        rest = text.encode()[self.text_bytes :]
        if rest and not self.has_logprobs:  # with them, all is in frames and in what waits
            self.data_arrived(rest)
        self._session.touch()

    def sink(self, index: int) -> Sink:
        return self

    def started(self) -> None:
        """See `service.Answer`; ACCEPT has told it already."""
        (stream,) = self.streams
        self._sessions.journal.submitted(self._session.number, self.number, stream, self.model)

    def failed(self, error: ApiError) -> None:
        self.stream_failed(error)

    def cancelled_by_client(self) -> None:
        """End with what there is."""
        self._sessions.service.cancel(self)
        self.stream_finished(FinishReason.ABORT)

    def text_arrived(self, text: str) -> None:
        if self.has_logprobs:
            self.logprobs_arrived(text, ())
            return
        self._note_first()
        self.data_arrived(text.encode())

    def _note_first(self) -> None:
        if self._first_s is None:
            self._first_s = self._sessions.loop.time()
            self._sessions.journal.note(FirstToken(self._session.number, self.number, self._first_s))

    def data_arrived(self, data: bytes) -> None:
        """Take more text."""
        session = self._session
        if self.in_columns and session.sent_in_columns(self, data):
            return
        self.text_bytes += len(data)
        pressure = session.protocol.send_tokens(self.number, data)
        session.touch()
        self._pressed(pressure)

    def _pressed(self, pressure: Backpressure) -> None:
        session = self._session
        if pressure is Backpressure.REFUSED:
            self._sessions.service.cancel(self)
            self.stream_failed(ApiError("overloaded", "cannot go on: too much waits already for this client"))
        elif pressure:
            session.pressed(pressure)

    def logprobs_arrived(self, text: str, positions: Sequence[TokenLogprobs]) -> None:
        self._note_first()
        protocol = self._session.protocol
        try:
            pieces = fm.scored(text, positions, self.vocabulary, protocol.scored_bytes)
        except ApiError as error:
            self._sessions.service.cancel(self)
            self.stream_failed(error)
            return
        pressure = max(protocol.send_scored(self.number, data) for data in pieces)
        self._session.touch()
        self._pressed(pressure)

    def note_arrived(self, note: str) -> None:
        self._session.tell(Note(stream=self.number, note=note))

    def stream_finished(self, reason: FinishReason) -> None:
        usage = Usage(
            self.prompt_tokens,
            sum(stream.output_tokens for stream in self.streams),
            sum(stream.cached_tokens for stream in self.streams),
        )
        retry_after_s = None
        if reason is FinishReason.QUOTA_EXCEEDED:
            retry_after_s = self._sessions.service.retry_after_s()
        end = fm.end(self.number, reason, usage, self._slo(), retry_after_s)
        self._session.stream_ended(self, self._session.protocol.end_stream(end))

    def stream_failed(self, error: ApiError) -> None:
        last = self._session.protocol.fail_stream(fm.error(error, self.number))
        self._session.stream_ended(self, last)

    def _slo(self) -> dict[str, float]:
        slo = {"total_ms": 1000 * (self._sessions.loop.time() - self.begun_s)}
        if self._first_s is not None:
            slo["first_token_ms"] = 1000 * (self._first_s - self.begun_s)
        return slo


def _infer(record: StreamRecord) -> Infer:
    """Return what asked for a stream."""
    infer = decode_payload(record.infer, 0, len(record.infer))
    assert isinstance(infer, Infer)
    return infer
