"""The kept streams of a worker: whose they are, who may go on with which, and how long each waits for its client."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Final

from seedance.daemon.doors.errors import ApiError
from seedance.daemon.fm_sessions import FmSessions, log_bytes
from seedance.daemon.kept_stream import KeptStream, RequestKey
from seedance.daemon.service import Service
from seedance.daemon.session_log import NEVER, Absent, Kept, SessionLog
from seedance.daemon.stream import Stream
from seedance.qos.quota import Quota

_log = logging.getLogger(__name__)

EVENTS: Final = "events"
MESSAGES: Final = "messages"
"""The doors, as their streams' tokens are made for: SSE, and JSON over a WebSocket. A token is good at one of them."""
LEAST_STREAM_BYTES: Final = 16 << 10
"""So much a stream may hold however many there are, unless `worker.max_backlog` is less."""
_RUNNING_PART: Final = 2
_LOOK_S: Final = 1.0


class KeptStreams:
    """All of one tenant's streams that outlive their connections.

    With FM sessions they share a bound of bytes, and the names by which streams can be ended. Those that run may have
    half of it, in equal parts of `stream_bytes`. When all is taken, streams go that are over and were sent whole, then
    what has been left for the longest.
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
        self._names = sessions
        self._bound_bytes = log_bytes(quota)
        self._log: SessionLog[KeptStream] = SessionLog(
            key, quota.session.resume_for_s, self._bound_bytes, os.urandom, sessions.held_bytes
        )
        sessions.share_bound(self.held_bytes)
        self._max_stream_bytes = max_stream_bytes
        self._running = 0
        self._by_key: dict[tuple[str, str], KeptStream] = {}
        self._read: dict[str, KeptStream] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self.stream_bytes = max_stream_bytes

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
        """Return a new stream, whose `answer` is the caller's to set."""
        self._running_changed(1)
        kept = self._log.add(door, lambda name, token: KeptStream(self, door, key))
        stream = kept.item
        stream.kept = kept
        self._names.stream_began(stream)
        if key is not None:
            self._by_key[door, key.key] = stream
        return stream

    def begun(self, door: str, key: RequestKey) -> KeptStream | None:
        """Return what a request with this key began, if it is kept. Raises ApiError when that was another request."""
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
        found = self._log.find(token, door, self._loop.time())
        if isinstance(found, Kept):
            return found.item
        if found.is_suspicious:
            _log.warning("audit: a client asks for a stream that is not its own")
            raise ApiError("not_found", "cannot find this stream; begin a new one")
        self._expire()
        message = "cannot go on with this stream: it is not kept any more; begin a new one"
        raise ApiError("gone", message, oldest_seq=found.oldest_seq)

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
            stream.is_over = True
            self.ended(stream)
        self.forget(stream)

    # -- what a stream needs: `kept_stream.Streams` -------------------------------------------------------------------

    def set_paused(self, streams: Sequence[Stream], is_paused: bool) -> None:
        self._service.engine.set_paused(streams, is_paused)

    def connected(self, stream: KeptStream) -> None:
        self._log.returned(stream.kept)
        self._read.pop(stream.id, None)

    def left(self, stream: KeptStream) -> None:
        self._log.left(stream.kept, self._loop.time())
        if stream.is_over and stream.is_sent:
            self._read[stream.id] = stream
        self._await_expiry()

    def ended(self, stream: KeptStream) -> None:
        self._running_changed(-1)
        self._names.stream_ended(stream.id)

    def forget(self, stream: KeptStream) -> None:
        self._log.remove(stream.kept)
        self._read.pop(stream.id, None)
        if stream.request_key is not None:
            self._by_key.pop((stream.door, stream.request_key.key), None)

    def _running_changed(self, by: int) -> None:
        self._running += by
        part_bytes = self._bound_bytes // _RUNNING_PART // max(self._running, 1)
        self.stream_bytes = min(self._max_stream_bytes, max(part_bytes, LEAST_STREAM_BYTES))

    # -- time ---------------------------------------------------------------------------------------------------------

    def quota_changed(self, quota: Quota) -> None:
        """Use another quota from now on, also for who is away."""
        self._log.resume_for_s = quota.session.resume_for_s
        self._await_expiry()

    def close(self) -> None:
        """Look at the time no more; what runs ends with the engine channel."""
        if self._expiry is not None:
            self._expiry.cancel()

    def _await_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        due_s = self._log.next_expiry()
        if due_s != NEVER:
            self._expiry = self._loop.call_at(min(due_s, self._loop.time() + _LOOK_S), self._expire)

    def _expire(self) -> None:
        excess_bytes = self._log.excess_bytes() if self._read else 0
        while excess_bytes > 0 and self._read:
            stream = next(iter(self._read.values()))
            excess_bytes -= stream.held_bytes
            self.forget(stream)
        for kept in self._log.expire(self._loop.time()):
            self.abandon(kept.item)
        self._await_expiry()
