"""The FM sessions of a worker: who may go on with which, and for how long a session waits for its client."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from seedance.daemon.doors import fm
from seedance.daemon.fm_streams import FmSession
from seedance.daemon.protocol.fm_messages import Error, Hello, Note
from seedance.daemon.protocol.fm_session import Options
from seedance.daemon.protocol.fm_timing import NEVER
from seedance.daemon.service import Service
from seedance.daemon.session_log import REMEMBERED, Absent, Kept, SessionLog
from seedance.qos.quota import Quota

_log = logging.getLogger(__name__)

DEFAULT_LOG_BYTES: Final = 64 << 20
"""So much all sessions and kept streams of a tenant may hold, or a quarter of its `memory.max` if that is less."""
_MEMORY_PART: Final = 4
_LOOK_S: Final = 1.0
"""So often the bytes of what is kept are counted while a client is away."""


class Named(Protocol):
    """A stream that any client of its tenant may end by its name, `id`."""

    @property
    def id(self) -> str:
        """The name."""

    def cancelled_by_client(self) -> None:
        """End with what there is."""


class FmSessions:
    """All sessions of one tenant, and the names of the streams in them; those of kept streams are here, too."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, service: Service, key: bytes, quota: Quota, options: Options
    ) -> None:
        """`key` is the tenant's own, for resume tokens; `options` are each session's."""
        self.loop = loop
        self.service = service
        self.options = options
        self._streams: dict[str, Named] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._log: SessionLog[FmSession] = SessionLog(key, quota.session.resume_for_s, log_bytes(quota), os.urandom)
        self._expiry: asyncio.TimerHandle | None = None
        self._touched: list[FmSession] = []

    def __len__(self) -> int:
        return len(self._log)

    def held_bytes(self) -> int:
        """Return what all sessions take."""
        return self._log.held_bytes()

    def share_bound(self, beside_bytes: Callable[[], int]) -> None:
        """Count what this returns against the bound of all sessions, too."""
        self._log.beside_bytes = beside_bytes

    @property
    def resume_for_ms(self) -> int:
        """How long a session waits for its client."""
        return round(self._log.resume_for_s * 1000)

    def find(self, hello: Hello) -> FmSession | Error:
        """Return the session that a client asks for, a new one without a token; or what it is told in its place."""
        if hello.resume_token is None:
            kept = self._log.add(hello.client_id, lambda name, token: FmSession(self, name, token))
            kept.item.kept = kept
            return kept.item
        found = self._log.find(hello.resume_token, hello.client_id, self.loop.time())
        if isinstance(found, Absent):
            if found.is_suspicious:
                _log.warning("audit: client '%s' asks for a session that is not its own", hello.client_id)
            self._expire()
            return fm.absent(found)
        self._log.returned(found)
        return found.item

    def left(self, kept: Kept[FmSession]) -> None:
        """Take note that a session's client is away."""
        self._log.left(kept, self.loop.time())
        self._await_expiry()

    def remove(self, kept: Kept[FmSession]) -> None:
        """Keep a session no longer."""
        self._log.remove(kept)

    def stream_began(self, stream: Named) -> None:
        """Take note that there is a stream of this name."""
        self._streams[stream.id] = stream

    def stream_ended(self, id: str) -> None:
        """Take note that a stream is over; who cancels it now is only late."""
        del self._streams[id]
        self._ended[id] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def cancel(self, id: str) -> bool:
        """End a stream of any session, or a kept one; tells whether there is one, or was."""
        stream = self._streams.get(id)
        if stream is not None:
            stream.cancelled_by_client()
        elif id not in self._ended:
            _log.warning("audit: a client would cancel a stream that is not its tenant's")
            return False
        return True

    def touched(self, session: FmSession) -> None:
        """Have a session's frames sent at the next turn of the loop."""
        if not self._touched:
            self.loop.call_soon(self._flush)
        self._touched.append(session)

    def quota_changed(self, quota: Quota) -> None:
        """Use another quota from now on, also for who is away."""
        self._log.resume_for_s = quota.session.resume_for_s
        self._await_expiry()

    def tell_all(self, note: str) -> None:
        """Send every client a note."""
        for session in self._log.items():
            session.tell(Note(stream=0, note=note))

    def close(self) -> None:
        """End everything."""
        for session in self._log.items():
            session.end()
        if self._expiry is not None:
            self._expiry.cancel()

    def _flush(self) -> None:
        touched, self._touched = self._touched, []
        for session in touched:
            session.flush()

    def _await_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        due_s = self._log.next_expiry()
        if due_s != NEVER:
            self._expiry = self.loop.call_at(min(due_s, self.loop.time() + _LOOK_S), self._expire)

    def _expire(self) -> None:
        for kept in self._log.expire(self.loop.time()):
            kept.item.end()
        self._await_expiry()


def log_bytes(quota: Quota) -> int:
    """Return how much may be kept for all of a tenant's clients."""
    most_bytes = quota.memory.max_bytes
    return DEFAULT_LOG_BYTES if most_bytes is None else min(DEFAULT_LOG_BYTES, most_bytes // _MEMORY_PART)
