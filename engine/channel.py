"""The channel between a worker and the engine host: messages, and their framing on a Unix stream socket.

A message is a 4-byte little-endian length and that many bytes of msgpack. A stream socket instead of SEQPACKET,
because a prompt of 200,000 ids does not fit into one datagram under the default `net.core.wmem_max`, and because one
read can then bring several messages. Nothing here names a tenant: the supervisor binds the tenant to the channel.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from seedance.engine.request import NOT_URGENT, FinishReason, ModelInfo, Sampling, TokenLogprobs, Urgency
from seedance.errors import RemoteProtocolError

MAX_MESSAGE_BYTES: Final = 64 << 20
_HEADER: Final = 4
PAIR_BYTES: Final = 8
"""Of a stream or key and its token, in `Batch.singles`."""

StreamNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
if TYPE_CHECKING:
    TokenIds: TypeAlias = Sequence[int]
else:
    TokenIds = array.array
"""Given as any sequence, kept as an array, and sent as its bytes: a number for each would cost both ends a hundred
times as much."""
NO_TOKEN_IDS: Final[TokenIds] = array.array("I")
_TOKEN_IDS_CODE: Final = 1  # msgpack extension


class Submit(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """worker → host: begin a generation; `stream` is the worker's number for it, unique on its channel.

    `emitted_token_ids` are those that it brought already, elsewhere: it goes on behind them. `tokens` says what all ids
    mean, as in ModelInfo; "" for what the served model makes of them. Raises OverflowError for a token id that is no
    unsigned 32-bit number.
    """

    stream: StreamNumber
    prompt_token_ids: TokenIds
    sampling: Sampling
    urgency: Urgency = NOT_URGENT
    emitted_token_ids: TokenIds = NO_TOKEN_IDS
    tokens: str = ""

    def __post_init__(self) -> None:
        for name in ("prompt_token_ids", "emitted_token_ids"):
            given = getattr(self, name)
            if not isinstance(given, array.array):
                msgspec.structs.force_setattr(self, name, array.array("I", given))


class Abort(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """worker → host: end these generations; nothing more comes for them."""

    streams: list[int]


class SetPaused(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """worker → host: nobody takes what these generations bring, leave them out of the steps; or take them in again."""

    streams: list[int]
    is_paused: bool


class Delta(msgspec.Struct, array_like=True, gc=False):
    """One generation's part of a batch; the fields are those of `adapter.Output`, numbered by stream."""

    stream: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    error: str | None = None


class Batch(msgspec.Struct, tag=3, array_like=True):
    """host → worker: what one engine step (or several, when the worker was slow) brought for this worker.

    `singles` holds the streams that got one token and nothing else, which are nearly all of nearly every step: pairs
    of stream and token id, unsigned 32 bits in the machine's order. A stream is in one of the two at most.
    """

    deltas: list[Delta]
    singles: bytes = b""

    @property
    def tokens(self) -> int:
        """How many tokens are in it."""
        tokens = len(self.singles) // PAIR_BYTES
        for delta in self.deltas:
            tokens += len(delta.token_ids)
        return tokens

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Iterate over `singles`: stream, token id."""
        flat = iter(array.array("I", self.singles))
        return zip(flat, flat, strict=True)


def pack_singles(flat: Iterable[int]) -> bytes:
    """Return stream, token id, stream, token id … as `Batch.singles` holds them."""
    return array.array("I", flat).tobytes()


class EngineChanged(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """host → worker: the engine's state, and the model while there is one; sent first on every channel.

    With "recovering" the engine has died, and another one will go on with every generation: there is a pause, and what
    is submitted meanwhile waits. With "dead" every generation of the channel is lost; the worker ends its streams.
    `note` is what the clients of streams that run are told of it, empty for nothing.
    """

    state: str
    detail: str
    model: ModelInfo | None
    note: str = ""


class Refused(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """host → worker: this one generation cannot run; `code` is one of the protocol's stable error codes.

    `retry_after_s` is when it might, None where waiting does not help.
    """

    stream: int
    code: str
    message: str
    retry_after_s: float | None = None


class QueueBound(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """host → worker: the queue for the engine is full, and this tenant may have `most` requests in it; None: it is not.

    `starts_per_s` is how fast it drains, in first tokens of all tenants a second. `limit` is how many requests the
    queue holds at all, 0 for any number; told first on a channel where there is a limit.
    """

    most: int | None
    starts_per_s: float
    limit: int = 0


class ModelComing(msgspec.Struct, tag=20, array_like=True, frozen=True):
    """host → worker: a model with this tokenizer will be served soon; load it, and say so. EngineChanged tells when."""

    tokenizer_dir: str


class Noted(msgspec.Struct, tag=22, array_like=True, frozen=True):
    """host → worker: what the clients of these streams are told.

    `is_same` says that those whose tokens are drawn by chance go on with the same random numbers.
    """

    streams: list[int]
    note: str
    is_same: bool = False


class ModelPrepared(msgspec.Struct, tag=21, array_like=True, frozen=True):
    """worker → host: the tokenizer in this directory is loaded, or `reason` says why it cannot be."""

    tokenizer_dir: str
    reason: str = ""


ToHost = Submit | Abort | SetPaused | ModelPrepared
ToWorker = Batch | EngineChanged | Refused | QueueBound | ModelComing | Noted
M = TypeVar("M")


def _extend(value: Any) -> msgspec.msgpack.Ext:
    assert isinstance(value, array.array)
    return msgspec.msgpack.Ext(_TOKEN_IDS_CODE, memoryview(value).cast("B"))


def _from_extension(code: int, data: memoryview) -> TokenIds:
    token_ids = array.array("I")
    if code != _TOKEN_IDS_CODE or len(data) % token_ids.itemsize:
        raise msgspec.ValidationError(f"extension {code} of {len(data)} bytes is no list of token ids")
    token_ids.frombytes(data)
    return token_ids


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_extend)


def encode(message: ToHost | ToWorker) -> bytes:
    """Return a message as it goes on the wire, length and all."""
    out = bytearray(_HEADER)
    _encoder.encode_into(message, out, _HEADER)
    out[:_HEADER] = (len(out) - _HEADER).to_bytes(_HEADER, "little")
    return bytes(out)


class Receiver(Generic[M]):
    """Cut a byte stream into messages of one direction; a message may arrive in any number of pieces.

    Raises RemoteProtocolError on a length over MAX_MESSAGE_BYTES or on bytes that are no message: the channel is
    then of no further use.
    """

    __slots__ = ("_buffer", "_decode", "_needed")

    def __init__(self, kind: Any) -> None:
        self._buffer = bytearray()
        self._needed = 0  # length of the buffer at which it holds a whole message; before, it is not looked at
        self._decode: Callable[[Any], M] = msgspec.msgpack.Decoder(kind, ext_hook=_from_extension).decode

    def receive_data(self, data: bytes) -> list[M]:
        """Return the messages that `data` completes, in order."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return []
            data = bytes(self._buffer)
        view = memoryview(data)
        messages: list[M] = []
        at, end = 0, len(view)
        self._needed = 0
        while end - at >= _HEADER:
            length = int.from_bytes(view[at : at + _HEADER], "little")
            if length > MAX_MESSAGE_BYTES:
                raise RemoteProtocolError(f"cannot take a channel message of {length} bytes", 1009)
            if end - at - _HEADER < length:
                self._needed = _HEADER + length
                break
            body = view[at + _HEADER : at + _HEADER + length]
            try:
                messages.append(self._decode(body))
            except msgspec.DecodeError as exc:
                raise RemoteProtocolError(f"cannot read a channel message: {exc}", 1002) from exc
            at += _HEADER + length
        if at < end or self._buffer:
            self._buffer = bytearray(view[at:])
        return messages
