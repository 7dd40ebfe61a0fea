"""The JSON WebSocket door: messages of `/v2/infer`, subprotocol `seedance.json.v1`, one JSON text a message.

A client asks with a model, a prompt or messages, and the parameters that the OpenAI door has; it gets deltas and one
last message. With an `id` of its own choice in each request, one connection carries several streams at once, and
`{"cancel": id}` ends one; without ids there is one stream at a time, and `{"cancel": null}` ends it.

A request with `"resumable": true` is answered first by what to come back with, and each message of its stream has a
sequence `seq`. `{"resume": token, "last_seq": n}` goes on after that one, on whatever connection.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from seedance.daemon.doors.errors import ApiError, infer_error, invalid
from seedance.daemon.doors.messages import Messages, check_messages, template_messages
from seedance.daemon.doors.openai_response import Usage
from seedance.daemon.doors.parameters import MAX_LOGPROBS, MOST_DEADLINE_MS, Parameters, TokenId, check, decode
from seedance.engine.request import FinishReason

SUBPROTOCOL: Final = "seedance.json.v1"
MAX_ID_CHARACTERS: Final = 128

StreamId = Annotated[str, Meta(max_length=MAX_ID_CHARACTERS)]

_encode: Final = msgspec.json.Encoder().encode


class InferRequest(Parameters, kw_only=True):
    """A request for one stream: exactly one of `prompt` (a text or token ids) and `messages`.

    Without `model`, the one that is served. `stream` is on unless it is false. `logprobs` is the number of
    alternatives at each position. `deadline_ms` is how soon the first token is wanted, from the request's arrival on.
    `idempotency_key` is the client's own name for a resumable request, which may then be sent again.
    """

    id: StreamId | None = None
    model: str | None = None
    prompt: str | Annotated[list[TokenId], Meta(min_length=1)] | None = None
    messages: Messages | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=MOST_DEADLINE_MS)] | None = None
    idempotency_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None

    def wanted_logprobs(self) -> int | None:
        """Return the number of alternatives; 0 is on."""
        return self.logprobs

    def streams(self) -> bool:
        """Return whether the text shall come in parts."""
        return self.stream is not False

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the conversation as a chat template reads it. Raises ApiError on tool arguments that are no JSON."""
        return template_messages(self.messages or [])

    def template_variables(self) -> dict[str, Any]:
        """Return what else the client tells the chat template."""
        return dict(self.chat_template_kwargs or {})


class Cancel(msgspec.Struct, frozen=True):
    """The client wants no more of this stream; None names the stream without an id."""

    id: str | None


class Resume(msgspec.Struct, frozen=True):
    """The client goes on with the stream of this token, after `last_seq`; messages are to have this `id`."""

    id: str | None
    token: str
    last_seq: int


class Rejected(msgspec.Struct, frozen=True):
    """A message that cannot be served; `message()` is the answer. `id` is the client's, as far as it was readable."""

    id: str | None
    error: ApiError

    def message(self) -> bytes:
        """Return the answer as JSON."""
        return infer_error(self.error, self.id)


class _Envelope(msgspec.Struct):
    id: StreamId | None = None
    cancel: StreamId | UnsetType | None = UNSET
    resume: str | None = None
    last_seq: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


_envelope: Final = msgspec.json.Decoder(_Envelope)
_request: Final = msgspec.json.Decoder(InferRequest)


def parse(data: bytes | str) -> InferRequest | Cancel | Resume | Rejected:
    """Return what one WebSocket message asks for; never raises."""
    stream_id: str | None = None
    try:
        envelope = decode(_envelope, data)
        stream_id = envelope.id
        if envelope.cancel is not UNSET:
            return Cancel(envelope.cancel)
        if envelope.resume is not None:
            return Resume(stream_id, envelope.resume, envelope.last_seq)
        return read(data)
    except ApiError as error:
        return Rejected(stream_id, error)


def read(data: bytes | str) -> InferRequest:
    """Return the request in a JSON object. Raises ApiError."""
    request = decode(_request, data)
    _check(request)
    return request


class InferStream:
    """The messages of one stream to the client; made once, with the constant bytes around a delta's text."""

    __slots__ = ("_head", "_id", "_tail")

    def __init__(self, stream_id: str | None = None) -> None:
        self._id = stream_id
        self._head = b'{"delta":' if stream_id is None else b'{"id":' + _encode(stream_id) + b',"delta":'
        self._tail = b"}"

    def delta(self, text: str) -> bytes:
        """Return the message for more text."""
        return b"".join((self._head, _encode(text), self._tail))

    def around_text(self) -> tuple[bytes, bytes]:
        """Return what stands before and after the text, as a JSON string, in a delta."""
        return self._head, self._tail

    def delta_logprobs(self, text: str, logprobs: dict[str, Any]) -> bytes:
        """Return the message for more text with log probabilities, made by `openai_response.chat_logprobs`."""
        return self._message({"delta": text, "logprobs": logprobs["content"]})

    def note(self, note: str) -> bytes:
        """Return the message that tells what is going on."""
        return self._message({"note": note})

    def finish(self, finish_reason: FinishReason | str, usage: Usage, retry_after_s: float | None = None) -> bytes:
        """Return the last message of a stream; `retry_after_s` when a quota has ended it."""
        return self._message(_ending(finish_reason, usage, retry_after_s))

    def whole(
        self,
        text: str,
        finish_reason: FinishReason | str,
        usage: Usage,
        logprobs: dict[str, Any] | None = None,
        retry_after_s: float | None = None,
    ) -> bytes:
        """Return the only message of a request with `"stream": false`; `retry_after_s` when a quota has ended it."""
        fields: dict[str, Any] = {"text": text}
        if logprobs is not None:
            fields["logprobs"] = logprobs["content"]
        return self._message({**fields, **_ending(finish_reason, usage, retry_after_s)})

    def error(self, error: ApiError) -> bytes:
        """Return the message that ends the stream with an error."""
        return infer_error(error, self._id)

    def _message(self, fields: dict[str, Any]) -> bytes:
        return _encode(fields if self._id is None else {"id": self._id, **fields})


def told(note: str, retry_after_ms: int) -> bytes:
    """Return the message that tells a connection, and not one of its streams, what is going on."""
    return _encode({"note": note, "retry_after_ms": retry_after_ms})


class NumberedMessages:
    """What is around the messages of a kept stream, which are made without an id and without their sequence."""

    __slots__ = ("_head",)

    def __init__(self, stream_id: str | None) -> None:
        """`stream_id` is the client's own, on the connection that the messages go to."""
        self._head = b"{" if stream_id is None else b'{"id":' + _encode(stream_id) + b","

    def welcome(self, name: str, token: str, resume_for_ms: int) -> bytes:
        """Return the first message: by what the stream is ended, with what it is gone on with, and for how long."""
        fields = {"stream_id": name, "resume": token, "resume_for_ms": resume_for_ms}
        return self._head + _encode(fields)[1:]

    def message(self, seq: int, record: bytes) -> bytes:
        """Return a message with its sequence."""
        return b'%b"seq":%d,%b' % (self._head, seq, record[1:])


def _ending(finish_reason: FinishReason | str, usage: Usage, retry_after_s: float | None) -> dict[str, Any]:
    ending: dict[str, Any] = {"finish_reason": finish_reason, "usage": usage.as_json()}
    if retry_after_s is not None:
        ending["retry_after_ms"] = math.ceil(retry_after_s * 1000)
    return ending


def _check(request: InferRequest) -> None:
    if (request.prompt is None) == (request.messages is None):
        raise invalid("cannot serve the request: send either 'prompt' or 'messages'", "prompt")
    if request.stream is None and request.stream_options is not None:
        request.stream = True
    check(request)
    if request.idempotency_key is not None and not request.resumable:
        raise invalid("cannot use 'idempotency_key': it needs 'resumable' to be true", "idempotency_key")
    if request.choices() != 1:
        raise invalid("cannot use 'n': this door makes one text a request; send several requests with ids", "n")
    if request.tools:
        raise invalid("cannot use 'tools': tool calls are not supported here; leave it out", "tools")
    if request.messages is not None:
        check_messages(request.messages)
