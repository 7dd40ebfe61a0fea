"""What a tenant's journal says, record by record, and the sessions and kept streams that come of it.

An entry of the journal is what one turn of the worker's loop changed: records one after the other, each with a kind and
its length. The four that come with every step of the engine are plain bytes, all others msgpack.

    TOKENS    what the engine brought: pairs of stream and token id, as in `channel.Batch.singles`
    FRAMES    frames of one session that were numbered, and how far both directions are
    KEPT      the next record of a kept stream, which one is the oldest now, and how far its client was sent them
    STEP      frames of many sessions, as columns (`fm_columns.Frames`)
    OTHER     any other

The text of a session's stream is not in the journal: it is told again from the token ids, without what is in frames
with a number. A kept stream's is in its records, which are in the same entry as the tokens that they were made of; so
is a session's with log probabilities, in payloads that wait.

Sessions and kept streams are numbered together, as `session`. A generation has two numbers more: its own within that,
which is the client's for a stream of a session, and the choice of a kept stream; and the worker's for the engine.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from seedance.daemon.protocol.fm_frame import HEADER_BYTES, split_message
from seedance.engine.request import Sampling

RECORD: Final = struct.Struct("=BI")
FRAMES: Final = struct.Struct("=IIQQQ")
KEPT: Final = struct.Struct("=IQQQ")
TOKENS_KIND: Final = 1
FRAMES_KIND: Final = 2
OTHER_KIND: Final = 3
KEPT_KIND: Final = 4
STEP_KIND: Final = 5
COUNT: Final = struct.Struct("=I")
_ANY_BYTES: Final = 2**32 - 1


class StreamRecord(msgspec.Struct, array_like=True):
    """A generation that runs. Times are of the machine's monotonic clock; token ids are unsigned 32-bit numbers.

    `engine` is its number for the engine of the worker that writes, and `sampling` what the engine was told, once that
    was. In a session `infer` is the payload by which it was asked for, `parts` are those of its prompt, if not all have
    come, and `told_bytes` of its text are in frames with a number. A choice of a kept stream that has ended, as others
    have not, had `ended_tokens`.
    """

    number: int
    id: str = ""
    infer: bytes = b""
    begun_s: float = 0.0
    engine: int | None = None
    model: str = ""
    prompt_token_ids: bytes = b""
    sampling: Sampling | None = None
    token_ids: bytes = b""
    cached_tokens: int = 0
    told_bytes: int = 0
    first_s: float | None = None
    ended_tokens: int | None = None
    parts: list[bytes] = []


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


class KeptRecord(msgspec.Struct, array_like=True, tag=8):
    """A kept stream as a whole. Its `records` are numbered from `first_seq` on; up to `sent_seq` some client had them.

    `kind` and `body` are the request, `key` and `fingerprint` its idempotency key, `answer_id` and `created` what is in
    each event of an answer.
    """

    session: int
    name: str
    door: str
    kind: str
    body: bytes
    key: str | None = None
    fingerprint: bytes = b""
    answer_id: str = ""
    created: int = 0
    is_begun: bool = False
    is_over: bool = False
    first_seq: int = 1
    sent_seq: int = 0
    records: list[bytes] = []
    streams: list[StreamRecord] = []


class SessionEnded(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """A session, or a kept stream, is kept no longer."""

    session: int


class StreamBegun(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """A stream was accepted."""

    session: int
    stream: StreamRecord


class StreamSubmitted(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """The engine was given a generation; a kept stream has begun by it."""

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


class ChoiceEnded(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """A choice of a kept stream has ended, with so many tokens."""

    session: int
    number: int
    output_tokens: int


class KeptOver(msgspec.Struct, array_like=True, tag=10, frozen=True):
    """A kept stream has its last record."""

    session: int


class PartTaken(msgspec.Struct, array_like=True, tag=11, frozen=True):
    """A part of a stream's prompt came; its payload."""

    session: int
    number: int
    payload: bytes


Saved = SessionRecord | KeptRecord
_OfKept = ChoiceEnded | KeptOver
_OfStreams = StreamBegun | PartTaken | StreamSubmitted | FirstToken
Record = Saved | SessionEnded | _OfStreams | Deltas | Waiting | _OfKept

_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final[msgspec.msgpack.Decoder[Record]] = msgspec.msgpack.Decoder(Record)
decode: Final = _decoder.decode
"""Return what a record of no other kind says. Raises msgspec.MsgspecError."""


def encode(record: Record) -> bytes:
    """Return a record."""
    body = _encode(record)
    return RECORD.pack(OTHER_KIND, len(body)) + body


def encode_tokens(singles: bytes) -> bytes:
    """Return the record of what `channel.Batch.singles` holds."""
    return RECORD.pack(TOKENS_KIND, len(singles)) + singles


def encode_frames(
    session: int, last_stream: int, acked_seq: int, expected_seq: int, first_seq: int, frames: bytes
) -> bytes:
    """Return the record of frames that were numbered from `first_seq` on; there may be none."""
    head = RECORD.pack(FRAMES_KIND, FRAMES.size + len(frames))
    return head + FRAMES.pack(session, last_stream, acked_seq, expected_seq, first_seq) + frames


def encode_kept(session: int, oldest_seq: int, sent_seq: int, seq: int, data: bytes) -> bytes:
    """Return the record of a kept stream's record `seq`."""
    return RECORD.pack(KEPT_KIND, KEPT.size + len(data)) + KEPT.pack(session, oldest_seq, sent_seq, seq) + data


def encode_step(sessions: bytes, acked_seqs: bytes, seqs: bytes, begins: bytes, lengths: bytes, data: bytes) -> bytes:
    """Return the record of frames of many sessions; see `fm_columns.Frames`."""
    count = COUNT.pack(len(sessions) // 4)
    body = b"".join((count, acked_seqs, seqs, sessions, begins, lengths, data))
    return RECORD.pack(STEP_KIND, len(body)) + body


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
