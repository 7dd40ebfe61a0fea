"""The engine host: the process between the workers and one engine.

It takes requests from the workers' channels, gives them to the active engine (`engines`), and hands out the outputs of
each engine step as one batch a channel. It keeps what every generation has brought: when its engine dies, the next one
goes on with it. The host ends when the supervisor says so or closes the control link, and on SIGTERM; SIGINT is the
supervisor's business, which shares our terminal.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Final

from seedance.engine import failover, host_link
from seedance.engine.adapter import EngineState, EngineStatistics, Output
from seedance.engine.channel import (
    Abort,
    Delta,
    EngineChanged,
    ModelPrepared,
    Noted,
    Refused,
    Submit,
    ToHost,
    pack_singles,
)
from seedance.engine.engine import Engine, Role
from seedance.engine.engine_queue import EngineQueue
from seedance.engine.engines import Engines
from seedance.engine.generations import Generations
from seedance.engine.host_channel import Channel, Generation, by_engine
from seedance.engine.host_loads import HostLoads
from seedance.engine.ledger import STREAMS, Ledger
from seedance.engine.packets import PacketSocket
from seedance.engine.recorder import Recorder
from seedance.engine.request import FinishReason, ModelInfo
from seedance.engine.settings import EngineSettings
from seedance.engine.source import EngineSource, create_source
from seedance.errors import EngineDead, EngineError, RemoteProtocolError

_STATISTICS_TIMEOUT_S: Final = 5.0
_DETAIL_CHARACTERS: Final = 2_000

log = logging.getLogger("seedance.engine.host")


_OTHER_TOKENS: Final = EngineError(
    "engine_unavailable",
    "cannot take this request: another model is served than the one that it was read for; ask again",
)


def _understands(engine: Engine, tokens: str) -> bool:
    """Return whether token ids of this meaning are what an engine's model was trained with."""
    return not tokens or engine.model is None or engine.model.tokens == tokens


class EngineHost:
    """The host, on a running event loop: an `EnginesOwner` and a `ChannelOwner`. Owns the control socket.

    `first_restart_s` is the wait before the second restart of an engine that keeps dying; see `failover.Restarts`.
    """

    def __init__(
        self, control: socket.socket, loop: asyncio.AbstractEventLoop, *, first_restart_s: float = 1.0
    ) -> None:
        self._loop = loop
        self._first_restart_s = first_restart_s
        self.engines: Engines | None = None
        self._state = EngineState.STOPPED
        self._detail = ""
        self._model: ModelInfo | None = None
        self._engine_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._ledger: Ledger | None = None
        self._queue = EngineQueue(0)
        self._recorder: Recorder | None = None
        self._channels: dict[int, Channel] = {}
        self._generations = Generations()
        self._loads: HostLoads | None = None
        self._link = PacketSocket(control, loop, self._packet_received, self.stop)

    async def serve(self) -> None:
        """Serve until told to stop, then end the engine. Raises what a bug in an adapter raised."""
        try:
            await self._stopping.wait()
        finally:
            await self._shut_down()
        if self._engine_task is not None and not self._engine_task.cancelled():
            self._engine_task.result()

    def stop(self) -> None:
        """Make `serve` return; idempotent."""
        self._stopping.set()

    def start_engine(self, source: EngineSource, settings: EngineSettings, ledger: Ledger) -> None:
        """Bring an engine up and keep it up; call it once. The ledger is the host's from here."""
        self._ledger = ledger
        self._queue = EngineQueue(settings.queue)
        self.engines = Engines(source, settings, ledger, self, self._first_restart_s)
        self._loads = HostLoads(
            self.engines, self._channels, self._generations, self._tell, self._free_key, self.move, self._fail
        )
        self._engine_task = self._loop.create_task(self.engines.keep())
        self._engine_task.add_done_callback(lambda _: self.stop())

    # The engine's news.

    def step_completed(self, outputs: Sequence[Output], singles: bytes = b"") -> None:
        """Hand out what one engine step brought; the lists in it belong to the host from here."""
        generations = self._generations
        if self._queue:
            keys = [*(output.key for output in outputs), *array.array("I", singles)[::2]]
            self._queue.started(keys, self._loop.time())
            self._tell_queue()
        others: list[Output] = []
        flat: list[int] = []
        for output in outputs:
            if output.is_single:
                flat += (output.key, output.token_ids[0])
            else:
                others.append(output)
        if flat:
            singles += pack_singles(flat)
        generations.brought(singles, others)
        touched: set[Channel] = set()
        for channel, pairs in generations.by_channel(singles) if singles else ():
            channel.singles = pairs
            touched.add(channel)
        if others:
            self._hand_out(others, touched)
        for channel in touched:
            channel.flush()

    def _hand_out(self, outputs: Sequence[Output], touched: set[Channel]) -> None:
        """Give outputs to their channels, which are `touched`; generations that have ended with theirs are removed."""
        for output in outputs:
            generation = self._generations.get(output.key)
            if generation is None:  # aborted while the step ran
                continue
            generation.channel.deltas.append(
                Delta(
                    generation.stream,
                    output.token_ids,
                    output.finish_reason,
                    output.logprobs,
                    output.cached_tokens,
                    output.error,
                )
            )
            touched.add(generation.channel)
            if output.finish_reason is not None:
                self._remove(generation)
                if self._recorder is not None:
                    self._recorder.ended(output.key)

    def state_changed(self, state: EngineState, detail: str, note: str = "") -> None:
        """Tell workers and supervisor; with DEAD everything that runs or waits is lost."""
        engine = self.engines.active if self.engines is not None else None
        if engine is not None:
            self._model = engine.model
        if state is EngineState.DEAD:
            self._model = None
            self._abort(list(self._generations))
        self._state = state
        self._detail = detail[:_DETAIL_CHARACTERS]
        log.info("engine is %s%s", state, f": {self._detail}" if detail else "")
        for channel in self._channels.values():
            channel.send(self._news(note))
        self._tell(host_link.EngineChanged(state.value, self._detail, self._model))

    def engine_ended(self, engine: Engine) -> None:
        """Let the generations of a dead engine wait for the next one, but those that have seen too many die."""
        lost = [generation for generation in self._generations if generation.engine is engine]
        for generation in lost:
            generation.engine = None
            generation.deaths += 1
            if generation.deaths >= failover.DEATHS:
                text = f"cannot finish this request: {generation.deaths} engines in a row died at work on it"
                self._fail(generation, EngineError("engine_unavailable", text))

    def engine_left(self, engine: Engine) -> None:
        """Let the generations of an engine that was stopped wait for the next one."""
        for generation in self._generations:
            if generation.engine is engine:
                generation.engine = None

    def engine_takes(self, engine: Engine) -> None:
        """Have an engine go on with all that waits for one."""
        self._generations.fold()
        waiting = [generation for generation in self._generations if generation.engine is None]
        for generation in failover.in_order(waiting):
            self._go_on(generation, engine)

    def move(self, source: Engine, target: Engine) -> None:
        """Have another engine go on with what one runs."""
        for generation in failover.in_order(self._generations.take_back(source)):
            self._go_on(generation, target)

    def _go_on(self, generation: Generation, engine: Engine) -> None:
        channel = generation.channel
        if not _understands(engine, generation.tokens):
            self._fail(generation, _OTHER_TOKENS)
            return
        if generation.token_ids and (reason := self._end_of(generation)) is not None:
            self._forget_one(generation)
            channel.deltas.append(Delta(generation.stream, [], reason))
            channel.flush()
            return
        try:
            self._give(generation, engine)
        except EngineDead:
            generation.engine = None  # news of its end is on the way
        except EngineError as exc:
            self._fail(generation, exc)

    def _give(self, generation: Generation, engine: Engine) -> None:
        """Have an engine begin a generation, or go on with it. Raises EngineError."""
        engine.adapter.submit(
            generation.key,
            generation.channel.tenant,
            generation.prompt_token_ids,
            generation.sampling,
            generation.urgency,
            generation.token_ids,
            generation.claim,
        )
        generation.engine = engine
        if generation.is_paused:
            engine.adapter.set_paused([generation.key], True)

    def _end_of(self, generation: Generation) -> FinishReason | None:
        """Return why a generation has nothing left to generate, None when it has."""
        assert self._model is not None
        room = self._model.max_model_len - len(generation.prompt_token_ids)
        return generation.sampling.end_of(generation.token_ids, room, self._model.eos_token_ids)

    def _fail(self, generation: Generation, error: EngineError) -> None:
        self._forget_one(generation)
        self._refuse(generation.channel, generation.stream, error)

    def _refuse(self, channel: Channel, stream: int, error: EngineError) -> None:
        wait_s = self._queue.wait_s(self._loop.time()) if error.code == "overloaded" else None
        channel.send(Refused(stream, error.code, error.message, wait_s))

    def _news(self, note: str = "") -> EngineChanged:
        return EngineChanged(self._state.value, self._detail, self._model, note)

    # The workers' wishes.

    def message_received(self, channel: Channel, message: ToHost) -> None:
        """Begin or end generations."""
        if isinstance(message, Submit):
            refusal = self._begin(channel, message)
            if refusal is not None:
                self._refuse(channel, message.stream, refusal)
        elif isinstance(message, Abort):
            self._abort([channel.generations[s] for s in set(message.streams) if s in channel.generations])
            channel.discard(message.streams)
        elif isinstance(message, ModelPrepared):
            if self._loads is not None:
                self._loads.worker_prepared(channel, message)
        else:
            self._pause(
                [channel.generations[s] for s in message.streams if s in channel.generations], message.is_paused
            )

    def _begin(self, channel: Channel, message: Submit) -> EngineError | None:
        """Begin a generation, or return why it cannot be; while an engine recovers it waits for the next one."""
        if self.engines is None or self._state not in {EngineState.READY, EngineState.RECOVERING}:
            return EngineError("engine_unavailable", f"cannot generate: the engine is {self._state.value}")
        if not channel.is_free(message.stream):
            return EngineError("invalid_request", f"cannot begin stream {message.stream}: the number is in use")
        if len(self._generations) >= STREAMS:
            return EngineError("overloaded", f"cannot generate: the engine has {STREAMS} requests already")
        if not self._queue.may_join(channel.tenant.name):
            return EngineError("overloaded", "cannot take this request: the engine's queue is full")
        engine = self.engines.taking
        if engine is not None and not _understands(engine, message.tokens):
            # It was tokenised before the worker knew that there is another model.
            last = [e for e in self.engines.all if e.role is Role.LEAVING and _understands(e, message.tokens)]
            if not last:
                return _OTHER_TOKENS
            engine = last[-1]
        return self._submit(channel, message, engine)

    def _free_key(self) -> int:
        assert self.engines is not None
        return self._generations.free_key([engine.adapter.unclaimed for engine in self.engines.all])

    def _submit(self, channel: Channel, message: Submit, engine: Engine | None) -> EngineError | None:
        generation = Generation(self._free_key(), channel, message)
        if generation.token_ids and (reason := self._end_of(generation)) is not None:
            channel.deltas.append(Delta(message.stream, [], reason))
            channel.flush()
            return None
        try:
            is_claimed = engine is not None and self._claim(generation, engine)
            if engine is not None and not is_claimed:
                self._give(generation, engine)
        except EngineError as exc:
            return exc
        if engine is not None and message.emitted_token_ids and message.sampling.temperature > 0:
            channel.send(Noted([message.stream], failover.CONTINUED, is_same=is_claimed))
        if generation.is_over:
            return None
        key = generation.key
        self._generations.add(generation)
        self._queue.joined(key, channel.tenant.name)
        if self._recorder is not None:
            prompt_tokens, most = len(message.prompt_token_ids), message.sampling.max_tokens
            self._recorder.begun(key, channel.tenant.name, prompt_tokens, most, message.urgency, generation.token_ids)
        self._tell_queue()
        return None

    @staticmethod
    def _claim(generation: Generation, engine: Engine) -> bool:
        """Take over what an engine has gone on with since its last host died, and hand out what that brought."""
        if not engine.was_left:
            return False
        found = engine.adapter.claim(generation.claim, generation.token_ids)
        if found is None:
            return False
        generation.key, generation.engine = found.key, engine
        generation.token_ids.fromlist(found.token_ids)
        generation.is_over = found.finish_reason is not None
        channel, token_ids, reason = generation.channel, found.token_ids, found.finish_reason
        if token_ids or generation.is_over:
            channel.deltas.append(Delta(generation.stream, token_ids, reason, None, found.cached_tokens, found.error))
            channel.flush()
        return True

    def _pause(self, generations: Sequence[Generation], is_paused: bool) -> None:
        for generation in generations:
            generation.is_paused = is_paused
        for engine, keys in by_engine(generations):
            engine.adapter.set_paused(keys, is_paused)

    def _abort(self, generations: Sequence[Generation]) -> None:
        for engine, keys in by_engine(generations):
            engine.adapter.abort(keys)
        for generation in generations:
            self._remove(generation)
        self._forget([generation.key for generation in generations])

    def _forget_one(self, generation: Generation) -> None:
        self._remove(generation)
        self._forget([generation.key])

    def _remove(self, generation: Generation) -> None:
        if self._recorder is not None:
            self._generations.fold()  # its length goes into the trace
        self._generations.remove(generation)

    def _forget(self, keys: Iterable[int]) -> None:
        """Let generations that ended without a last output go from the queue and into the trace."""
        self._queue.left(keys)
        if self._recorder is not None:
            for key in keys:
                self._recorder.ended(key)
        self._tell_queue()

    def _tell_queue(self) -> None:
        """Tell all workers when the queue has become full, or is no more."""
        news = self._queue.news(self._loop.time())
        if news is not None:
            for channel in self._channels.values():
                channel.send(news)

    def channel_lost(self, channel: Channel, reason: str) -> None:
        """End the generations of a worker that is gone, and tell the supervisor."""
        if self._channels.get(channel.number) is channel:
            self._drop(channel)
            self._tell(host_link.ChannelClosed(channel.number, reason[:_DETAIL_CHARACTERS]))

    def _drop(self, channel: Channel) -> None:
        del self._channels[channel.number]
        channel.close()
        self._abort(list(channel.generations.values()))

    # The supervisor's wishes.

    def _packet_received(self, data: bytes, fds: list[int]) -> None:  # noqa: C901 - a table of what may come
        message = host_link.TO_HOST.decode(data)
        if len(fds) != isinstance(message, host_link.Attach | host_link.StartEngine):
            text = "cannot take the packet: Attach and StartEngine have one descriptor, the others have none"
            raise RemoteProtocolError(text, 1002)
        if isinstance(message, host_link.Attach):
            self._attach(message, fds[0])
        elif isinstance(message, host_link.Detach):
            channel = self._channels.get(message.channel)
            if channel is not None:
                self._drop(channel)
        elif isinstance(message, host_link.StartEngine):
            if self.engines is not None:
                raise RemoteProtocolError("cannot start a second engine in one host", 1002)
            settings, ledger = message.settings, Ledger(fds[0])
            if settings.trace_bytes:
                self._recorder = Recorder(settings.cache_dir, settings.trace_bytes, self._loop)
            self.start_engine(create_source(settings, ledger, self._loop), settings, ledger)
        elif isinstance(message, host_link.QueryStatistics):
            task = self._loop.create_task(self._answer(message.query))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, host_link.Stop):
            self.stop()
        elif self._loads is not None:
            self._loads.ordered(message)

    def _attach(self, message: host_link.Attach, fd: int) -> None:
        if message.channel in self._channels:
            raise RemoteProtocolError(f"cannot attach channel {message.channel} twice", 1002)
        sock = socket.socket(fileno=fd)
        channel = Channel(message.channel, message.tenant, sock, self._loop, self)
        self._channels[message.channel] = channel
        channel.send(self._news())
        if self._queue.told.limit:
            channel.send(self._queue.told)

    async def _answer(self, query: int) -> None:
        engine = EngineStatistics(state=self._state, running=len(self._generations), waiting=0)
        active = self.engines.active if self.engines is not None else None
        if active is not None:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_STATISTICS_TIMEOUT_S):
                    engine = await active.adapter.statistics()
        channels = [channel.statistics() for channel in self._channels.values()]
        standing_by = self.engines.standing_by if self.engines is not None else 0
        self._tell(host_link.Statistics(query, engine, channels, time.process_time(), standing_by))

    def _tell(self, message: host_link.FromHost) -> None:
        self._link.send(host_link.FROM_HOST.encode(message))

    async def _shut_down(self) -> None:
        for channel in list(self._channels.values()):
            self._drop(channel)
        tasks = [*self._tasks, *([self._engine_task] if self._engine_task is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._loads is not None:
            await self._loads.stop()
        if self.engines is not None:
            await self.engines.stop()
        if self._recorder is not None:
            self._recorder.close()
        if self._ledger is not None:
            self._ledger.close()
        self._link.close()


async def _serve(control: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    host = EngineHost(control, loop)
    loop.add_signal_handler(signal.SIGTERM, host.stop)
    await host.serve()


def run(control: socket.socket) -> None:
    """Be an engine host in this process, until the supervisor ends it; needs the main thread.

    `control` is our end of a link (`packets.pair`), spoken as in `host_link`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(control))


def main() -> None:
    """Run the host on a control link that was inherited."""
    parser = argparse.ArgumentParser(prog="python -m seedance.engine.host", description="Host one engine.")
    parser.add_argument("--control-fd", type=int, required=True, help="inherited end of the supervisor's control link")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    run(socket.socket(fileno=arguments.control_fd))


if __name__ == "__main__":
    main()
