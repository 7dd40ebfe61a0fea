"""The sessions and kept streams that come of a tenant's journal; what it says is in `journal_records`."""

from __future__ import annotations

import array
import operator
from collections.abc import Iterable

from seedance.daemon.journal_records import (
    COUNT,
    FRAMES,
    FRAMES_KIND,
    KEPT,
    KEPT_KIND,
    RECORD,
    STEP_KIND,
    TOKENS_KIND,
    ChoiceEnded,
    Deltas,
    FirstToken,
    KeptOver,
    KeptRecord,
    PartTaken,
    Record,
    Saved,
    SessionEnded,
    SessionRecord,
    StreamBegun,
    StreamRecord,
    StreamSubmitted,
    Waiting,
    decode,
    split_frames,
)
from seedance.daemon.protocol.fm_frame import HEADER_BYTES, Encoding
from seedance.daemon.protocol.fm_messages import End, Error, Tokens, decode_payload


class Replay:
    """Sessions and kept streams out of a journal's entries, as they were when the last of these was written.

    Raises ValueError, KeyError, struct.error, msgspec.MsgspecError or RemoteProtocolError on what no journal says.
    """

    def __init__(self) -> None:
        self.sessions: dict[int, SessionRecord] = {}
        self.kept: dict[int, KeptRecord] = {}
        self._streams: dict[tuple[int, int], StreamRecord] = {}
        self._by_engine: dict[int, StreamRecord] = {}
        self._token_ids: dict[int, array.array[int]] = {}  # by the engine's number

    def entry(self, data: bytes) -> None:
        """Take an entry."""
        at = 0
        while at < len(data):
            kind, length = RECORD.unpack_from(data, at)
            at += RECORD.size
            body = data[at : at + length]
            at += length
            if kind == TOKENS_KIND:
                self._tokens(body)
            elif kind == FRAMES_KIND:
                self._frames(body)
            elif kind == STEP_KIND:
                self._step(body)
            elif kind == KEPT_KIND:
                self._kept(body)
            else:
                self._other(decode(body))

    def finish(self) -> list[Saved]:
        """Return all, each with the generations that run; these have no number for the next worker's engine yet."""
        found: dict[int, Saved] = {**self.sessions, **self.kept}
        for saved in found.values():
            saved.streams = []
        for (number, _), stream in sorted(self._streams.items(), key=operator.itemgetter(0)):
            if stream.engine is not None:
                stream.token_ids = self._token_ids[stream.engine].tobytes()
                stream.engine = None
            found[number].streams.append(stream)
        return list(found.values())

    def _tokens(self, singles: bytes) -> None:
        flat = iter(array.array("I", singles))
        token_ids = self._token_ids
        for engine, token_id in zip(flat, flat, strict=True):
            if (found := token_ids.get(engine)) is not None:
                found.append(token_id)

    def _frames(self, body: bytes) -> None:
        number, last_stream, acked_seq, expected_seq, first_seq = FRAMES.unpack_from(body)
        session = self.sessions.get(number)
        if session is None:
            return
        session.last_stream = last_stream
        session.expected_seq = expected_seq
        self._take_frames(session, acked_seq, first_seq, split_frames(body[FRAMES.size :]))

    def _step(self, body: bytes) -> None:
        (count,) = COUNT.unpack_from(body)
        at = COUNT.size
        columns: list[array.array[int]] = []
        for kind, size in (("Q", 8), ("Q", 8), ("I", 4), ("I", 4), ("I", 4)):
            columns.append(array.array(kind, body[at : at + size * count]))
            at += size * count
        for acked_seq, seq, number, begin, length in zip(*columns, strict=True):
            if (session := self.sessions.get(number)) is not None:
                self._take_frames(session, acked_seq, seq, [body[at + begin : at + begin + length]])

    def _take_frames(self, session: SessionRecord, acked_seq: int, first_seq: int, frames: list[bytes]) -> None:
        known_seq = session.acked_seq + len(session.frames)
        for framed in frames[max(0, known_seq + 1 - first_seq) :]:
            session.frames.append(framed)
            self._numbered(session, framed)
        del session.frames[: max(0, acked_seq - session.acked_seq)]
        session.acked_seq = max(acked_seq, session.acked_seq)

    def _numbered(self, session: SessionRecord, framed: bytes) -> None:
        """Take note that a payload has a number: it waits no longer, and may be the last of its stream."""
        message = decode_payload(framed, HEADER_BYTES, len(framed))
        if isinstance(message, Tokens) and message.encoding != Encoding.LOGPROBS:
            stream = self._streams.get((session.session, message.stream))
            if stream is not None:
                stream.told_bytes += len(message.data)
            else:
                _cut(session.waiting, message.stream, len(message.data))
            return
        payload = framed[HEADER_BYTES:]
        if (0, payload) in session.waiting:
            session.waiting.remove((0, payload))
        if isinstance(message, End | Error):
            self._over(session.session, message.stream)

    def _kept(self, body: bytes) -> None:
        number, oldest_seq, sent_seq, seq = KEPT.unpack_from(body)
        kept = self.kept.get(number)
        if kept is None:
            return
        if seq == kept.first_seq + len(kept.records):
            kept.records.append(body[KEPT.size :])
        if oldest_seq > kept.first_seq:
            del kept.records[: oldest_seq - kept.first_seq]
            kept.first_seq = oldest_seq
        kept.sent_seq = sent_seq

    def _over(self, session: int, number: int) -> None:
        stream = self._streams.pop((session, number), None)
        if stream is not None:
            self._let_go(stream)

    def _let_go(self, stream: StreamRecord) -> None:
        """Take note that the engine has nothing more for a generation."""
        if stream.engine is not None:
            del self._by_engine[stream.engine], self._token_ids[stream.engine]
            stream.engine = None

    def _all_over(self, session: int) -> None:
        for number in [number for owner, number in self._streams if owner == session]:
            self._over(session, number)

    def _other(self, record: Record) -> None:
        match record:
            case SessionRecord() | KeptRecord():
                self._saved(record)
            case SessionEnded():
                self.sessions.pop(record.session, None)
                self.kept.pop(record.session, None)
                self._all_over(record.session)
            case StreamBegun():
                self._began(record.session, record.stream)
            case PartTaken():
                self._part_taken(record)
            case StreamSubmitted():
                self._submitted(record)
            case FirstToken():
                self._first_token(record)
            case Deltas():
                self._deltas(record)
            case Waiting():
                self._waits(record)
            case ChoiceEnded() | KeptOver():
                self._ended(record)

    def _saved(self, record: Saved) -> None:
        if isinstance(record, KeptRecord):
            self.kept[record.session] = record
        else:
            self.sessions[record.session] = record
        for stream in record.streams:
            self._began(record.session, stream)

    def _began(self, session: int, stream: StreamRecord) -> None:
        self._streams[session, stream.number] = stream
        if stream.engine is not None:
            self._by_engine[stream.engine] = stream
            self._token_ids[stream.engine] = array.array("I", stream.token_ids)

    def _part_taken(self, record: PartTaken) -> None:
        if (stream := self._streams.get((record.session, record.number))) is not None:
            stream.parts.append(record.payload)

    def _submitted(self, record: StreamSubmitted) -> None:
        stream = self._streams.get((record.session, record.number))
        if (kept := self.kept.get(record.session)) is not None:
            kept.is_begun = True
            stream = stream or StreamRecord(record.number)
        if stream is not None:
            stream.engine, stream.model = record.engine, record.model
            stream.prompt_token_ids, stream.sampling = record.prompt_token_ids, record.sampling
            stream.parts = []
            self._began(record.session, stream)

    def _first_token(self, record: FirstToken) -> None:
        stream = self._streams.get((record.session, record.number))
        if stream is not None:
            stream.first_s = record.at_s

    def _deltas(self, record: Deltas) -> None:
        for engine, token_ids, cached_tokens in record.deltas:
            if (stream := self._by_engine.get(engine)) is not None:
                self._token_ids[engine].frombytes(token_ids)
                stream.cached_tokens += cached_tokens

    def _waits(self, record: Waiting) -> None:
        session = self.sessions.get(record.session)
        if session is None:
            return
        if record.stream:
            self._over(record.session, record.stream)
            if record.text:
                session.waiting.append((record.stream, record.text))
        session.waiting.append((0, record.payload))

    def _ended(self, record: ChoiceEnded | KeptOver) -> None:
        if isinstance(record, ChoiceEnded):
            if (stream := self._streams.get((record.session, record.number))) is not None:
                self._let_go(stream)
                stream.ended_tokens = record.output_tokens
        elif (kept := self.kept.get(record.session)) is not None:
            kept.is_over, kept.body = True, b""
            self._all_over(record.session)


def _cut(waiting: list[tuple[int, bytes]], stream: int, size: int) -> None:
    """Take so much from the beginning of a stream's text that waits."""
    for place, (number, text) in enumerate(waiting):
        if number == stream and size:
            taken = min(size, len(text))
            waiting[place] = stream, text[taken:]
            size -= taken
    waiting[:] = [item for item in waiting if item[1]]


def replay(entries: Iterable[bytes]) -> list[Saved]:
    """Return the sessions and kept streams of a journal; see `Replay` for what it raises."""
    found = Replay()
    for data in entries:
        found.entry(data)
    return found.finish()
