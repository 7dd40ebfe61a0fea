"""The OpenAI door of a worker: completions and chat completions, streamed or whole, over one HTTP connection."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from seedance.daemon.doors import openai_response
from seedance.daemon.doors.errors import ApiError, openai_error_body, retry_after
from seedance.daemon.doors.openai_request import ChatRequest, CompletionRequest, parse_chat, parse_completion
from seedance.daemon.doors.openai_response import ChatStream, Choice, CompletionStream, Usage
from seedance.daemon.event_streams import KeptEvents
from seedance.daemon.journal_records import StreamRecord, token_list
from seedance.daemon.kept_request import CHAT, COMPLETION, KeptRequest
from seedance.daemon.protocol import sse
from seedance.daemon.protocol.sse import EventTemplate
from seedance.daemon.ring.driver import Flow
from seedance.daemon.service import Answer, Prompt, Service
from seedance.daemon.stream import Sink, Stream
from seedance.engine.request import FinishReason, TokenLogprobs

_Request = ChatRequest | CompletionRequest

_json: Final = msgspec.json.Encoder().encode


class Output(Protocol):
    """Where the events of a streamed answer go."""

    def fail(self, error: ApiError) -> None:
        """Send an error response: the last call."""

    def start_stream(self, headers: Sequence[tuple[str, str]]) -> None:
        """Begin a streamed response with status 200."""

    def write(self, data: bytes) -> None:
        """Send an event of the streamed response."""

    def end_stream(self) -> None:
        """End the streamed response: the last call."""


class Exchange(Output, Protocol):
    """One request's half of an HTTP connection that an answer writes to.

    What is sent on `flow` directly must be in HTTP chunks already, where the response is `chunked`.
    """

    flow: Flow

    @property
    def chunked(self) -> bool:
        """Whether the streamed response goes in HTTP chunks."""

    def respond(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        """Send a whole response: the last call."""

    def fell_behind(self, waiting_bytes: int) -> None:
        """The client has so much to take still of what was sent on `flow` directly."""

    def keep(self) -> KeptEvents:
        """Have the answer outlive the connection, which is the first to read it; return where its events go."""


def chat(service: Service, exchange: Exchange, body: bytes, deadline_ms: int | None = None) -> Answer:
    """Serve a chat completion. Raises ApiError when it is refused before anything was sent."""
    return _serve(service, exchange, CHAT, body, deadline_ms)


def completion(service: Service, exchange: Exchange, body: bytes, deadline_ms: int | None = None) -> Answer:
    """Serve a completion. Raises ApiError when it is refused before anything was sent."""
    return _serve(service, exchange, COMPLETION, body, deadline_ms)


def parse(kind: str, body: bytes) -> _Request:
    """Return the request in a body, CHAT or COMPLETION. Raises ApiError."""
    return parse_chat(body) if kind == CHAT else parse_completion(body)


def places(request: _Request) -> int:
    """Return how many streams a request asks for."""
    prompts = 1 if isinstance(request, ChatRequest) else len(list(request.prompts()))
    return prompts * request.choices()


def begin(service: Service, request: _Request, answer: Answer) -> None:
    """Serve an admitted request. Never raises."""
    if isinstance(request, ChatRequest):
        service.begin_chat(request, answer, add_generation_prompt=request.add_generation_prompt is not False)
    else:
        prompts: list[Prompt] = list(request.prompts())
        service.begin(request, prompts, answer)


def kept_answer(service: Service, events: KeptEvents, request: _Request) -> _StreamedAnswer:
    """Return the answer to a resumable request, whose events are kept."""
    return _StreamedAnswer(service, events, request, functools.partial(_KeptSink, events))


def _serve(service: Service, exchange: Exchange, kind: str, body: bytes, deadline_ms: int | None) -> Answer:
    request = parse(kind, body)
    service.admit(request.model, places(request))
    answer: _OpenAIAnswer
    if request.resumable:
        events = exchange.keep()
        kept = answer = kept_answer(service, events, request)
        events.made_by(kept, KeptRequest(kind, body, kept.id, kept.created))
    elif request.stream:
        answer = _StreamedAnswer(service, exchange, request, functools.partial(_DirectSink, exchange))
    else:
        answer = _WholeAnswer(service, exchange, request)
    answer.urgency = service.urgency(exchange.flow.fd, deadline_ms)
    begin(service, request, answer)
    return answer


class _OpenAIAnswer(Answer):
    """What streamed and whole answers share: identity, usage, and when all choices are done.

    `id` and `created` are in every event.
    """

    __slots__ = ("_model", "_open", "_output", "_request", "_service", "created", "id", "is_chat")

    def __init__(self, service: Service, output: Output, request: _Request) -> None:
        super().__init__()
        self._service = service
        self._output = output
        self._request = request
        self.is_chat = isinstance(request, ChatRequest)
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + secrets.token_hex(16)
        self.created = int(time.time())
        self._model = request.model
        self._open = 0

    def failed(self, error: ApiError) -> None:
        self._output.fail(error)

    def usage(self) -> Usage:
        """Return the tokens of all choices; a prompt counts once."""
        choices = self._request.choices()
        return Usage(
            self.prompt_tokens,
            sum(stream.output_tokens for stream in self.streams),
            sum(stream.cached_tokens for stream in self.streams[::choices]),
        )

    def format_logprobs(self, positions: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """Return log probabilities in the form of this kind of answer; `offset` is the length of the text before."""
        if self.is_chat:
            return openai_response.chat_logprobs(positions, self.vocabulary)
        return openai_response.completion_logprobs(positions, self.vocabulary, offset)


class _StreamedAnswer(_OpenAIAnswer):
    __slots__ = ("_builders", "_is_restored", "_new_sink", "_sinks")

    def __init__(self, service: Service, output: Output, request: _Request, new_sink: _NewSink) -> None:
        super().__init__(service, output, request)
        self._new_sink = new_sink
        self._is_restored = False
        self._builders: list[ChatStream | CompletionStream] = []
        self._sinks: list[_EventSink] = []

    def restore(self, id: str, created: int, records: Sequence[StreamRecord]) -> None:
        """Be the answer that another worker began, with the streams that the engine had been given."""
        self.id, self.created = id, created
        self._is_restored = bool(records)
        prompts = records[:: self._request.choices()]
        self.prompt_tokens = sum(len(token_list(record.prompt_token_ids)) for record in prompts)
        for record in records:
            self.sink(record.number)
            if record.ended_tokens is not None:
                self._sinks[record.number].is_over = True
                self._open -= 1

    def sink(self, index: int) -> Sink:
        if index < len(self._sinks):
            return self._sinks[index]
        kind = ChatStream if self.is_chat else CompletionStream
        builder = kind(self.id, self._model, self.created, index, include_usage=self._request.include_usage())
        self._builders.append(builder)
        self._open += 1
        sink = self._new_sink(self, builder, index)
        self._sinks.append(sink)
        return sink

    def started(self) -> None:
        # At once, not with the first token: the client sees that it is being served, and pings can keep it so.
        self._output.start_stream(sse.HEADERS)
        if self._is_restored:
            if not self.is_chat and self._request.wanted_logprobs() is not None:
                for sink, stream in zip(self._sinks, self.streams, strict=True):
                    sink.go_on(sum(map(len, map(self.vocabulary.token_text, stream.token_ids))))
            return
        for builder, sink, stream in zip(self._builders, self._sinks, self.streams, strict=True):
            sink.started(stream)
            if isinstance(builder, ChatStream):
                self._output.write(builder.role())

    def write(self, event: bytes) -> None:
        """Send an event."""
        self._output.write(event)

    def bypass(self, exchange: Exchange, template: EventTemplate) -> None:
        """Have plain tokens of the only stream go straight to the connection's flow, which takes HTTP chunks."""
        if len(self.streams) == 1:
            around_text = template.before, template.behind
            self._service.engine.bypass(self.streams[0], exchange.flow.fd, exchange.fell_behind, around_text)

    def last_event(self, builder: ChatStream | CompletionStream, reason: FinishReason) -> bytes:
        """Return the last event of a choice."""
        if reason is FinishReason.QUOTA_EXCEEDED:
            return builder.quota_exceeded(self.usage(), self._service.retry_after_s())
        return builder.finish(reason)

    def choice_finished(self) -> None:
        """End the response with the last choice."""
        self._open -= 1
        if self._open:
            return
        if self._request.include_usage():
            self._output.write(self._builders[0].usage(self.usage()))
        self._output.write(openai_response.DONE)
        self._output.end_stream()

    def choice_failed(self, error: ApiError) -> None:
        """End the response with an error; the other choices are stopped."""
        self._service.cancel(self)
        self._output.write(openai_response.error_event(error))
        self._output.end_stream()

    def cancelled_by_client(self) -> None:
        self._service.cancel(self)
        for sink in self._sinks:
            if not sink.is_over:
                sink.stream_finished(FinishReason.ABORT)


class _EventSink:
    """One choice of a streamed answer; `is_over` once its last event was made."""

    __slots__ = ("_answer", "_builder", "_index", "_offset", "_template", "is_over")

    def __init__(self, answer: _StreamedAnswer, builder: ChatStream | CompletionStream, index: int) -> None:
        self._answer = answer
        self._builder = builder
        self._index = index
        self._offset = 0
        self._template = EventTemplate(*builder.around_text())
        self.is_over = False

    def started(self, stream: Stream) -> None:
        """The response has begun; `stream` is what it tells."""

    def go_on(self, offset: int) -> None:
        """Go on behind so many characters, which another worker told."""
        self._offset = offset

    def text_arrived(self, text: str) -> None:
        self._write(self._template.event(_json(text)))

    def logprobs_arrived(self, text: str, positions: Sequence[TokenLogprobs]) -> None:
        logprobs = self._answer.format_logprobs(positions, self._offset)
        # Offsets are those of the tokens' own texts, as in a whole answer: a part of a character has one too.
        self._offset += sum(map(len, logprobs.get("tokens", ())))
        self._write(self._builder.delta_logprobs(text, logprobs))

    def note_arrived(self, note: str) -> None:
        self._answer.write(sse.comment(note))

    def stream_finished(self, reason: FinishReason) -> None:
        self.is_over = True
        self._answer.write(self._answer.last_event(self._builder, reason))
        self._answer.choice_finished()

    def stream_failed(self, error: ApiError) -> None:
        self._answer.choice_failed(error)

    def _write(self, event: bytes) -> None:
        self._answer.write(event)


class _DirectSink(_EventSink):
    """One whose events go to one connection."""

    __slots__ = ("_chunked", "_exchange", "_flow")

    def __init__(
        self, exchange: Exchange, answer: _StreamedAnswer, builder: ChatStream | CompletionStream, index: int
    ) -> None:
        super().__init__(answer, builder, index)
        self._exchange = exchange
        self._flow = exchange.flow
        self._chunked = True

    def started(self, stream: Stream) -> None:
        self._chunked = self._exchange.chunked  # it is known now how the response is framed
        stream.tells_each = True  # clients take the time between events for that between tokens
        if self._chunked:
            self._answer.bypass(self._exchange, self._template)

    def text_arrived(self, text: str) -> None:
        # The hot path: past the connection, straight to its flow.
        template, data = self._template, _json(text)
        waiting_bytes = self._flow.send(template.chunk(data) if self._chunked else template.event(data))
        if waiting_bytes:
            self._exchange.fell_behind(waiting_bytes)


class _KeptSink(_EventSink):
    """One whose events are kept, as far as there is room for them."""

    __slots__ = ("_events",)

    def __init__(
        self, events: KeptEvents, answer: _StreamedAnswer, builder: ChatStream | CompletionStream, index: int
    ) -> None:
        super().__init__(answer, builder, index)
        self._events = events

    def stream_finished(self, reason: FinishReason) -> None:
        self._events.choice_ended(self._index)
        super().stream_finished(reason)

    def note_arrived(self, note: str) -> None:
        self._events.note(note)

    def _write(self, event: bytes) -> None:
        refusal = self._events.refusal
        if refusal is None:
            self._events.write(event)
        else:
            self._answer.choice_failed(refusal)


_NewSink = Callable[[_StreamedAnswer, ChatStream | CompletionStream, int], _EventSink]


class _WholeAnswer(_OpenAIAnswer):
    __slots__ = ("_exchange", "_sinks")

    def __init__(self, service: Service, exchange: Exchange, request: _Request) -> None:
        super().__init__(service, exchange, request)
        self._exchange = exchange
        self._sinks: list[_TextSink] = []

    def sink(self, index: int) -> Sink:
        sink = _TextSink(self, index)
        self._sinks.append(sink)
        self._open += 1
        return sink

    def started(self) -> None:
        pass

    def choice_finished(self) -> None:
        """Send the response with the last choice."""
        self._open -= 1
        if self._open:
            return
        choices = [self._choice(sink) for sink in self._sinks]
        respond = openai_response.chat_response if self.is_chat else openai_response.completion_response
        exceeded = any(sink.reason is FinishReason.QUOTA_EXCEEDED for sink in self._sinks)
        retry_after_s = self._service.retry_after_s() if exceeded else None
        body = respond(self.id, self._model, self.created, choices, self.usage(), retry_after_s)
        self._exchange.respond(200, (("Content-Type", "application/json"),), body)

    def choice_failed(self, error: ApiError) -> None:
        """Answer with an error; the other choices are stopped."""
        self._service.cancel(self)
        self._exchange.fail(error)

    def _choice(self, sink: _TextSink) -> Choice:
        return Choice(sink.index, "".join(sink.parts), sink.reason, sink.logprobs)


class _TextSink:
    """One choice of a whole answer: its text so far, and its log probabilities, formatted as they come.

    All at the end would be a long time for the others to wait.
    """

    __slots__ = ("_answer", "_offset", "index", "logprobs", "parts", "reason")

    def __init__(self, answer: _WholeAnswer, index: int) -> None:
        self._answer = answer
        self.index = index
        self.parts: list[str] = []
        self._offset = 0
        self.logprobs: dict[str, Any] | None = None
        self.reason = FinishReason.STOP

    def text_arrived(self, text: str) -> None:
        self.parts.append(text)

    def logprobs_arrived(self, text: str, positions: Sequence[TokenLogprobs]) -> None:
        self.parts.append(text)
        logprobs = self._answer.format_logprobs(positions, self._offset)
        self._offset += sum(map(len, logprobs.get("tokens", ())))
        if self.logprobs is None:
            self.logprobs = logprobs
        else:
            openai_response.extend_logprobs(self.logprobs, logprobs)

    def note_arrived(self, note: str) -> None:
        """Nobody reads before the end."""

    def stream_finished(self, reason: FinishReason) -> None:
        self.reason = reason
        self._answer.choice_finished()

    def stream_failed(self, error: ApiError) -> None:
        self._answer.choice_failed(error)


def error_response(error: ApiError) -> tuple[tuple[tuple[str, str], ...], bytes]:
    """Return the headers and the body that tell an error over HTTP."""

    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    if (wait := retry_after(error)) is not None:
        headers += (("Retry-After", wait),)
    return headers, openai_error_body(error)
