"""The worker's end of the engine channel: streams out of batches.

The channel is a flow of the worker's driver like any other: what one step of the engine brought for this worker arrives
in one read, and everything that the step makes us send leaves with the enter that waits for the next one.
"""

from __future__ import annotations

import array
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from seedance.daemon.decoder_table import Entry
from seedance.daemon.doors.errors import ApiError
from seedance.daemon.event_columns import EventColumns
from seedance.daemon.fm_columns import FmColumns
from seedance.daemon.journal import Journal
from seedance.daemon.plain_streams import PlainStreams
from seedance.daemon.ring.driver import Driver, Flow
from seedance.daemon.start_queue import StartQueue
from seedance.daemon.stream import Stream
from seedance.daemon.stream_columns import FEWEST, Sends, StreamColumns
from seedance.engine.adapter import EngineState
from seedance.engine.channel import (
    PAIR_BYTES,
    Abort,
    Batch,
    Delta,
    EngineChanged,
    ModelComing,
    ModelPrepared,
    Noted,
    QueueBound,
    Receiver,
    Refused,
    SetPaused,
    Submit,
    ToWorker,
    encode,
    pack_singles,
)
from seedance.engine.emitted import Emitted
from seedance.engine.failover import CONTINUED, RESTARTING
from seedance.engine.request import NOT_URGENT, FinishReason, Sampling, Urgency
from seedance.errors import RemoteProtocolError
from seedance.qos.limiter import Refusal, TenantLimiter

_log = logging.getLogger(__name__)
HOLD_S: Final = 120.0
"""So long a stream that no session keeps waits for another engine host."""
_FEWEST_OF_ROWS: Final = 2
_TRANSIENT: Final = ("overloaded", "engine_unavailable")
_GONE: Final = ApiError(
    "engine_unavailable", "cannot finish this request: the engine went away; it is being restarted, ask again"
)


class EngineClient:
    """The streams of one worker; an endpoint of the channel's flow.

    Every stream in here has one place in the limiter, which is freed when it leaves, however it ends. Streams outlive
    the engine host: those that it had are held, and given to the next one with all that came of them (`resume`).
    """

    def __init__(
        self,
        driver: Driver,
        limiter: TenantLimiter,
        clock: Callable[[], float],
        engine_changed: Callable[[EngineChanged], None],
        plain_frame: Callable[[str], bytes],
        journal: Journal | None = None,
        model_coming: Callable[[str], None] | None = None,
        fewest_in_columns: int = FEWEST,
    ) -> None:
        """`plain_frame` makes what goes past the sinks for a text; see `bypass`.

        `model_coming(tokenizer_dir)` is answered by `model_prepared`. With so many streams some are taken in columns.
        """
        self._fewest = fewest_in_columns
        self._journal = journal or Journal()
        self._model_coming = model_coming or (lambda tokenizer_dir: self.model_prepared(tokenizer_dir, ""))
        self._driver = driver
        self._limiter = limiter
        self._clock = clock
        self._engine_changed = engine_changed
        self._streams: dict[int, Stream] = {}
        self._emitted = Emitted(self._streams)
        self._held: dict[int, Stream] = {}
        self._held_until_s = 0.0
        self._number = 0
        self._unstarted: dict[int, Stream] = {}
        self._queue = StartQueue()
        self._texts: Sequence[Entry] = ()
        self._plain_streams = PlainStreams(plain_frame)
        self._event_columns = EventColumns()
        self._columns: tuple[StreamColumns, ...] = (self._event_columns, self._plain_streams)
        self.fm_columns = FmColumns(driver.send_each)
        self._bypassed: dict[int, Stream] = {}  # by descriptor
        self._flow: Flow | None = None
        self._receiver: Receiver[ToWorker] = Receiver(ToWorker)

    def __len__(self) -> int:
        return len(self._streams)

    def use_vocabulary(self, entries: Sequence[Entry]) -> None:
        """Take the vocabulary's entries: most tokens are a text by themselves.

        Streams whose tokens are of another one go the longer way from here, by their own detokenizers.
        """
        if self._texts is not entries:
            self._texts = entries
            for columns in self._columns:
                columns.use_vocabulary(len(entries))
            self.fm_columns.use_vocabulary(entries)
            for stream in self._streams.values():
                stream.plain = stream.plain and stream.detokenizer.entries is entries
                self._choose_way(stream)

    def connect(self, fd: int) -> None:
        """Use a fresh channel from now on; the last one's streams are held until `resume`."""
        if self._flow is not None:
            self._flow.abort()
            self._hold(self._streams.values())
        self._receiver = Receiver(ToWorker)
        self._queue.bound = QueueBound(None, 0.0)
        self._flow = self._driver.open(fd, self)

    def queue_refusal(self, limit: int | None, streams: int = 1) -> Refusal | None:
        """Say why no request of so many streams is taken: too many wait for their first token.

        They do from the moment that they were admitted. `limit` is the tenant's own.
        """
        waiting = self._limiter.statistics().streams - (len(self._streams) - len(self._unstarted))
        return self._queue.refusal(waiting, limit, self._clock(), streams)

    def submit(
        self, stream: Stream, prompt_token_ids: Sequence[int], sampling: Sampling, urgency: Urgency = NOT_URGENT
    ) -> None:
        """Begin a stream, which has its place in the limiter already; its prompt has been charged."""
        stream.prompt_token_ids = array.array("I", prompt_token_ids)
        stream.sampling, stream.urgency = sampling, urgency
        self._take_in(stream)
        self._send(Submit(stream.number, stream.prompt_token_ids, sampling, urgency, tokens=stream.tokens))

    def adopt(self, stream: Stream) -> None:
        """Take in a stream that another worker had, with what came of it; the engine gets it with the next `resume`."""
        self._take_in(stream)
        self._hold([stream])

    def _take_in(self, stream: Stream) -> None:
        self._number = self._number % (2**32 - 1) + 1
        stream.number = self._number
        stream.is_sampled = stream.sampling.temperature > 0
        stream.plain = stream.plain and stream.detokenizer.entries is self._texts
        self._streams[stream.number] = stream
        if not stream.token_ids:
            self._unstarted[stream.number] = stream

    def resume(self) -> None:
        """Give the engine, which is ready, the streams that are held."""
        if self._flow is None or not self._held:
            return
        self._emitted.fold()
        held, self._held = self._held, {}
        for stream in held.values():
            stream.is_resumed = True
            prompt, emitted = stream.prompt_token_ids, stream.token_ids
            self._send(Submit(stream.number, prompt, stream.sampling, stream.urgency, emitted, stream.tokens))
        paused = [stream.number for stream in held.values() if stream.is_paused]
        if paused:
            self._send(SetPaused(paused, True))
        # Of those that are drawn by chance the host says how they go on.
        self._tell(CONTINUED, [s.number for s in held.values() if s.token_ids and not s.is_sampled])

    def end_overdue(self) -> None:
        """End what has been held for too long, unless a session keeps it."""
        if self._held and self._clock() >= self._held_until_s:
            self._end([stream for stream in self._held.values() if not stream.is_kept], _GONE)

    def fold(self) -> None:
        """Bring `Stream.token_ids` of all streams up to date."""
        self._emitted.fold()

    def _hold(self, streams: Iterable[Stream]) -> None:
        if not self._held:
            self._held_until_s = self._clock() + HOLD_S
        self._held.update((stream.number, stream) for stream in streams)

    def bypass(
        self,
        stream: Stream,
        fd: int,
        fell_behind: Callable[[int], None],
        around_text: tuple[bytes, bytes] | None = None,
    ) -> None:
        """Send a plain token's frame straight to the flow of `fd`, past the stream's sink.

        That is what `plain_frame` makes of its text or, with what stands `around_text` in them, an event in an HTTP
        chunk. `fell_behind` is told how many bytes wait there. No other stream may have the same flow for this.
        """
        if self._streams.get(stream.number) is not stream or fd < 0:  # it, or its connection, has ended
            return
        if around_text is None:
            columns: StreamColumns = self._plain_streams
            is_in = columns.add(stream.number, fd)
        else:
            columns = self._event_columns
            is_in = self._event_columns.add_stream(stream.number, fd, *around_text)
        if is_in:
            stream.columns, stream.bypass_fd, stream.fell_behind = columns, fd, fell_behind
            self._bypassed[fd] = stream
            self._choose_way(stream)

    def _choose_way(self, stream: Stream) -> None:
        if stream.columns is not None:
            stream.columns.set_plain(stream.number, stream.plain)
        elif stream.in_columns:
            self.fm_columns.set_plain(stream.number, stream.plain)

    def suits_columns(self, stream: Stream) -> bool:
        """Tell whether a stream is among so many others that it is cheaper to take all together."""
        return len(self._streams) >= self._fewest and self._streams.get(stream.number) is stream

    def abort(self, streams: Iterable[Stream]) -> None:
        """End streams without another call on their sinks; those that have ended already are passed over."""
        numbers = [stream.number for stream in streams if self._remove(stream)]
        if numbers:
            self._send(Abort(numbers))

    def set_paused(self, streams: Iterable[Stream], is_paused: bool) -> None:
        """Have the engine leave streams out of its steps, as their clients take nothing; or take them in again."""
        numbers = []
        for stream in streams:
            if stream.is_paused != is_paused and self._streams.get(stream.number) is stream:
                stream.is_paused = is_paused
                numbers.append(stream.number)
        if numbers:
            self._send(SetPaused(numbers, is_paused))

    def end_all(self, error: ApiError, *, is_kept: bool = True) -> None:
        """End every stream with an error; with `is_kept` off, those alone that no session keeps."""
        self._end([stream for stream in self._streams.values() if is_kept or not stream.is_kept], error)

    def _end(self, streams: Sequence[Stream], error: ApiError) -> None:
        if streams:
            self._send(Abort([stream.number for stream in streams]))
        for stream in streams:
            if self._remove(stream):
                stream.sink.stream_failed(error)

    def close(self) -> None:
        """Close the channel; the host aborts what is left."""
        if self._flow is not None:
            self._flow.abort()

    def model_prepared(self, tokenizer_dir: str, reason: str) -> None:
        """Tell the host that a model which is coming can be served here, or why not."""
        self._send(ModelPrepared(tokenizer_dir, reason))

    def _send(self, message: Submit | Abort | SetPaused | ModelPrepared) -> None:
        if self._flow is not None:
            self._flow.send(encode(message))

    def _remove(self, stream: Stream) -> bool:
        if self._streams.pop(stream.number, None) is None:
            return False
        self._unstarted.pop(stream.number, None)
        self._held.pop(stream.number, None)
        if stream.in_columns:
            self.fm_columns.send_back(stream.number)
        if stream.columns is not None:
            del self._bypassed[stream.bypass_fd]
            stream.output_tokens += stream.columns.remove(stream.number)
        self._limiter.stream_ended()
        return True

    # -- endpoint of the channel --------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._receiver.receive_data(data)
        except RemoteProtocolError as exc:
            _log.error("cannot go on with the engine channel: %s", exc)
            if self._flow is not None:
                self._flow.abort()
            return
        for message in messages:
            if isinstance(message, Batch):
                batch = self._within_quota(message)
                if self._unstarted:
                    self._note_starts(batch)
                self._journal.is_in_step = True
                try:
                    self._step_completed(batch)
                finally:
                    self._journal.is_in_step = False
            else:
                self._take(message)

    def _take(self, message: EngineChanged | QueueBound | Noted | ModelComing | Refused) -> None:
        if isinstance(message, EngineChanged):
            if message.state == EngineState.DEAD:
                # What was submitted before this was read may have reached the next engine; what is held has not.
                self._end([stream for stream in self._streams.values() if stream.number not in self._held], _GONE)
            self._engine_changed(message)
            if message.note:
                self._tell(message.note, list(self._streams))
        elif isinstance(message, QueueBound):
            self._queue.bound = message
        elif isinstance(message, Noted):
            self._tell(message.note, message.streams, is_same=message.is_same)
        elif isinstance(message, ModelComing):
            self._model_coming(message.tokenizer_dir)
        else:
            self._refused(message)

    def _refused(self, message: Refused) -> None:
        stream = self._streams.get(message.stream)
        if stream is None:
            return
        if stream.is_resumed and message.code in _TRANSIENT:
            self._hold([stream])
        elif self._remove(stream):
            if stream.charged_tokens and not stream.output_tokens:
                self._limiter.refund(self._clock(), stream.charged_at, stream.charged_tokens)
            error = ApiError(message.code, message.message, retry_after_s=message.retry_after_s)
            stream.sink.stream_failed(error)

    def eof_received(self) -> None:
        if self._flow is not None:
            self._flow.abort()

    def backlog_drained(self) -> None:
        pass

    def connection_lost(self, error: OSError | None) -> None:
        if self._flow is not None and self._flow.fd < 0:
            self._flow = None
            self._hold(self._streams.values())
            self._engine_changed(EngineChanged(EngineState.DEAD, "the engine host went away", None))
            self._tell(RESTARTING, list(self._streams))

    # -- streams ------------------------------------------------------------------------------------------------------

    def _step_completed(self, batch: Batch) -> None:  # noqa: C901 - calls would cost more than what they would hide
        # Each token of each stream passes through here; with many streams nearly all of them go past their sinks.
        deltas = batch.deltas
        self._emitted.add(batch.singles, [(delta.stream, delta.token_ids) for delta in deltas] if deltas else ())
        if self._journal.streams:
            self._journal.tokens(batch)
        # Who is a row already would have to leave it for a token that comes another way.
        fewest = min(self._fewest, _FEWEST_OF_ROWS) if len(self.fm_columns) else self._fewest
        in_columns = len(batch.singles) >= fewest * PAIR_BYTES
        tokens, others = self._past_sinks(batch) if in_columns else (0, batch.pairs())
        find, texts = self._streams.get, self._texts
        last = len(texts) - 1
        for number, token_id in others:
            stream = find(number)
            if stream is None:
                continue  # aborted when this was under way
            tokens += 1
            stream.output_tokens += 1
            if stream.plain and token_id <= last:
                text = texts[token_id]
                if isinstance(text, str):
                    if in_columns and text and stream.columns is not None:
                        stream.columns.learn(number, token_id, text)
                    if text or stream.tells_each:
                        stream.sink.text_arrived(text)
                    continue
            self._advance(stream, Delta(number, [token_id]))
        for delta in deltas:
            stream = find(delta.stream)
            if stream is None:
                continue
            tokens += len(delta.token_ids)
            stream.output_tokens += len(delta.token_ids)
            stream.cached_tokens += delta.cached_tokens
            self._advance(stream, delta)
        self.fm_columns.prepare()
        if tokens and not self._limiter.charge(self._clock(), tokens):
            self._quota_exceeded()

    def _note_starts(self, batch: Batch) -> None:
        touched = {number for number, _ in batch.pairs()} | {delta.stream for delta in batch.deltas}
        started = touched & self._unstarted.keys()
        for number in started:
            del self._unstarted[number]
        if started:
            self._queue.started(len(started), self._clock())

    def _within_quota(self, batch: Batch) -> Batch:
        """Return a batch without what the quota has no room for."""
        remaining = self._limiter.remaining(self._clock())
        if remaining is None or remaining >= batch.tokens:
            return batch
        return self._first_tokens(batch, remaining)

    def _first_tokens(self, batch: Batch, count: int) -> Batch:
        """Return a batch cut to so many tokens of streams that live, all that the quota has left for them."""
        singles: list[int] = []
        for number, token_id in batch.pairs():
            if number in self._streams and count > 0:
                count -= 1
                singles += (number, token_id)
        for delta in batch.deltas:
            if delta.stream in self._streams:
                if len(delta.token_ids) > count:
                    del delta.token_ids[count:]
                    delta.finish_reason = None
                    delta.logprobs = delta.logprobs and delta.logprobs[:count]
                count -= len(delta.token_ids)
        return Batch(batch.deltas, pack_singles(singles))

    def _past_sinks(self, batch: Batch) -> tuple[int, Iterable[tuple[int, int]]]:
        """Have what can be taken in columns sent; return how many tokens that were, and what is left."""
        flat = np.frombuffer(batch.singles, np.uint32)
        numbers, token_ids = flat[0::2], flat[1::2]
        tokens = 0
        for columns in self._columns:
            if not len(columns):
                continue
            sends, numbers, token_ids = columns.take(numbers, token_ids)
            if sends is not None:
                tokens += len(sends.fds)
                self._send_past_sinks(sends)
            if not len(numbers):
                return tokens, ()
        taken, numbers, token_ids = self.fm_columns.take(numbers, token_ids)
        return tokens + taken, zip(numbers.tolist(), token_ids.tolist(), strict=True)

    def _send_past_sinks(self, sends: Sends) -> None:
        for fd, waiting_bytes in self._driver.send_each(*sends):
            if (stream := self._bypassed.get(fd)) is not None:
                stream.fell_behind(waiting_bytes)

    def _advance(self, stream: Stream, delta: Delta) -> None:
        """Take a delta that may end its stream, or has more than one token."""
        reason, stop, token_ids = delta.finish_reason, stream.stop, delta.token_ids
        if reason is FinishReason.STOP and token_ids and token_ids[-1] in stream.hidden_token_ids:
            token_ids = token_ids[:-1]
        text = (stop or stream.detokenizer).feed(token_ids)
        stream.plain = stop is None and stream.detokenizer.is_plain and stream.detokenizer.entries is self._texts
        self._choose_way(stream)
        surplus_tokens = 0
        if stop is not None and stop.stopped is not None:
            surplus_tokens = stop.surplus_tokens
            stream.output_tokens -= surplus_tokens
            if reason is None:
                self._send(Abort([stream.number]))
            reason = FinishReason.STOP
        elif reason is not None:
            text += (stop or stream.detokenizer).finish()
        if delta.logprobs is not None:
            stream.sink.logprobs_arrived(text, delta.logprobs[: len(delta.logprobs) - surplus_tokens])
        elif text or (stream.tells_each and reason is None):
            stream.sink.text_arrived(text)
        # Telling it may have ended the stream from outside: a client whose backlog is full is cut off.
        if reason is not None and self._remove(stream):
            if reason is FinishReason.ERROR:
                stream.sink.stream_failed(ApiError("internal", delta.error or "the engine failed on this request"))
            else:
                stream.sink.stream_finished(reason)

    def _tell(self, note: str, numbers: Iterable[int], *, is_same: bool = False) -> None:
        """Tell the clients of streams what is going on with the engine."""
        for number in numbers:
            stream = self._streams.get(number)
            if stream is not None:  # who reads too slowly is cut off by a word more
                is_drawn_anew = stream.is_sampled and not is_same and note.startswith(CONTINUED)
                stream.sink.note_arrived(f"{note}, what comes is drawn anew" if is_drawn_anew else note)

    def _quota_exceeded(self) -> None:
        streams = list(self._streams.values())
        self.abort(streams)
        for stream in streams:
            if text := (stream.stop or stream.detokenizer).finish():
                stream.sink.text_arrived(text)
            stream.sink.stream_finished(FinishReason.QUOTA_EXCEEDED)
