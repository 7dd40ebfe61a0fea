"""From a request to running streams: what every door of a worker does in the same way.

The order is the order of cost: may the tenant (limits), can it fit (bytes), what is it (tokens), does it fit (tokens).
Long prompts are tokenised by a process of their own, so that the other streams of the tenant go on meanwhile.
"""

from __future__ import annotations

import array
import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from seedance.daemon.detokenizer import Vocabulary
from seedance.daemon.doors.errors import ApiError, api_error, invalid
from seedance.daemon.doors.infer import InferRequest
from seedance.daemon.doors.openai_request import ChatRequest, check_prompt_ids
from seedance.daemon.doors.parameters import Parameters, refuse_long_text, require_model, sampling
from seedance.daemon.engine_client import EngineClient
from seedance.daemon.journal_records import StreamRecord
from seedance.daemon.prompt_process import PromptProcess
from seedance.daemon.sampling_defaults import SamplingDefaults
from seedance.daemon.stop_strings import StopDetokenizer
from seedance.daemon.stream import Sink, Stream
from seedance.daemon.tokenizer import Tokenizer
from seedance.daemon.urgency import urgency
from seedance.engine.adapter import EngineState
from seedance.engine.channel import EngineChanged
from seedance.engine.request import NOT_URGENT, ModelInfo, Sampling, Urgency
from seedance.errors import SeedanceError
from seedance.qos.limiter import TenantLimiter, check_context
from seedance.qos.quota import Quota

R = TypeVar("R")
Prompt = str | list[int]
DRAIN_RETRY_S: Final = 2.0
"""Whoever asks while the service is being stopped may ask again so soon: a restart takes no longer without a model."""
_SERVING: Final = frozenset((EngineState.READY, EngineState.RECOVERING))
"""While an engine recovers, requests wait for it as those do that run."""
INLINE_CHARACTERS: Final = 8192
"""Up to this size a prompt is tokenised at once: another process would cost more than the milliseconds it takes."""
PROMPT_PROCESS_IDLE_S: Final = 60.0
"""So long after the last long prompt the process that reads them ends."""


class Served(NamedTuple):
    """A model, and what its requests need here; those that have begun with it end with it."""

    model: ModelInfo
    tokenizer: Tokenizer
    defaults: SamplingDefaults

    @property
    def identity(self) -> str:
        """Return what a stream can only go on with: the model's name, and what its token ids mean."""
        return f"{self.model.name} {self.model.tokens}".rstrip()


class Answer:
    """What becomes of one request; a door subclasses it. Each of its streams ends in a sink from `sink`.

    `served` is what the request has begun with, None before.
    """

    __slots__ = ("cancelled", "prompt_tokens", "served", "streams", "urgency")

    def __init__(self) -> None:
        self.served: Served | None = None
        self.streams: list[Stream] = []
        self.urgency = NOT_URGENT
        self.prompt_tokens = 0
        self.cancelled = False

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the tokens of the model that the streams are of."""
        assert self.served is not None
        return self.served.tokenizer.vocabulary

    @property
    def model(self) -> str:
        """Return what the streams can only go on with."""
        assert self.served is not None
        return self.served.identity

    def sink(self, index: int) -> Sink:
        """Return the sink of choice `index`; called once for each, before `started`."""
        raise NotImplementedError

    def started(self) -> None:
        """All streams have been submitted."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> None:
        """The request cannot run: the last call."""
        raise NotImplementedError

    def cancelled_by_client(self) -> None:
        """End with what there is; called only where the door offers it."""
        raise NotImplementedError


class Service:
    """One tenant's access to the engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, quota: Quota, limiter: TenantLimiter) -> None:
        self._loop = loop
        self._limiter = limiter
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._prompts: PromptProcess | None = None
        self._prompts_end: asyncio.TimerHandle | None = None
        self._tokenizer: Tokenizer | None = None
        self._defaults = SamplingDefaults()
        self._engine_state = EngineState.STARTING
        self.quota = quota
        self.model: ModelInfo | None = None
        self.engine: EngineClient
        self.draining = False
        self._expected: list[Callable[[], None]] = []

    def engine_changed(
        self, change: EngineChanged, tokenizer: Tokenizer | None, defaults: SamplingDefaults | None
    ) -> None:
        """Take the engine's news; tokenizer and sampling defaults come with the model."""
        self._engine_state = EngineState(change.state)
        if change.model is not None:
            self.model, self._tokenizer = change.model, tokenizer
            self.engine.use_vocabulary(() if tokenizer is None else tokenizer.vocabulary.entries)
            self._defaults = defaults or SamplingDefaults()
        self.resume_all()

    def resume_all(self) -> None:
        """Go on with the streams that another worker or engine had, if there is an engine now."""
        if self._engine_state in _SERVING and self._tokenizer is not None:
            expected, self._expected = self._expected, []
            for resume in expected:
                resume()
            self.engine.resume()

    def expect(self, resume: Callable[[], None], streams: int = 1) -> None:
        """Take places for streams that another worker had; `resume` is called when there is an engine for them."""
        for _ in range(streams):
            self._limiter.stream_resumed()
        self._expected.append(resume)

    def quota_changed(self, quota: Quota) -> None:
        """Use another quota from now on; what runs goes on."""
        self.quota = quota
        self._limiter.update(quota, self._loop.time())

    def require_engine(self) -> Served:
        """Return what is served. Raises ApiError while there is no engine to serve it."""
        if self.draining:
            text = "cannot take a new request: this tenant's service is being stopped"
            raise ApiError("overloaded", text, retry_after_s=DRAIN_RETRY_S)
        if self._engine_state not in _SERVING or self.model is None or self._tokenizer is None:
            raise ApiError("engine_unavailable", f"cannot serve now: the engine is {self._engine_state.value}")
        return Served(self.model, self._tokenizer, self._defaults)

    def admit(self, model_name: str | None, choices: int) -> None:
        """Count a request of so many streams against the limits. Raises ApiError; nothing is counted then."""
        model = self.require_engine().model
        if model_name is not None:
            require_model(model_name, model.name)
        refusal = self.engine.queue_refusal(self.quota.requests.queue, choices)
        if refusal is not None:
            self._limiter.refused_elsewhere()
        else:
            refusal = self._limiter.admit(self._loop.time(), choices)
        if refusal is not None:
            raise ApiError(refusal.code, refusal.message, retry_after_s=refusal.retry_after_s)

    def urgency(self, fd: int, deadline_ms: int | None) -> Urgency:
        """Return the urgency of a request that has just come on the connection `fd`."""
        return urgency(fd, deadline_ms, self._loop.time())

    def begin_chat(
        self, request: ChatRequest | InferRequest, answer: Answer, add_generation_prompt: bool = True
    ) -> None:
        """Render an admitted conversation, and go on as `begin` does. Never raises."""
        try:
            answer.served = self.require_engine()
            text = answer.served.tokenizer.render_chat(
                request.template_messages(), None, add_generation_prompt, request.template_variables()
            )
        except SeedanceError as exc:
            self._fail(answer, exc, request.choices())
        else:
            self.begin(request, [text], answer, chat=True)

    def begin(self, request: Parameters, prompts: Sequence[Prompt], answer: Answer, *, chat: bool = False) -> None:
        """Tokenise and submit an admitted request; tells `answer` how it went, at once or soon. Never raises."""
        choices = len(prompts) * request.choices()
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        try:
            served = answer.served = answer.served or self.require_engine()
            model, tokenizer, _ = served
            context_tokens = min(model.max_model_len, self.quota.tokens.context or model.max_model_len)
            refuse_long_text(
                iter(texts), context_tokens=context_tokens, longest_token_bytes=tokenizer.longest_token_bytes
            )
            if sum(map(len, texts)) > INLINE_CHARACTERS:
                self._begin_apart(request, prompts, answer, served, chat)
                return
            self._submit(request, _tokenised(tokenizer, prompts, chat), answer, served)
        except SeedanceError as exc:
            self._fail(answer, exc, choices)

    def begin_infer(self, request: InferRequest, answer: Answer) -> None:
        """Go on with an admitted request of the other doors, as `begin` does. Never raises."""
        if request.messages is None:
            assert request.prompt is not None
            self.begin(request, [request.prompt], answer)
        else:
            self.begin_chat(request, answer)

    def retry_after_s(self) -> float:
        """Return when the tenant may begin another stream, as far as is known now; 0.0 for at once."""
        return self._limiter.retry_after_s(self._loop.time())

    def cancel(self, answer: Answer) -> None:
        """Stop what an answer's streams do; nothing is told to it or its sinks any more. Idempotent."""
        answer.cancelled = True
        self.engine.abort(answer.streams)

    def in_thread(self, call: Callable[..., R], *arguments: Any) -> asyncio.Future[R]:
        """Make a call that takes long in a thread; one after the other."""
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(1, "prompts")
        return self._loop.run_in_executor(self._threads, call, *arguments)

    def close(self) -> None:
        """End what long prompts have needed; idempotent."""
        if self._prompts_end is not None:
            self._prompts_end.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._prompts is not None:
            self._prompts.end()

    def _begin_apart(
        self, request: Parameters, prompts: Sequence[Prompt], answer: Answer, served: Served, chat: bool
    ) -> None:
        choices = len(prompts) * request.choices()
        future = self.in_thread(self._tokenised_apart, served.tokenizer, prompts, chat)

        def tokenised(done: asyncio.Future[list[Sequence[int]]]) -> None:
            if done.cancelled():
                return
            self._end_prompts_later()
            try:
                token_ids = done.result()
                if answer.cancelled:
                    self.release(choices)
                else:
                    self._submit(request, token_ids, answer, served)
            except SeedanceError as exc:
                self._fail(answer, exc, choices)

        future.add_done_callback(tokenised)

    def _tokenised_apart(self, tokenizer: Tokenizer, prompts: Sequence[Prompt], chat: bool) -> list[Sequence[int]]:
        """Do what `_tokenised` does, in the thread, by the process that has the tokenizer."""
        process = self._prompts
        if process is None or process.tokenizer is not tokenizer:
            if process is not None:
                process.end()
            process = self._prompts = PromptProcess(tokenizer)
        return [process.encode(prompt, chat) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _end_prompts_later(self) -> None:
        if self._prompts_end is not None:
            self._prompts_end.cancel()
        if self._prompts is not None:
            # In the thread: after the prompts that are there by then.
            self._prompts_end = self._loop.call_later(PROMPT_PROCESS_IDLE_S, self.in_thread, self._prompts.end)

    def _submit(self, request: Parameters, prompts: Sequence[Sequence[int]], answer: Answer, served: Served) -> None:
        """Check what is known only now, then submit all choices; raises before the first of them or not at all."""
        self.require_engine()
        model, _, defaults = served
        submits = []
        for token_ids in prompts:
            if not token_ids:
                raise invalid("cannot use 'prompt': it has no tokens; send some text", "prompt")
            check_prompt_ids(token_ids, model.vocab_size)
            room = check_context(self.quota.tokens, model.max_model_len, len(token_ids), None)
            if not isinstance(room, int):
                raise ApiError(room.code, room.message)
            for choice in range(request.choices()):
                parameters = sampling(
                    request,
                    prompt_tokens=len(token_ids),
                    context_tokens=len(token_ids) + room,
                    vocab_size=model.vocab_size,
                    choice=choice,
                    defaults=defaults,
                )
                submits.append((token_ids, parameters))
        answer.prompt_tokens = sum(map(len, prompts))  # once for all choices, as OpenAI counts
        charged_at = self._charge_prompt(answer.prompt_tokens)
        for index, (token_ids, parameters) in enumerate(submits):
            stream = self._stream(request, answer, index, served, token_ids, parameters)
            if index % request.choices() == 0:
                stream.charged_at, stream.charged_tokens = charged_at, len(token_ids)
            answer.streams.append(stream)
        for stream, (token_ids, parameters) in zip(answer.streams, submits, strict=True):
            self.engine.submit(stream, token_ids, parameters, answer.urgency)
        answer.started()

    def _charge_prompt(self, prompt_tokens: int) -> float:
        """Charge the tokens of prompts; returns when."""
        now = self._loop.time()
        remaining = self._limiter.remaining(now)
        if remaining is not None and prompt_tokens >= remaining:
            raise ApiError(
                "quota_exceeded",
                f"cannot take a prompt of {prompt_tokens} tokens: your quota has {remaining} left for now",
            )
        self._limiter.charge(now, prompt_tokens=prompt_tokens)
        return now

    def resume(self, request: Parameters, answer: Answer, records: Sequence[StreamRecord]) -> list[str]:
        """Go on with the streams of a request that another worker had, which were expected, those that have not ended.

        Returns the text so far of each. Raises ApiError when going on is impossible.
        """
        assert self.model is not None and self._tokenizer is not None
        served = answer.served = Served(self.model, self._tokenizer, self._defaults)
        others = {record.model for record in records} - {served.identity}
        if others:
            self.release(sum(record.ended_tokens is None for record in records))
            text = f"cannot go on with a stream of model '{others.pop()}': '{served.identity}' is served now"
            raise ApiError("engine_unavailable", text)
        texts = [self._resume(request, answer, index, served, record) for index, record in enumerate(records)]
        answer.started()
        return texts

    def _resume(self, request: Parameters, answer: Answer, index: int, served: Served, record: StreamRecord) -> str:
        assert record.sampling is not None
        prompt, token_ids = (array.array("I", data) for data in (record.prompt_token_ids, record.token_ids))
        stream = self._stream(request, answer, index, served, prompt, record.sampling)
        answer.streams.append(stream)
        stream.prompt_token_ids, stream.sampling, stream.token_ids = prompt, record.sampling, token_ids
        stream.cached_tokens = record.cached_tokens
        if record.ended_tokens is not None:
            stream.output_tokens = record.ended_tokens
            return ""
        stream.output_tokens = len(token_ids)
        # What has ended a stream has no text; then the end itself was not told.
        ended = bool(token_ids) and token_ids[-1] in stream.hidden_token_ids
        told = stream.stop or stream.detokenizer
        text = told.feed(token_ids[: len(token_ids) - ended])
        stream.plain = stream.stop is None and stream.detokenizer.is_plain
        self.engine.adopt(stream)
        return text

    def _stream(
        self,
        request: Parameters,
        answer: Answer,
        index: int,
        served: Served,
        token_ids: Sequence[int],
        parameters: Sampling,
    ) -> Stream:
        include = bool(request.include_stop_str_in_output)
        detokenizer = served.tokenizer.detokenizer(token_ids)
        stopping = None
        if stop := request.stop_strings():
            stopping = StopDetokenizer(detokenizer, stop, include_stop=include, min_tokens=parameters.min_tokens)
        stream = Stream(answer.sink(index), detokenizer, stopping)
        if not include:
            stream.hidden_token_ids = parameters.stop_token_ids
        stream.tokens = served.model.tokens
        return stream

    def _fail(self, answer: Answer, error: SeedanceError, choices: int) -> None:
        self.release(choices)
        if not answer.cancelled:
            answer.failed(api_error(error))

    def release(self, choices: int) -> None:
        """Free the places of so many streams that do not run."""
        for _ in range(choices):
            self._limiter.stream_ended()


def _tokenised(tokenizer: Tokenizer, prompts: Sequence[Prompt], chat: bool) -> list[Sequence[int]]:
    encode = tokenizer.encode_chat if chat else tokenizer.encode
    return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
