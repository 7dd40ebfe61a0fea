"""The kept streams of a worker: whose they are, who may go on with which, and how long each waits for its client."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Final

from seedance.daemon import kept_answers
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.expiry import ExpiryTimer
from seedance.daemon.fm_sessions import LEAVING, LEAVING_MS, FmSessions, log_bytes
from seedance.daemon.journal_records import KeptRecord, SessionEnded
from seedance.daemon.kept_answers import Again
from seedance.daemon.kept_request import RequestKey
from seedance.daemon.kept_stream import KeptStream
from seedance.daemon.service import Service
from seedance.daemon.session_log import Absent, Kept, SessionLog
from seedance.daemon.stream import Stream
from seedance.qos.quota import Quota

_log = logging.getLogger(__name__)

EVENTS: Final = "events"
MESSAGES: Final = "messages"
"""The doors, as their streams' tokens are made for: SSE, and JSON over a WebSocket. A token is good at one of them."""
LEAST_STREAM_BYTES: Final = 16 << 10
"""So much a stream may hold however many there are, unless `worker.max_backlog` is less."""
_RUNNING_PART: Final = 2
_JOURNAL_PART: Final = 2
"""Streams that are over are written to the journal as long as no more than such a part of its room is taken."""


class KeptStreams:
    """All of one tenant's streams that outlive their connections.

    With FM sessions they share a bound of bytes, and the names by which streams can be ended. Those that run may have
    half of it, in equal parts of `stream_bytes`. When all is taken, streams go that are over and were sent whole, then
    what has been left for the longest. They share the journal, too: those of the worker before this one go on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        service: Service,
        key: bytes,
        quota: Quota,
        sessions: FmSessions,
        max_stream_bytes: int,
    ) -> None:
        """`key` is the tenant's own, for resume tokens."""
        self._loop = loop
        self._service = service
        self._sessions = sessions
        self.journal = sessions.journal
        self._bound_bytes = log_bytes(quota)
        self._log: SessionLog[KeptStream] = SessionLog(
            key, quota.session.resume_for_s, self._bound_bytes, os.urandom, sessions.held_bytes
        )
        sessions.share_bound(self.held_bytes)
        self._max_stream_bytes = max_stream_bytes
        self._running = 0
        self._by_key: dict[tuple[str, str], KeptStream] = {}
        self._read: dict[str, KeptStream] = {}
        self._expiry = ExpiryTimer(loop, self._log, self._expire)
        self.stream_bytes = max_stream_bytes
        self._restore(sessions.share_journal(self._saved, self.__len__))

    def __len__(self) -> int:
        return len(self._log)

    def held_bytes(self) -> int:
        """Return what all that is kept takes."""
        return self._log.held_bytes()

    @property
    def resume_for_ms(self) -> int:
        """How long a stream waits for its client."""
        return round(self._log.resume_for_s * 1000)

    # -- who may go on with what --------------------------------------------------------------------------------------

    def begin(self, door: str, key: RequestKey | None) -> KeptStream:
        """Return a new stream, to be `accepted` by the caller."""
        number = self._sessions.next_number()
        return self._took_in(self._log.add(door, lambda name, token: KeptStream(self, door, key, number)))

    def _took_in(self, kept: Kept[KeptStream]) -> KeptStream:
        stream = kept.item
        stream.kept = kept
        if not stream.is_over:
            self._running_changed(1)
            self._sessions.stream_began(stream)
        if stream.request_key is not None:
            self._by_key[stream.door, stream.request_key.key] = stream
        self._sessions.tell_count()
        return stream

    def begun(self, door: str, key: RequestKey) -> KeptStream | None:
        """Return what a request with this key began, if it is kept. Raises ApiError when that was another request."""
        self._require_staying()
        stream = self._by_key.get((door, key.key))
        if stream is None:
            return None
        if isinstance(self._log.find_by_name(stream.id, self._loop.time()), Absent):
            self._expire()
            return None
        if stream.request_key != key:
            message = "cannot use this idempotency key again: it came with another request"
            raise ApiError("invalid_request", message, param="idempotency_key", status=422)
        return stream

    def find(self, door: str, token: str) -> KeptStream:
        """Return the stream of a token. Raises ApiError."""
        self._require_staying()
        found = self._log.find(token, door, self._loop.time())
        if isinstance(found, Kept):
            return found.item
        if found.is_suspicious:
            _log.warning("audit: a client asks for a stream that is not its own")
            raise ApiError("not_found", "cannot find this stream; begin a new one")
        self._expire()
        message = "cannot go on with this stream: it is not kept any more; begin a new one"
        raise ApiError("gone", message, oldest_seq=found.oldest_seq)

    def _require_staying(self) -> None:
        if self._sessions.is_leaving:
            raise ApiError("overloaded", LEAVING, retry_after_s=LEAVING_MS / 1000)

    def release(self, id: str) -> bool:
        """Keep a stream no longer that is over and that nobody reads; tells whether there was one."""
        found = self._log.find_by_name(id, self._loop.time())
        if isinstance(found, Absent) or not found.item.is_over or found.left_at_s is None:
            return False
        self.forget(found.item)
        return True

    def abandon(self, stream: KeptStream) -> None:
        """End a stream whose client wants no more of it, and keep nothing."""
        if not stream.is_over:
            self._service.cancel(stream.answer)
            stream.abandoned()
        self.forget(stream)

    # -- what a stream needs: `kept_stream.Streams` -------------------------------------------------------------------

    def touched(self, stream: KeptStream) -> None:
        self._sessions.touched(stream)

    def flush(self) -> None:
        self._sessions.flush()

    def set_paused(self, streams: Sequence[Stream], is_paused: bool) -> None:
        self._service.engine.set_paused(streams, is_paused)

    def connected(self, stream: KeptStream) -> None:
        self._log.returned(stream.kept)
        self._read.pop(stream.id, None)

    def left(self, stream: KeptStream) -> None:
        self._log.left(stream.kept, self._loop.time())
        if stream.is_over and stream.is_sent:
            self._read[stream.id] = stream
        self._expiry.set()

    def ended(self, stream: KeptStream) -> None:
        self._running_changed(-1)
        self._sessions.stream_ended(stream.id)

    def forget(self, stream: KeptStream) -> None:
        self._log.remove(stream.kept)
        self._read.pop(stream.id, None)
        if stream.request_key is not None:
            self._by_key.pop((stream.door, stream.request_key.key), None)
        self.journal.note(SessionEnded(stream.number))
        self._sessions.tell_count()
        stream.touch()

    def _running_changed(self, by: int) -> None:
        self._running += by
        part_bytes = self._bound_bytes // _RUNNING_PART // max(self._running, 1)
        self.stream_bytes = min(self._max_stream_bytes, max(part_bytes, LEAST_STREAM_BYTES))

    # -- the journal --------------------------------------------------------------------------------------------------

    def _saved(self, used_bytes: int) -> Iterator[bytes]:
        """Yield what the journal needs: of what runs in any case, of the rest the newest, as far as there is room."""
        over = []
        for stream in self._log.items():
            if stream.is_over:
                over.append(stream)
            else:
                saved = stream.saved()
                used_bytes += len(saved)
                yield saved
        for stream in reversed(over):
            used_bytes += stream.held_bytes
            if used_bytes > self.journal.room_bytes // _JOURNAL_PART:
                break
            yield stream.saved()

    def _restore(self, records: Sequence[KeptRecord]) -> None:
        for record in records:
            if record.is_begun or record.key is not None:
                self._restore_one(record)
            else:  # its client knows nothing to come back with
                self.journal.note(SessionEnded(record.session))
        if records:
            _log.info("%d kept streams go on from the journal of the last worker", len(self))
        self._sessions.tell_count()

    def _restore_one(self, record: KeptRecord) -> None:
        key = None if record.key is None else RequestKey(record.key, record.fingerprint)

        def make(name: str, token: str) -> KeptStream:
            stream = KeptStream(self, record.door, key, record.session)
            stream.restore(record)
            return stream

        stream = self._took_in(self._log.restore(record.name, record.door, make))
        self.left(stream)
        if stream.is_over:
            return
        try:
            again = kept_answers.again(self._service, stream, record)
        except ApiError as error:
            _log.error("cannot go on with a stream of the last worker: %s", error)
            stream.fail(error)
            return
        self._service.expect(functools.partial(self._resume, stream, again, record), again.places)

    def _resume(self, stream: KeptStream, again: Again, record: KeptRecord) -> None:
        """Go on with a stream that another worker had, now that there is an engine.

        All that came of it is in its records already.
        """
        if again.answer.cancelled:
            self._service.release(again.places)
        elif not record.streams:
            again.begin()
        else:
            try:
                self._service.resume(again.request, again.answer, record.streams)
            except ApiError as error:
                again.answer.sink(0).stream_failed(error)

    def tell_all(self, note: str, retry_after_ms: int) -> None:
        """Tell all who read a stream."""
        for stream in self._log.items():
            stream.tell(note, retry_after_ms)

    def park(self) -> None:
        """Send the clients away, to come back to the next worker."""
        self._sessions.flush()
        for stream in self._log.items():
            stream.park()

    # -- time ---------------------------------------------------------------------------------------------------------

    def quota_changed(self, quota: Quota) -> None:
        """Use another quota from now on, also for who is away."""
        self._log.resume_for_s = quota.session.resume_for_s
        self._expiry.set()

    def close(self) -> None:
        """Look at the time no more; what is in the journal stays there."""
        self._expiry.close()

    def _expire(self) -> None:
        excess_bytes = self._log.excess_bytes() if self._read else 0
        while excess_bytes > 0 and self._read:
            stream = next(iter(self._read.values()))
            excess_bytes -= stream.held_bytes
            self.forget(stream)
        for kept in self._log.expire(self._loop.time()):
            self.abandon(kept.item)
        self._expiry.set()
