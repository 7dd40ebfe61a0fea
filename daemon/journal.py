"""The journal of a worker: what its tenant's sessions and kept streams need to outlive it, before anything leaves.

Whoever changes something that a client is told of puts a record here, and `commit` makes one entry of all of them,
which counts as a whole or not at all. When there is no room any more, what is true now takes the place of all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from seedance.daemon import journal_records as records
from seedance.daemon.fm_columns import Frames
from seedance.daemon.journal_records import Record, Saved, SessionRecord, StreamRecord, StreamSubmitted
from seedance.daemon.journal_replay import replay
from seedance.daemon.protocol.fm_server import Unsaved
from seedance.daemon.shared_log import SharedLog
from seedance.daemon.stream import Stream
from seedance.engine.channel import Batch

_log = logging.getLogger(__name__)

_LEAST_BYTES: Final = 2 << 20
_GROWTH: Final = 4
_TRY_AGAIN: Final = 1024


class Journal:
    """The records of one worker; `streams` is how many streams have their tokens in it.

    While `is_in_step` not all is there yet that came of a step of the engine: nothing may be committed then.
    Without a log it keeps nothing (`is_kept`), and neither does one whose log has no room for what is true now, until
    there is less (`is_on`).
    """

    def __init__(self, log: SharedLog | None = None, bound_bytes: int = 2 * _LEAST_BYTES) -> None:
        """Own the log. `bound_bytes` is what it may take, both halves together."""
        self.streams = 0
        self.is_in_step = False
        self.is_kept = self.is_on = log is not None
        self._log = log
        self._room_bytes = bound_bytes // 2
        self._pending: list[bytes] = []
        self._everything: Callable[[], Iterable[bytes]] = list
        self._skips = 0

    def read(self) -> list[Saved]:
        """Return what the last worker has left; nothing, with a line in the log, when that is broken."""
        if self._log is None:
            return []
        try:
            return replay(self._log.read())
        except Exception:
            # Whatever is wrong with it, it must not keep the tenant from being served.
            _log.exception("cannot read the journal of the last worker; its sessions are lost")
            return []

    def begin(self, everything: Callable[[], Iterable[bytes]]) -> None:
        """Begin to write, with all that `everything` returns now; it is asked again whenever there is no room."""
        self._everything = everything
        self.begin_anew()

    def note(self, record: Record) -> None:
        """Put in a record."""
        if self.is_on:
            self._pending.append(records.encode(record))

    def tokens(self, batch: Batch) -> None:
        """Put in what a step of the engine brought."""
        if not self.is_on:
            return
        if batch.singles:
            self._pending.append(records.encode_tokens(batch.singles))
        if batch.deltas:
            deltas = [
                (delta.stream, records.token_bytes(delta.token_ids), delta.cached_tokens) for delta in batch.deltas
            ]
            self._pending.append(records.encode(records.Deltas(deltas)))

    def changes(self, session: int, unsaved: Unsaved) -> None:
        """Put in what a session's protocol has to save."""
        waiting, acked_seq, expected_seq, last_stream, first_seq, frames = unsaved
        self._pending.append(records.encode_frames(session, last_stream, acked_seq, expected_seq, first_seq, frames))
        for stream, text, payload in waiting:
            self._pending.append(records.encode(records.Waiting(session, stream, text, payload)))

    def step(self, frames: Frames) -> None:
        """Put in what a step has brought sessions in columns."""
        if self.is_on:
            self._pending.append(records.encode_step(*frames))

    def submitted(self, session: int, number: int, stream: Stream, model: str) -> None:
        """Put in a generation that the engine was given, and from now on what comes of it.

        `left` is to follow once it is there no longer.
        """
        stream.is_kept = True
        self.streams += 1
        prompt = stream.prompt_token_ids.tobytes()
        self.note(StreamSubmitted(session, number, stream.number, model, prompt, stream.sampling))

    def left(self, streams: int) -> None:
        """Put in no more of what comes of so many streams."""
        self.streams -= streams

    def kept(self, session: int, oldest_seq: int, sent_seq: int, seq: int, record: bytes) -> None:
        """Put in the next record of a kept stream; see `journal_records`."""
        if self.is_kept:
            self._pending.append(records.encode_kept(session, oldest_seq, sent_seq, seq, record))

    def commit(self) -> None:
        """Write what was put in; it is there from now on, whatever becomes of this process."""
        if not self._pending:
            return
        data = b"".join(self._pending)
        self._pending.clear()
        if self._log is None:
            return
        if self._skips:
            self._skips -= 1
        elif self._log.append(data):
            return
        if not self._skips:
            self.begin_anew()

    @property
    def room_bytes(self) -> int:
        """Return how many bytes may be written before all is written anew."""
        return self._room_bytes

    def set_bound(self, bound_bytes: int) -> None:
        """Have another bound, from the next time on that all is written."""
        self._room_bytes = bound_bytes // 2

    def set_count(self, sessions: int) -> None:
        """Leave the number of sessions and kept streams for the supervisor."""
        if self._log is not None:
            self._log.set_count(sessions)

    def close(self) -> None:
        """Write what was put in, and nothing any more. Idempotent."""
        self.commit()
        self.is_on = False
        if self._log is not None:
            self._log.close()
            self._log = None

    def begin_anew(self) -> None:
        """Write all that is true now, in the place of what was written."""
        if self._log is None:
            return
        self._log.set_room(self._room_bytes)
        if self._log.replace(records.in_entries(self._everything())):
            self._log.set_room(min(self._room_bytes, max(_LEAST_BYTES, _GROWTH * self._log.used_bytes)))
            if not self.is_on:
                _log.info("the journal of the sessions is kept again")
            self.is_on = True
            return
        if self.is_on:
            _log.warning("cannot keep a journal: the sessions need more than %d bytes of it", self._room_bytes)
        self._log.clear()
        self.is_on = False
        self._skips = _TRY_AGAIN


def fill(record: StreamRecord, stream: Stream, model: str) -> StreamRecord:
    """Return the record of a generation with what another engine goes on from; `fold` comes before."""
    record.engine, record.model, record.sampling = stream.number, model, stream.sampling
    record.prompt_token_ids, record.token_ids = stream.prompt_token_ids.tobytes(), stream.token_ids.tobytes()
    record.cached_tokens = stream.cached_tokens
    return record


def saved(record: SessionRecord, unsaved: Unsaved, waiting: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the record of a whole session, with what its protocol has to say."""
    record.last_stream, record.expected_seq = unsaved.last_stream, unsaved.expected_seq
    record.acked_seq, record.frames = unsaved.acked_seq, records.split_frames(unsaved.frames)
    record.waiting = list(waiting)
    return records.encode(record)
