"""What a tenant's journal says, record by record, and the sessions that come of it.

An entry of the journal is what one turn of the worker's loop changed: records one after the other, each with a kind and
its length. The two that come with every step of the engine are plain bytes, all others msgpack.

    TOKENS    what the engine brought: pairs of stream and token id, as in `channel.Batch.singles`
    FRAMES    frames of one session that were numbered, and how far both directions are
    STEP      frames of many sessions, one of each, as columns (`fm_columns.Frames`)
    OTHER     any other

A stream's text is not in the journal: it is told again from the token ids, without what is in frames with a number.
Streams are numbered twice here as elsewhere: by their client within a session, and by the worker for the engine.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from seedance.daemon.protocol.fm_frame import HEADER_BYTES, Kind, split_message
from seedance.daemon.protocol.fm_messages import End, Error, Tokens, decode_payload
from seedance.engine.request import Sampling

_RECORD: Final = struct.Struct("=BI")
_FRAMES: Final = struct.Struct("=IIQQQ")
_TOKENS_KIND: Final = 1
_FRAMES_KIND: Final = 2
_OTHER_KIND: Final = 3
_STEP_KIND: Final = 4
_COUNT: Final = struct.Struct("=I")
_ANY_BYTES: Final = 2**32 - 1
_LAST: Final = (Kind.END, Kind.ERROR)


class StreamRecord(msgspec.Struct, array_like=True):
    """A stream that runs. Times are of the machine's monotonic clock; token ids are unsigned 32-bit numbers.

    `infer` is the payload by which it was asked for. `engine` is its number for the engine, and `sampling` what the
    engine was told, once that was. `told_bytes` of its text are in frames with a number.
    """

    number: int
    id: str
    infer: bytes
    begun_s: float
    engine: int | None = None
    model: str = ""
    prompt_token_ids: bytes = b""
    sampling: Sampling | None = None
    token_ids: bytes = b""
    cached_tokens: int = 0
    told_bytes: int = 0
    first_s: float | None = None


class SessionRecord(msgspec.Struct, array_like=True, tag=1):
    """A session as a whole. `frames` are under way; `waiting` has no number yet.

    That is, in order: payloads, with 0, and text of streams that are over, with their number in the session.
    """

    session: int
    name: str
    client_id: str
    encoding: int
    payload_bytes: int
    last_stream: int = 0
    expected_seq: int = 1
    acked_seq: int = 0
    frames: list[bytes] = []
    waiting: list[tuple[int, bytes]] = []
    streams: list[StreamRecord] = []


class SessionEnded(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """A session is kept no longer."""

    session: int


class StreamBegun(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """A stream was accepted."""

    session: int
    stream: StreamRecord


class StreamSubmitted(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """The engine was given a stream."""

    session: int
    number: int
    engine: int
    model: str
    prompt_token_ids: bytes
    sampling: Sampling


class FirstToken(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """The first text of a stream came."""

    session: int
    number: int
    at_s: float


class Deltas(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """What the engine brought beside single tokens: stream, token ids, cached tokens of each."""

    deltas: list[tuple[int, bytes, int]]


class Waiting(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """A payload began to wait; with `stream` it is the last of that, and comes behind the rest of its text."""

    session: int
    stream: int
    text: bytes
    payload: bytes


Record = SessionRecord | SessionEnded | StreamBegun | StreamSubmitted | FirstToken | Deltas | Waiting

_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final[msgspec.msgpack.Decoder[Record]] = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    """Return a record."""
    body = _encode(record)
    return _RECORD.pack(_OTHER_KIND, len(body)) + body


def encode_tokens(singles: bytes) -> bytes:
    """Return the record of what `channel.Batch.singles` holds."""
    return _RECORD.pack(_TOKENS_KIND, len(singles)) + singles


def encode_frames(
    session: int, last_stream: int, acked_seq: int, expected_seq: int, first_seq: int, frames: bytes
) -> bytes:
    """Return the record of frames that were numbered from `first_seq` on; there may be none."""
    head = _RECORD.pack(_FRAMES_KIND, _FRAMES.size + len(frames))
    return head + _FRAMES.pack(session, last_stream, acked_seq, expected_seq, first_seq) + frames


def encode_step(sessions: bytes, acked_seqs: bytes, seqs: bytes, begins: bytes, lengths: bytes, data: bytes) -> bytes:
    """Return the record of one frame of each of many sessions; see `fm_columns.Frames`."""
    count = _COUNT.pack(len(sessions) // 4)
    body = b"".join((count, acked_seqs, seqs, sessions, begins, lengths, data))
    return _RECORD.pack(_STEP_KIND, len(body)) + body


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Return token ids as the records hold them."""
    return array.array("I", token_ids).tobytes()


def token_list(data: bytes) -> list[int]:
    """Return such bytes as token ids."""
    return array.array("I", data).tolist()


def split_frames(frames: bytes) -> list[bytes]:
    """Return each of some frames that are put together."""
    if not frames:
        return []
    return [frames[start - HEADER_BYTES : end] for _, start, end in split_message(frames, _ANY_BYTES)]


class Replay:
    """Sessions out of a journal's entries, as they were when the last of these was written.

    Raises ValueError, KeyError, struct.error, msgspec.MsgspecError or RemoteProtocolError on what no journal says.
    """

    def __init__(self) -> None:
        self.sessions: dict[int, SessionRecord] = {}
        self._streams: dict[tuple[int, int], StreamRecord] = {}
        self._by_engine: dict[int, StreamRecord] = {}
        self._token_ids: dict[int, array.array[int]] = {}  # by the engine's number

    def entry(self, data: bytes) -> None:
        """Take an entry."""
        at = 0
        while at < len(data):
            kind, length = _RECORD.unpack_from(data, at)
            at += _RECORD.size
            body = data[at : at + length]
            at += length
            if kind == _TOKENS_KIND:
                self._tokens(body)
            elif kind == _FRAMES_KIND:
                self._frames(body)
            elif kind == _STEP_KIND:
                self._step(body)
            else:
                self._other(_decoder.decode(body))

    def finish(self) -> list[SessionRecord]:
        """Return all sessions, each with the streams that run."""
        for session in self.sessions.values():
            session.streams = []
        for (number, _), stream in sorted(self._streams.items()):
            if stream.engine is not None:
                stream.token_ids = self._token_ids[stream.engine].tobytes()
            self.sessions[number].streams.append(stream)
        return list(self.sessions.values())

    def _tokens(self, singles: bytes) -> None:
        flat = iter(array.array("I", singles))
        token_ids = self._token_ids
        for engine, token_id in zip(flat, flat, strict=True):
            if (found := token_ids.get(engine)) is not None:
                found.append(token_id)

    def _frames(self, body: bytes) -> None:
        number, last_stream, acked_seq, expected_seq, first_seq = _FRAMES.unpack_from(body)
        session = self.sessions.get(number)
        if session is None:
            return
        session.last_stream = last_stream
        session.expected_seq = expected_seq
        self._take_frames(session, acked_seq, first_seq, split_frames(body[_FRAMES.size :]))

    def _step(self, body: bytes) -> None:
        (count,) = _COUNT.unpack_from(body)
        at = _COUNT.size
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
        if framed[HEADER_BYTES] == Kind.TOKENS:
            message = decode_payload(framed, HEADER_BYTES, len(framed))
            assert isinstance(message, Tokens)
            stream = self._streams.get((session.session, message.stream))
            if stream is not None:
                stream.told_bytes += len(message.data)
            else:
                _cut(session.waiting, message.stream, len(message.data))
            return
        payload = framed[HEADER_BYTES:]
        if (0, payload) in session.waiting:
            session.waiting.remove((0, payload))
        if payload[0] in _LAST:
            message = decode_payload(payload, 0, len(payload))
            assert isinstance(message, End | Error)
            self._over(session.session, message.stream)

    def _over(self, session: int, number: int) -> None:
        stream = self._streams.pop((session, number), None)
        if stream is not None and stream.engine is not None:
            del self._by_engine[stream.engine], self._token_ids[stream.engine]

    def _all_over(self, session: int) -> None:
        for number in [number for owner, number in self._streams if owner == session]:
            self._over(session, number)

    def _other(self, record: Record) -> None:
        match record:
            case SessionRecord():
                self.sessions[record.session] = record
                for stream in record.streams:
                    self._began(record.session, stream)
            case SessionEnded():
                self.sessions.pop(record.session, None)
                self._all_over(record.session)
            case StreamBegun():
                self._began(record.session, record.stream)
            case StreamSubmitted():
                self._submitted(record)
            case FirstToken():
                self._first_token(record)
            case Deltas():
                self._deltas(record)
            case Waiting():
                self._waits(record)

    def _began(self, session: int, stream: StreamRecord) -> None:
        self._streams[session, stream.number] = stream
        if stream.engine is not None:
            self._by_engine[stream.engine] = stream
            self._token_ids[stream.engine] = array.array("I", stream.token_ids)

    def _submitted(self, record: StreamSubmitted) -> None:
        stream = self._streams.get((record.session, record.number))
        if stream is not None:
            stream.engine, stream.model = record.engine, record.model
            stream.prompt_token_ids, stream.sampling = record.prompt_token_ids, record.sampling
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


def _cut(waiting: list[tuple[int, bytes]], stream: int, size: int) -> None:
    """Take so much from the beginning of a stream's text that waits."""
    for place, (number, text) in enumerate(waiting):
        if number == stream and size:
            taken = min(size, len(text))
            waiting[place] = stream, text[taken:]
            size -= taken
    waiting[:] = [item for item in waiting if item[1]]


def replay(entries: Iterable[bytes]) -> list[SessionRecord]:
    """Return the sessions of a journal; see `Replay` for what it raises."""
    found = Replay()
    for data in entries:
        found.entry(data)
    return found.finish()


def in_entries(records: Iterable[bytes], entry_bytes: int = 256 << 10) -> Iterator[bytes]:
    """Yield records put together as entries of roughly so many bytes."""
    parts: list[bytes] = []
    size = 0
    for record in records:
        parts.append(record)
        size += len(record)
        if size >= entry_bytes:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)
