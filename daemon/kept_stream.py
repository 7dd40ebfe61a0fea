"""A stream of SSE or JSON that outlives its connections, and its worker.

Its answer writes records, and does not know who reads them. The records are kept (`History`), and whoever is connected
reads them from there: a reader is a place in the history, and what it has no room for simply waits behind that place.
So a slow client and one that is away are the same: as too much waits, the engine is told to leave the stream out.

    begin ──► append … append ──► finish        the answer's side; `fail` in place of begin
    connect ──► send …  ──► disconnected        the client's side, any number of times, at any time

What there is for the reader leaves at the next turn of the loop, once the journal has it (`FmSessions.flush`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from seedance.daemon.doors.errors import ApiError
from seedance.daemon.history import RECORD_COST_BYTES, History, size_bytes
from seedance.daemon.journal import Journal, fill
from seedance.daemon.journal_records import ChoiceEnded, KeptOver, KeptRecord, StreamRecord, encode
from seedance.daemon.kept_request import KeptRequest, RequestKey
from seedance.daemon.service import Answer
from seedance.daemon.session_log import Kept
from seedance.daemon.stream import Stream

STREAM_COST_BYTES: Final = 4 << 10
"""What a stream costs beside its records, roughly: it bounds how many there are."""
PAUSE_PART: Final = 4
"""When such a part of a stream's bound waits for its client, the engine leaves it out; until half of that has gone."""
_WRITE_BYTES: Final = 16 << 10

TOO_MUCH: Final = ApiError("overloaded", "cannot go on: too much waits already for this client")


class Reader(Protocol):
    """A client's connection, as a stream sees it."""

    def begin(self) -> None:
        """The stream runs: records will come, if not at once."""

    def take(self, first_seq: int, records: Sequence[bytes]) -> int:
        """Send records that follow each other; returns how many bytes wait because the client reads slowly."""

    def tell(self, note: str, retry_after_ms: int) -> None:
        """Send what is no part of the stream: nobody else will be told."""

    def all_taken(self) -> None:
        """The last record has been sent: the last call."""

    def taken_over(self) -> None:
        """Another reader has come in this one's place: the last call."""

    def sent_away(self) -> None:
        """The service is going away, and the stream is not over: the last call."""

    def fail(self, error: ApiError) -> None:
        """There will be no stream: the last call."""


class Streams(Protocol):
    """What a stream needs of all of its tenant's; each may hold `stream_bytes` now."""

    stream_bytes: int
    journal: Journal

    def touched(self, stream: KeptStream) -> None:
        """Have what there is to send sent at the next turn of the loop."""

    def flush(self) -> None:
        """Send what all that were touched have to send now."""

    def set_paused(self, streams: Sequence[Stream], is_paused: bool) -> None:
        """Have the engine leave them out of its steps, or take them in again."""

    def connected(self, stream: KeptStream) -> None:
        """A client is there."""

    def left(self, stream: KeptStream) -> None:
        """No client is there any more."""

    def ended(self, stream: KeptStream) -> None:
        """There is no more to come."""

    def forget(self, stream: KeptStream) -> None:
        """Keep a stream no longer."""

    def abandon(self, stream: KeptStream) -> None:
        """End a stream, and keep nothing."""


class KeptStream:
    """One stream: `answer` makes its records, `kept` is its entry in the log.

    `number` is its own in the journal, `door` what its token is good for, `request_key` its client's own name for the
    request. `is_begun` says that the request is being served, `is_over` that the last record is there, `generations`
    how many the journal has of it.
    """

    __slots__ = (
        "_ended_tokens",
        "_is_behind",
        "_is_paused",
        "_is_reading",
        "_is_touched",
        "_reader",
        "_request",
        "_restored",
        "_sent_seq",
        "_streams",
        "_unsent_bytes",
        "answer",
        "door",
        "generations",
        "history",
        "is_begun",
        "is_over",
        "kept",
        "number",
        "request_key",
    )

    answer: Answer
    kept: Kept[KeptStream]

    def __init__(self, streams: Streams, door: str, request_key: RequestKey | None = None, number: int = 0) -> None:
        self._streams = streams
        self.door = door
        self.number = number
        self.generations = 0
        self._request: KeptRequest | None = None
        self._restored: list[StreamRecord] = []
        self._ended_tokens: dict[int, int] = {}
        self._is_touched = False
        self._reader: Reader | None = None
        self._is_reading = False
        self._sent_seq = 0
        self._unsent_bytes = 0
        self._is_behind = False
        self._is_paused = False
        self.request_key = request_key
        self.history = History(streams.stream_bytes)
        self.is_begun = False
        self.is_over = False

    @property
    def id(self) -> str:
        """The name of the stream for all of the tenant's clients."""
        return self.kept.name

    @property
    def held_bytes(self) -> int:
        """See `session_log.Resumable`."""
        request_bytes = 0 if self._request is None else len(self._request.body)
        return STREAM_COST_BYTES + request_bytes + self.history.held_bytes

    @property
    def oldest_seq(self) -> int:
        """See `session_log.Resumable`."""
        return self.history.oldest_seq

    # -- the answer's side --------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether no more text may be appended, as the engine went on in spite of being told to pause."""
        return self._unsent_bytes > self.history.bound_bytes

    @property
    def is_sent(self) -> bool:
        """Whether some client was sent all that there is."""
        return self._sent_seq == self.history.next_seq - 1

    def accepted(self, answer: Answer, request: KeptRequest) -> None:
        """Learn who makes the records, and of what: before anything else."""
        self.answer = answer
        if self._streams.journal.is_kept:
            self._request = request
            self._streams.journal.note(self._record())
            self.touch()

    def submitted(self) -> None:
        """Take note that the engine was given what the answer's streams are."""
        self._restored = []
        self.generations = 0
        for index, stream in enumerate(self.answer.streams):
            if index not in self._ended_tokens:
                self._streams.journal.submitted(self.number, index, stream, self.answer.model)
                self.generations += 1
        if self._unsent_bytes > self._pause_bytes:
            self._set_paused(True)
        self.touch()

    def begin(self) -> None:
        """Tell the client that its request is being served."""
        self.is_begun = True
        self.touch()

    def append(self, record: bytes) -> None:
        """Take the next record."""
        history = self.history
        history.bound_bytes = self._streams.stream_bytes
        seq = history.append(record, self._sent_seq + 1)
        self._streams.journal.kept(self.number, history.oldest_seq, self._sent_seq, seq, record)
        if self._reader is None or self._is_behind:
            self._unsent_bytes += len(record) + RECORD_COST_BYTES
            if self._unsent_bytes > self._pause_bytes:
                self._set_paused(True)
        self.touch()

    def choice_ended(self, index: int) -> None:
        """Take note that one of several streams of the answer has ended."""
        if not self.generations:
            return  # the engine was not given it yet
        stream = self.answer.streams[index]
        self._ended_tokens[index] = stream.output_tokens
        self.generations -= 1
        self._streams.journal.left(1)
        self._streams.journal.note(ChoiceEnded(self.number, index, stream.output_tokens))

    def finish(self) -> None:
        """Take note that there are no more records."""
        self._over()
        self._streams.journal.note(KeptOver(self.number))
        self.touch()

    def fail(self, error: ApiError) -> None:
        """Take note that the request is not served; nothing of it is kept."""
        self._over()
        self._streams.forget(self)
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.fail(error)

    # -- the client's side --------------------------------------------------------------------------------------------

    def connect(self, reader: Reader, last_seq: int) -> None:
        """Go on after `last_seq` with a reader; another one that seems to be there still is sent away.

        Raises ApiError when this cannot be, and leaves all as it is.
        """
        if self.history.after(last_seq) is None:
            raise self._not_kept(last_seq)
        older, self._reader = self._reader, reader
        if older is not None:
            older.taken_over()
        self._sent_seq = last_seq
        self._is_behind = self._is_reading = False
        self._streams.connected(self)
        self.touch()

    def disconnected(self, reader: Reader) -> None:
        """Take note that the reader is of no use any more: the stream waits for its client.

        One that has not begun, and whose request had no key, ends: its client knows nothing to come back with.
        """
        if self._reader is reader:
            self._reader = None
            self._unsent_bytes = size_bytes(self._unsent())
            if self.is_begun or self.request_key is not None:
                self._streams.left(self)
            else:
                self._streams.abandon(self)

    def drained(self) -> None:
        """Send what the reader has room for, now that it takes something again."""
        self._is_behind = False
        self.touch()
        self._streams.flush()

    def tell(self, note: str, retry_after_ms: int) -> None:
        """Tell the reader, if there is one that its stream has begun for."""
        if self._reader is not None and self._is_reading:
            self._reader.tell(note, retry_after_ms)

    def park(self) -> None:
        """Send the reader away, to come back to the next worker."""
        reader = self._reader
        if reader is not None:
            self.disconnected(reader)
            reader.sent_away()

    # -- what there is to send: `fm_sessions.Sender` ------------------------------------------------------------------

    def touch(self) -> None:
        """Have what there is to send sent soon."""
        if not self._is_touched:
            self._is_touched = True
            self._streams.touched(self)

    def prepare(self) -> list[bytes]:
        """Return nothing: the journal was told of all by and by."""
        self._is_touched = False
        return []

    def send(self, messages: Sequence[bytes] = ()) -> None:
        """Send what the reader has room for."""
        if self._reader is None or self._is_behind:
            return
        if self.is_begun and not self._is_reading:
            self._is_reading = True
            self._reader.begin()
        unsent = self._unsent()
        self._unsent_bytes = size_bytes(unsent)
        at = 0
        while (reader := self._reader) is not None and at < len(unsent) and not self._is_behind:
            records = _first(unsent, at)
            at += len(records)
            self._sent_seq += len(records)
            self._unsent_bytes -= size_bytes(records)
            self._is_behind = reader.take(self._sent_seq - len(records) + 1, records) > 0
        if self._unsent_bytes > self._pause_bytes:
            self._set_paused(True)
        elif self._reader is not None and self._unsent_bytes <= self._pause_bytes // 2:
            self._set_paused(False)
        self._complete()

    # -- the journal --------------------------------------------------------------------------------------------------

    def saved(self) -> bytes:
        """Return all that the journal needs of it; `fold` comes before. Nothing before it was accepted."""
        return b"" if self._request is None and not self.is_over else encode(self._record())

    def restore(self, record: KeptRecord) -> None:
        """Be what the journal has; `accepted_before` is to follow if it is not over."""
        self.is_begun, self.is_over = record.is_begun, record.is_over
        self.history.restore(record.first_seq, record.records)
        self._sent_seq = max(record.sent_seq, self.history.oldest_seq - 1)
        self._unsent_bytes = size_bytes(self._unsent())
        self._restored = record.streams
        self._ended_tokens = {
            stream.number: stream.ended_tokens for stream in record.streams if stream.ended_tokens is not None
        }

    def accepted_before(self, answer: Answer, request: KeptRequest) -> None:
        """Learn who makes the records, and of what; the journal knows it."""
        self.answer, self._request = answer, request

    def _record(self) -> KeptRecord:
        request = self._request or KeptRequest("", b"")
        key = self.request_key
        return KeptRecord(
            self.number,
            self.kept.name,
            self.door,
            request.kind,
            request.body,
            None if key is None else key.key,
            b"" if key is None else key.fingerprint,
            request.answer_id,
            request.created,
            self.is_begun,
            self.is_over,
            self.history.oldest_seq,
            self._sent_seq,
            self.history.after(self.history.oldest_seq - 1) or [],
            self._restored or self._generations(),
        )

    def _generations(self) -> list[StreamRecord]:
        if not self.generations:
            return []
        records = [
            StreamRecord(index, ended_tokens=self._ended_tokens.get(index)) for index in range(len(self.answer.streams))
        ]
        for record, stream in zip(records, self.answer.streams, strict=True):
            fill(record, stream, self.answer.model)
            if record.ended_tokens is not None:
                record.engine = None
        return records

    # -- both sides ---------------------------------------------------------------------------------------------------

    def cancelled_by_client(self) -> None:
        """End with what there is, on the wish of any of the tenant's clients."""
        if not self.is_over:
            self.answer.cancelled_by_client()

    def abandoned(self) -> None:
        """End, as nobody wants any more of it."""
        self._over()

    @property
    def _pause_bytes(self) -> int:
        return self.history.bound_bytes // PAUSE_PART

    def _unsent(self) -> list[bytes]:
        unsent = self.history.after(self._sent_seq)
        assert unsent is not None
        return unsent

    def _over(self) -> None:
        self.is_over = True
        self._request = None
        self._restored = []
        self._streams.journal.left(self.generations)
        self.generations = 0
        self._streams.ended(self)

    def _complete(self) -> None:
        reader = self._reader
        if reader is not None and self.is_over and self.is_sent:
            self.disconnected(reader)
            reader.all_taken()

    def _set_paused(self, is_paused: bool) -> None:
        if self._is_paused != is_paused:
            self._is_paused = is_paused
            self._streams.set_paused(self.answer.streams, is_paused)

    def _not_kept(self, last_seq: int) -> ApiError:
        newest_seq, oldest_seq = self.history.next_seq - 1, self.history.oldest_seq
        if last_seq > newest_seq:
            return ApiError("invalid_request", f"cannot go on after {last_seq}: the newest is {newest_seq}")
        message = f"cannot go on after {last_seq}: the oldest that is kept is {oldest_seq}"
        return ApiError("gone", message, oldest_seq=oldest_seq)


def _first(records: Sequence[bytes], at: int) -> Sequence[bytes]:
    """Return as many records from `at` on as are sent in one piece, one at least."""
    end, size_bytes = at, 0
    while end < len(records) and size_bytes < _WRITE_BYTES:
        size_bytes += len(records[end])
        end += 1
    return records[at:end]
