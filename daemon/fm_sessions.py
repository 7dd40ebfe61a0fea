"""The FM sessions of a worker: who may go on with which, and for how long a session waits for its client."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from seedance.daemon.doors import fm
from seedance.daemon.expiry import ExpiryTimer
from seedance.daemon.fm_streams import FmSession
from seedance.daemon.journal import Journal
from seedance.daemon.journal_records import KeptRecord, SessionRecord, encode
from seedance.daemon.protocol.fm_messages import Error, Hello, Note
from seedance.daemon.protocol.fm_session import Options
from seedance.daemon.service import Service
from seedance.daemon.session_log import REMEMBERED, Absent, Kept, SessionLog
from seedance.qos.quota import Quota

_log = logging.getLogger(__name__)

DEFAULT_LOG_BYTES: Final = 64 << 20
"""So much all sessions and kept streams of a tenant may hold, or a quarter of its `memory.max` if that is less."""
_MEMORY_PART: Final = 4
LEAVING: Final = "cannot take this session now: the worker is being followed by another one; come back"
LEAVING_MS: Final = 100


class Named(Protocol):
    """A stream that any client of its tenant may end by its name, `id`."""

    @property
    def id(self) -> str:
        """The name."""

    def cancelled_by_client(self) -> None:
        """End with what there is."""


class Sender(Protocol):
    """What sends after the journal was committed."""

    def prepare(self) -> list[bytes]:
        """Put into the journal what it needs of what there is to send, and return that: `send` is to follow."""

    def send(self, messages: Sequence[bytes]) -> None:
        """Send what `prepare` returned."""


class FmSessions:
    """All sessions of one tenant, and the names of the streams in them; those of kept streams are here, too.

    The journal is theirs together: `touched` and `flush` are when it is committed, `share_journal` what is in it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        service: Service,
        key: bytes,
        quota: Quota,
        options: Options,
        journal: Journal | None = None,
    ) -> None:
        """`key` is the tenant's own, for resume tokens; `options` are each session's.

        The sessions that are in the journal, of the worker before this one, wait for their clients.
        """
        self.loop = loop
        self.service = service
        self.options = options
        self._streams: dict[str, Named] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._log: SessionLog[FmSession] = SessionLog(key, quota.session.resume_for_s, log_bytes(quota), os.urandom)
        self._expiry = ExpiryTimer(loop, self._log, self._expire)
        self._touched: list[Sender] = []
        self._number = 0
        self._kept: list[KeptRecord] = []
        self._kept_saved: Callable[[int], Iterable[bytes]] = lambda used_bytes: map(encode, self._kept)
        self._kept_count: Callable[[], int] = lambda: len(self._kept)
        self.is_leaving = False
        self._is_awaited = False
        self.journal = journal or Journal()
        self._columns = service.engine.fm_columns
        self._columns.stepped, self._columns.journal = self._await_flush, self.journal.step
        saved = self.journal.read()
        self._number = max((record.session for record in saved), default=0)
        self._kept = [record for record in saved if isinstance(record, KeptRecord)]
        self._restore([record for record in saved if isinstance(record, SessionRecord)])
        self.journal.begin(self._everything)

    def __len__(self) -> int:
        return len(self._log)

    def held_bytes(self) -> int:
        """Return what all sessions take."""
        return self._log.held_bytes()

    def share_bound(self, beside_bytes: Callable[[], int]) -> None:
        """Count what this returns against the bound of all sessions, too."""
        self._log.beside_bytes = beside_bytes

    def share_journal(self, saved: Callable[[int], Iterable[bytes]], count: Callable[[], int]) -> list[KeptRecord]:
        """Have kept streams in the journal; returns those that the last worker has left.

        `saved` returns the records of all that there are, told how many bytes those of the sessions take; `count` how
        many there are.
        """
        self._kept_saved, self._kept_count = saved, count
        records, self._kept = self._kept, []
        return records

    def next_number(self) -> int:
        """Return a number of its own in the journal for a session or a kept stream."""
        self._number += 1
        return self._number

    @property
    def resume_for_ms(self) -> int:
        """How long a session waits for its client."""
        return round(self._log.resume_for_s * 1000)

    def find(self, hello: Hello) -> FmSession | Error:
        """Return the session that a client asks for, a new one without a token; or what it is told in its place."""
        if self.is_leaving:
            return Error(stream=0, code="overloaded", message=LEAVING, retry_after_ms=LEAVING_MS)
        if hello.resume_token is None:
            number = self.next_number()
            kept = self._log.add(hello.client_id, lambda *names: FmSession(self, number, hello.client_id, *names))
            kept.item.kept = kept
            self.tell_count()
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
        self._expiry.set()

    def remove(self, kept: Kept[FmSession]) -> None:
        """Keep a session no longer."""
        self._log.remove(kept)
        self.tell_count()

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

    def touched(self, sender: Sender) -> None:
        """Have what a session or a kept stream has to send sent at the next turn of the loop."""
        self._touched.append(sender)
        self._await_flush()

    def _await_flush(self) -> None:
        if not self._is_awaited:
            self._is_awaited = True
            self.loop.call_soon(self.flush)

    def quota_changed(self, quota: Quota) -> None:
        """Use another quota from now on, also for who is away."""
        self._log.resume_for_s = quota.session.resume_for_s
        self.journal.set_bound(log_bytes(quota))
        self._expiry.set()

    def tell_all(self, note: str, retry_after_ms: int) -> None:
        """Send every client a note."""
        for session in self._log.items():
            session.tell(Note(stream=0, note=note, retry_after_ms=retry_after_ms))

    def leave(self) -> None:
        """Take no client any more: the next worker is theirs, and the journal, too."""
        self.is_leaving = True
        self.flush()
        self.journal.close()

    def park(self) -> None:
        """Send the clients away; they come back to the next worker, which goes on with their streams."""
        self.is_leaving = True
        for session in self._log.items():
            session.park()

    def close(self) -> None:
        """Do nothing any more; what is in the journal stays there."""
        self.leave()
        for session in self._log.items():
            session.close()
        self._expiry.close()

    def _restore(self, saved: Sequence[SessionRecord]) -> None:
        for record in saved:
            kept = self._log.restore(
                record.name,
                record.client_id,
                lambda name, token, record=record: FmSession(  # type: ignore[misc]
                    self, record.session, record.client_id, name, token, record
                ),
            )
            kept.item.kept = kept
            kept.item.restore(record)
            self.left(kept)
        if saved:
            streams = sum(len(record.streams) for record in saved)
            _log.info("%d sessions with %d streams go on from the journal of the last worker", len(saved), streams)
        self.tell_count()

    def _everything(self) -> Iterator[bytes]:
        """Yield what the journal needs of all that is there now."""
        self.service.engine.fold()
        used_bytes = 0
        for session in self._log.items():
            saved = session.saved()
            used_bytes += len(saved)
            yield saved
        yield from self._kept_saved(used_bytes)

    def tell_count(self) -> None:
        """Leave the number of what waits for its client to come back for the supervisor."""
        self.journal.set_count(len(self._log) + self._kept_count())

    def flush(self) -> None:
        """Send what all that were touched have to send, once the journal has it.

        What a step of the engine brought is so in one entry with all that came of it; within a step this is put off.
        """
        if self.journal.is_in_step:
            return
        self._is_awaited = False
        touched, self._touched = self._touched, []
        prepared = [(sender, sender.prepare()) for sender in touched]
        self._columns.prepare()
        self.journal.commit()
        self._columns.flush()
        for sender, messages in prepared:
            sender.send(messages)

    def _expire(self) -> None:
        for kept in self._log.expire(self.loop.time()):
            kept.item.end()
        self._expiry.set()


def log_bytes(quota: Quota) -> int:
    """Return how much may be kept for all of a tenant's clients, and in its journal."""
    most_bytes = quota.memory.max_bytes
    return DEFAULT_LOG_BYTES if most_bytes is None else min(DEFAULT_LOG_BYTES, most_bytes // _MEMORY_PART)
