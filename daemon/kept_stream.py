"""A stream of SSE or JSON that outlives its connections.

Its answer writes records, and does not know who reads them. The records are kept (`History`), and whoever is connected
reads them from there: a reader is a place in the history, and what it has no room for simply waits behind that place.
So a slow client and one that is away are the same: as too much waits, the engine is told to leave the stream out.

    begin ──► append … append ──► finish        the answer's side; `fail` in place of begin
    connect ──► pump …  ──► disconnected        the client's side, any number of times, at any time

What a restart would need of it is `kept` (name and token), the history, `is_begun` and `is_over`; the rest is of this
process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from seedance.daemon.doors.errors import ApiError, invalid
from seedance.daemon.history import RECORD_COST_BYTES, History
from seedance.daemon.service import Answer
from seedance.daemon.session_log import Kept
from seedance.daemon.stream import Stream

STREAM_COST_BYTES: Final = 4 << 10
"""What a stream costs beside its records, roughly: it bounds how many there are."""
PAUSE_PART: Final = 4
"""When such a part of a stream's bound waits for its client, the engine leaves it out; until half of that has gone."""
MAX_KEY_CHARACTERS: Final = 255
_WRITE_BYTES: Final = 16 << 10

TOO_MUCH: Final = ApiError("overloaded", "cannot go on: too much waits already for this client")


class RequestKey(msgspec.Struct, frozen=True):
    """A client's own name for a request: whoever sends the request again under it goes on with what it began."""

    key: str
    fingerprint: bytes

    @classmethod
    def of(cls, key: str, request: bytes) -> RequestKey:
        """Return the key of a request. Raises ApiError."""
        if not 0 < len(key) <= MAX_KEY_CHARACTERS:
            message = f"cannot use an idempotency key of {len(key)} characters: it must have 1 to {MAX_KEY_CHARACTERS}"
            raise invalid(message, "idempotency_key")
        return cls(key, hashlib.sha256(request).digest())


class Reader(Protocol):
    """A client's connection, as a stream sees it."""

    def begin(self) -> None:
        """The stream runs: records will come, if not at once."""

    def take(self, first_seq: int, records: Sequence[bytes]) -> int:
        """Send records that follow each other; returns how many bytes wait because the client reads slowly."""

    def all_taken(self) -> None:
        """The last record has been sent: the last call."""

    def taken_over(self) -> None:
        """Another reader has come in this one's place: the last call."""

    def fail(self, error: ApiError) -> None:
        """There will be no stream: the last call."""


class Streams(Protocol):
    """What a stream needs of all of its tenant's; each may hold `stream_bytes` now."""

    stream_bytes: int

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
    """One stream: `answer` makes its records, `kept` is its entry in the log; both are set by whoever makes it.

    `door` is what its token is good for, `request_key` its client's own name for the request. `is_begun` says that the
    request is being served, `is_over` that the last record is there.
    """

    __slots__ = (
        "_is_behind",
        "_is_paused",
        "_reader",
        "_sent_seq",
        "_streams",
        "_unsent_bytes",
        "answer",
        "door",
        "history",
        "is_begun",
        "is_over",
        "kept",
        "request_key",
    )

    answer: Answer
    kept: Kept[KeptStream]

    def __init__(self, streams: Streams, door: str, request_key: RequestKey | None = None) -> None:
        self._streams = streams
        self.door = door
        self._reader: Reader | None = None
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
        return STREAM_COST_BYTES + self.history.held_bytes

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

    def begin(self) -> None:
        """Tell the client that its request is being served."""
        self.is_begun = True
        if self._reader is not None:
            self._reader.begin()

    def append(self, record: bytes) -> None:
        """Take the next record."""
        history = self.history
        history.bound_bytes = self._streams.stream_bytes
        seq = history.append(record, self._sent_seq + 1)
        if self._reader is not None and not self._is_behind:
            self._sent_seq = seq
            self._is_behind = self._reader.take(seq, (record,)) > 0
            return
        self._unsent_bytes += len(record) + RECORD_COST_BYTES
        if self._unsent_bytes > history.bound_bytes // PAUSE_PART:
            self._set_paused(True)

    def finish(self) -> None:
        """Take note that there are no more records."""
        self.is_over = True
        self._streams.ended(self)
        self._complete()

    def fail(self, error: ApiError) -> None:
        """Take note that the request is not served; nothing of it is kept."""
        self.is_over = True
        self._streams.ended(self)
        self._streams.forget(self)
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.fail(error)

    # -- the client's side --------------------------------------------------------------------------------------------

    def connect(self, reader: Reader, last_seq: int) -> None:
        """Go on after `last_seq` with a reader; another one that seems to be there still is sent away.

        Raises ApiError when this cannot be, and leaves all as it is.
        """
        missed = self.history.after(last_seq)
        if missed is None:
            raise self._not_kept(last_seq)
        older, self._reader = self._reader, reader
        if older is not None:
            older.taken_over()
        self._sent_seq = last_seq
        self._unsent_bytes = _size_bytes(missed)
        self._streams.connected(self)
        if self.is_begun:
            reader.begin()
        self.pump()

    def disconnected(self, reader: Reader) -> None:
        """Take note that the reader is of no use any more: the stream waits for its client.

        One that has not begun, and whose request had no key, ends: its client knows nothing to come back with.
        """
        if self._reader is reader:
            self._reader = None
            if self.is_begun or self.request_key is not None:
                self._streams.left(self)
            else:
                self._streams.abandon(self)

    def pump(self) -> None:
        """Send what the reader has room for, now that it takes something again."""
        self._is_behind = False
        unsent = self.history.after(self._sent_seq)
        assert unsent is not None
        at = 0
        while (reader := self._reader) is not None and at < len(unsent) and not self._is_behind:
            records = _first(unsent, at)
            at += len(records)
            self._sent_seq += len(records)
            self._unsent_bytes -= _size_bytes(records)
            self._is_behind = reader.take(self._sent_seq - len(records) + 1, records) > 0
        if self._reader is not None and self._unsent_bytes <= self.history.bound_bytes // PAUSE_PART // 2:
            self._set_paused(False)
        self._complete()

    def cancelled_by_client(self) -> None:
        """End with what there is, on the wish of any of the tenant's clients."""
        if not self.is_over:
            self.answer.cancelled_by_client()

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


def _size_bytes(records: Sequence[bytes]) -> int:
    return sum(map(len, records)) + RECORD_COST_BYTES * len(records)


def _first(records: Sequence[bytes], at: int) -> Sequence[bytes]:
    """Return as many records from `at` on as are sent in one piece, one at least."""
    end, size_bytes = at, 0
    while end < len(records) and size_bytes < _WRITE_BYTES:
        size_bytes += len(records[end])
        end += 1
    return records[at:end]
