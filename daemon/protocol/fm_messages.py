"""What FM frames say: a type for each kind, and their bodies as bytes.

Bodies are msgpack maps, TOKENS apart. A key that is not known is passed over, so that a later version may add one; a
value that is its default may be left out, and by us it is.

A message may be an owner's event as it is: it says all that the frame said.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from seedance.daemon.protocol.fm_frame import (
    DEFAULT_PAYLOAD_BYTES,
    HEADER_BYTES,
    MAX_STREAM,
    MIN_PAYLOAD_BYTES,
    UNNUMBERED,
    Encoding,
    Kind,
    broken,
    frame,
    parse_tokens,
    tokens_prefix,
)

RING_FRAMES: Final = 128
"""How far ahead a frame may be, and so the largest window."""
ACK_DELAY_MS: Final = 100
"""So long an ACK may wait, if nothing else was told."""

Seq = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Window = Annotated[int, Meta(ge=0, le=RING_FRAMES)]
StreamNumber = Annotated[int, Meta(ge=1, le=MAX_STREAM)]
AnyStream = Annotated[int, Meta(ge=0, le=MAX_STREAM)]  # 0 is the connection
PayloadBytes = Annotated[int, Meta(ge=MIN_PAYLOAD_BYTES, lt=2**32)]
Milliseconds = Annotated[int, Meta(ge=0, lt=2**53)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=512)]
Opaque = Annotated[bytes, Meta(min_length=8, max_length=8)]
Features = Annotated[list[Name], Meta(max_length=32)]
Range = tuple[Seq, Seq]


class Modality(enum.StrEnum):
    """What a part is."""

    TEXT = "text"
    AUDIO = "audio"
    IMAGE = "image"
    TOKENS = "tokens"


class _Body(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class Hello(_Body, frozen=True):
    """The client begins a connection. With a resume token it goes on with a session.

    `last_seq` is the last sequence that it has in order, of that `epoch`. `encodings` has the dearest first.
    """

    client_id: Annotated[str, Meta(min_length=1, max_length=256)]
    resume_token: Name | None = None
    epoch: Seq = 0
    last_seq: Seq = 0
    window: Window = RING_FRAMES
    encodings: Annotated[tuple[int, ...], Meta(min_length=1, max_length=32)] = (Encoding.TEXT,)
    features: Features = []
    max_payload_bytes: PayloadBytes = DEFAULT_PAYLOAD_BYTES


class Welcome(_Body, frozen=True):
    """The server has a session for the client.

    Another `epoch` than before says that history was lost: both begin again, the server at `oldest_seq`. `last_seq` is
    what the server has of the client, in order. `max_payload_bytes` holds both ways. The client may wait for
    `ack_delay_ms` with an ACK of TOKENS; that of all else is to come within 100 ms as ever.
    """

    session_id: Name
    epoch: Seq
    resume_token: Name
    resume_for_ms: Milliseconds
    oldest_seq: Seq
    next_seq: Seq
    last_seq: Seq
    window: Window
    encoding: int = Encoding.TEXT
    features: Features = []
    max_payload_bytes: PayloadBytes = DEFAULT_PAYLOAD_BYTES
    ack_delay_ms: Milliseconds = ACK_DELAY_MS


class Infer(_Body, frozen=True):
    """Begin a stream. Its number is larger than any before; `more` says that parts follow."""

    stream: StreamNumber
    model: Name
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[Annotated[int, Meta(ge=0, lt=2**32)]] | None = None
    sampling: dict[str, Any] = {}
    deadline_ms: Milliseconds | None = None
    more: bool = False


class Part(_Body, frozen=True):
    """More of what a stream is asked, also while it runs; `more` says that it is not the last."""

    stream: StreamNumber
    modality: Modality
    data: bytes
    more: bool = False


class Accept(_Body, frozen=True):
    """The stream is taken on; `id` is its name for every connection of the tenant. Sent before any prefill."""

    stream: StreamNumber
    id: Name


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """One or more tokens of a stream."""

    stream: int
    encoding: int
    data: bytes


class End(_Body, frozen=True):
    """The last of a stream that was served; `slo` holds figures such as `first_token_ms`.

    `retry_after_ms` comes where a quota has ended it.
    """

    stream: StreamNumber
    finish_reason: Name
    usage: dict[str, int] = {}
    slo: dict[str, float] = {}
    retry_after_ms: Milliseconds | None = None


class Error(_Body, frozen=True):
    """The last of a stream that cannot be served; of stream 0, the last of the connection.

    `oldest_seq` comes with `gone`: what is kept begins there.
    """

    stream: AnyStream
    code: Name
    message: Text
    retry_after_ms: Milliseconds | None = None
    oldest_seq: Seq | None = None


class Note(_Body, frozen=True):
    """What is going on with a stream, or with stream 0: everything.

    `retry_after_ms` comes with `draining`: no sooner is there anybody again who takes a new request.
    """

    stream: AnyStream
    note: Text
    retry_after_ms: Milliseconds | None = None


class Cancel(_Body, frozen=True):
    """End a stream: one of this session by number, or with number 0 any of the tenant by its `id`."""

    stream: AnyStream
    id: Name = ""


class Ack(_Body, frozen=True):
    """All up to `seq` has come; from there on, `credit` frames may be under way."""

    seq: Seq
    credit: Window


class Nack(_Body, frozen=True):
    """These have not come: first and last of each range, in ascending order."""

    ranges: Annotated[list[Range], Meta(min_length=1, max_length=RING_FRAMES // 2)]


class Ping(_Body, frozen=True):
    """To be answered by a Pong with the same bytes, and an Ack."""

    opaque: Opaque


class Pong(_Body, frozen=True):
    """The answer to a Ping."""

    opaque: Opaque


Message = (
    Hello | Welcome | Infer | Part | Accept | Tokens | End | Error | Note | Cancel | Ack | Nack | Ping | Pong
)  # fmt: skip

KINDS: Final[dict[type, Kind]] = {
    Hello: Kind.HELLO,
    Welcome: Kind.WELCOME,
    Infer: Kind.INFER,
    Part: Kind.PART,
    Accept: Kind.ACCEPT,
    Tokens: Kind.TOKENS,
    End: Kind.END,
    Error: Kind.ERROR,
    Note: Kind.NOTE,
    Cancel: Kind.CANCEL,
    Ack: Kind.ACK,
    Nack: Kind.NACK,
    Ping: Kind.PING,
    Pong: Kind.PONG,
}

_encode: Final = msgspec.msgpack.Encoder().encode
_ack_decoder: Final = msgspec.msgpack.Decoder(Ack)
_CONTROL_START: Final = frame(0, b"")[:-4]  # up to the length
_HEADS: Final = {cls: bytes((kind,)) for cls, kind in KINDS.items()}
_DECODERS: Final[dict[int, msgspec.msgpack.Decoder[Message]]] = {
    kind: msgspec.msgpack.Decoder(cls) for cls, kind in KINDS.items() if cls is not Tokens
}


def encode_payload(message: Message) -> bytes:
    """Return the payload of a frame, its kind and all."""
    if isinstance(message, Tokens):
        return tokens_prefix(message.stream, message.encoding) + message.data
    return _HEADS[type(message)] + _encode(message)


def decode_payload(data: bytes, start: int, end: int) -> Message:
    """Return what the payload between `start` and `end` says; raises RemoteProtocolError."""
    kind = data[start]
    if kind == Kind.TOKENS:
        return Tokens(*parse_tokens(data, start + 1, end))
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise broken(f"its kind {kind} is unknown")
    try:
        return decoder.decode(memoryview(data)[start + 1 : end])
    except (msgspec.DecodeError, RecursionError) as exc:  # the latter is how msgspec refuses a body nested too deep
        raise broken(f"the body of {Kind(kind).name}: {exc}") from None


def parse_ack(message: bytes) -> Ack | None:
    """Return what a WebSocket message says that is one ACK and nothing else; None for every other one."""
    length = len(message) - HEADER_BYTES
    if length < 1 or message[HEADER_BYTES] != Kind.ACK or not message.startswith(_CONTROL_START):
        return None
    if int.from_bytes(message[len(_CONTROL_START) : HEADER_BYTES], "big") != length:
        return None
    try:
        return _ack_decoder.decode(memoryview(message)[HEADER_BYTES + 1 :])
    except msgspec.DecodeError:
        return None


def is_numbered(message: Message) -> bool:
    """Tell whether the frame of a message has a sequence number."""
    if isinstance(message, Error):
        return message.stream != 0
    return KINDS[type(message)] not in UNNUMBERED
