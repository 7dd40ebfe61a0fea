"""The engine host: the process between the workers and one engine.

It holds the adapter, brings the engine up again when it died, takes requests from the workers' channels, and hands out
the outputs of each engine step as one batch a channel. It ends when the supervisor says so or closes the control link,
and on SIGTERM; SIGINT is the supervisor's business, which shares our terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Final

from seedance.engine import host_link
from seedance.engine.adapter import EngineAdapter, EngineState, EngineStatistics, Output
from seedance.engine.channel import Abort, Delta, EngineChanged, Refused, SetPaused, Submit, ToHost
from seedance.engine.engine_queue import EngineQueue
from seedance.engine.host_channel import Channel, Generation
from seedance.engine.ledger import STREAMS, Ledger
from seedance.engine.packets import PacketSocket
from seedance.engine.recorder import Recorder
from seedance.engine.request import ModelInfo
from seedance.engine.settings import EngineSettings
from seedance.errors import EngineDead, EngineError, RemoteProtocolError
from seedance.qos.gpu import GpuPart, mps_command, mps_error

RESTART_MAX_S: Final = 30.0
# An engine that served this long was no failed start: the next restart begins with a short wait again.
_STABLE_S: Final = 60.0
_STATISTICS_TIMEOUT_S: Final = 5.0
_DETAIL_CHARACTERS: Final = 2_000
_WHOLE_GPU: Final = GpuPart()

log = logging.getLogger("seedance.engine.host")


def create_adapter(settings: EngineSettings, ledger: Ledger, loop: asyncio.AbstractEventLoop) -> EngineAdapter:
    """Return the adapter for an engine; only its own modules are imported."""
    if settings.kind == "synthetic":
        from seedance.engine.synthetic import SyntheticAdapter  # noqa: PLC0415

        return SyntheticAdapter(settings, ledger, loop)
    from seedance.engine.vllm import VllmAdapter, VllmSettings  # noqa: PLC0415

    return VllmAdapter(
        VllmSettings(
            model=settings.model,
            name=settings.name,
            run_dir=settings.run_dir,
            kv_bytes=settings.kv_bytes,
            max_model_len=settings.max_model_len or None,
            max_num_seqs=settings.max_streams,
            threads=settings.threads,
            enforce_eager=settings.enforce_eager,
            dtype=settings.dtype,
            cache_dir=settings.cache_dir,
            offline=settings.offline,
            gpu=settings.gpu,
        ),
        ledger,
    )


def _require_mps(part: GpuPart) -> None:
    """Raise EngineDead where nothing keeps an engine to its part of a GPU: CUDA would run it without limits."""
    error = mps_error(part.mps_directory) if part.needs_mps else ""
    if error:
        raise EngineDead(
            f"cannot keep the engine within engine.gpu.threads and engine.gpu.memory: {error}; "
            f"start it by `{mps_command(part.mps_directory)}`, or leave them out"
        )


class EngineHost:
    """The host of one engine, on a running event loop: an `EngineEvents` and a `ChannelOwner`.

    Owns the control socket. `first_restart_s` is the wait before the first restart of a dead engine; it doubles up to
    RESTART_MAX_S.
    """

    def __init__(
        self, control: socket.socket, loop: asyncio.AbstractEventLoop, *, first_restart_s: float = 1.0
    ) -> None:
        self._loop = loop
        self._first_restart_s = first_restart_s
        self._adapter: EngineAdapter | None = None
        self._state = EngineState.STOPPED
        self._detail = ""
        self._figures = ""
        self._model: ModelInfo | None = None
        self._engine_died = asyncio.Event()
        self._engine_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._ledger: Ledger | None = None
        self._queue = EngineQueue(0)
        self._gpu = _WHOLE_GPU
        self._recorder: Recorder | None = None
        self._channels: dict[int, Channel] = {}
        self._generations: dict[int, Generation] = {}
        self._key = 0
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

    def start_engine(self, adapter: EngineAdapter, queue: int = 0, gpu: GpuPart = _WHOLE_GPU) -> None:
        """Bring an engine up and keep it up; call it once. `queue` bounds the requests that wait, 0 for no bound.

        With limits in `gpu` that nothing keeps it stays down; whether something does is looked at before each start.
        """
        self._adapter = adapter
        self._gpu = gpu
        self._queue = EngineQueue(queue)
        self._engine_task = self._loop.create_task(self._keep_engine(adapter))
        self._engine_task.add_done_callback(lambda _: self.stop())

    # The engine's news.

    def step_completed(self, outputs: Sequence[Output]) -> None:
        """Hand out the outputs of one engine step; the lists in them belong to the host from here."""
        generations = self._generations
        if self._queue:
            self._queue.started((output.key for output in outputs), self._loop.time())
            self._tell_queue()
        touched: list[Channel] = []
        for output in outputs:
            generation = generations.get(output.key)
            if generation is None:  # aborted while the step ran
                continue
            channel = generation.channel
            token_ids = output.token_ids
            generation.token_ids.fromlist(token_ids)
            if not channel.deltas and not channel.singles:
                touched.append(channel)
            if len(token_ids) == 1 and not (output.finish_reason or output.cached_tokens or output.logprobs):
                channel.singles += (generation.stream, token_ids[0])
                continue
            channel.deltas.append(
                Delta(
                    generation.stream,
                    token_ids,
                    output.finish_reason,
                    output.logprobs,
                    output.cached_tokens,
                    output.error,
                )
            )
            if output.finish_reason is not None:
                del generations[output.key]
                del channel.generations[generation.stream]
                if self._recorder is not None:
                    self._recorder.ended(output.key)
        for channel in touched:
            channel.flush()

    def state_changed(self, state: EngineState, detail: str) -> None:
        """Take an adapter's news; that it is ready counts only once its start has returned the model."""
        if state is EngineState.DEAD:
            self._engine_lost(detail)
        elif state is EngineState.STARTING and self._model is None:
            self._change(state, detail)
        elif state is EngineState.READY:
            self._figures = detail

    async def _keep_engine(self, adapter: EngineAdapter) -> None:
        wait_s = self._first_restart_s
        while True:
            self._engine_died.clear()
            self._figures = ""
            self._change(EngineState.STARTING, "")
            try:
                _require_mps(self._gpu)
                self._model = await adapter.start(self)
            except EngineDead as exc:
                self._engine_lost(str(exc))
            else:
                ready_at = self._loop.time()
                gc.collect()
                gc.freeze()
                self._change(EngineState.READY, self._figures)
                await self._engine_died.wait()
                if self._loop.time() - ready_at >= _STABLE_S:
                    wait_s = self._first_restart_s
            log.warning("engine is restarted in %g s", wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RESTART_MAX_S)

    def _engine_lost(self, detail: str) -> None:
        if self._state is EngineState.DEAD:
            return
        self._model = None
        for generation in self._generations.values():
            generation.channel.generations.clear()
        self._forget(self._generations)
        self._generations.clear()
        self._engine_died.set()
        self._change(EngineState.DEAD, detail)

    def _change(self, state: EngineState, detail: str) -> None:
        self._state = state
        self._detail = detail[:_DETAIL_CHARACTERS]
        log.info("engine is %s%s", state, f": {self._detail}" if detail else "")
        for channel in self._channels.values():
            channel.send(self._news())
        self._tell(host_link.EngineChanged(state.value, self._detail, self._model))

    def _news(self) -> EngineChanged:
        return EngineChanged(self._state.value, self._detail, self._model)

    # The workers' wishes.

    def message_received(self, channel: Channel, message: ToHost) -> None:
        """Begin or end generations."""
        if isinstance(message, Submit):
            refusal = self._begin(channel, message)
            if refusal is not None:
                wait_s = self._queue.wait_s(self._loop.time()) if refusal.code == "overloaded" else None
                channel.send(Refused(message.stream, refusal.code, refusal.message, wait_s))
        elif isinstance(message, Abort):
            self._abort([channel.generations[s] for s in set(message.streams) if s in channel.generations])
            channel.discard(message.streams)
        elif isinstance(message, SetPaused) and self._adapter is not None:
            keys = [channel.generations[s].key for s in message.streams if s in channel.generations]
            self._adapter.set_paused(keys, message.is_paused)

    def _begin(self, channel: Channel, message: Submit) -> EngineError | None:
        """Begin a generation, or return why it cannot be."""
        if self._adapter is None or self._state is not EngineState.READY:
            return EngineError("engine_unavailable", f"cannot generate: the engine is {self._state.value}")
        if not channel.is_free(message.stream):
            return EngineError("invalid_request", f"cannot begin stream {message.stream}: the number is in use")
        if len(self._generations) >= STREAMS:
            return EngineError("overloaded", f"cannot generate: the engine has {STREAMS} requests already")
        if not self._queue.may_join(channel.tenant.name):
            return EngineError("overloaded", "cannot take this request: the engine's queue is full")
        if message.emitted_token_ids and self._has_ended(channel, message):
            return None
        return self._submit(channel, message)

    def _has_ended(self, channel: Channel, message: Submit) -> bool:
        """End a generation at once that has nothing left to generate."""
        assert self._model is not None
        room = self._model.max_model_len - len(message.prompt_token_ids)
        reason = message.sampling.end_of(message.emitted_token_ids, room, self._model.eos_token_ids)
        if reason is not None:
            channel.deltas.append(Delta(message.stream, [], reason))
            channel.flush()
        return reason is not None

    def _submit(self, channel: Channel, message: Submit) -> EngineError | None:
        assert self._adapter is not None
        key = self._key
        while key in self._generations:
            key = (key + 1) % STREAMS
        self._key = (key + 1) % STREAMS
        try:
            generation = Generation(key, channel, message)
            self._adapter.submit(
                key,
                channel.tenant,
                message.prompt_token_ids,
                message.sampling,
                message.urgency,
                message.emitted_token_ids,
            )
        except OverflowError:
            return EngineError("invalid_request", "cannot take the prompt: a token id is not a 32-bit number")
        except EngineError as exc:
            return exc
        self._generations[key] = channel.generations[message.stream] = generation
        self._queue.joined(key, channel.tenant.name)
        if self._recorder is not None:
            prompt_tokens, most = len(message.prompt_token_ids), message.sampling.max_tokens
            self._recorder.begun(key, channel.tenant.name, prompt_tokens, most, message.urgency, generation.token_ids)
        self._tell_queue()
        return None

    def _abort(self, generations: Iterable[Generation]) -> None:
        keys = []
        for generation in generations:
            keys.append(generation.key)
            del self._generations[generation.key]
            del generation.channel.generations[generation.stream]
        if keys and self._adapter is not None:
            self._adapter.abort(keys)
        self._forget(keys)

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

    def _packet_received(self, data: bytes, fds: list[int]) -> None:
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
            if self._adapter is not None:
                raise RemoteProtocolError("cannot start a second engine in one host", 1002)
            self._ledger = Ledger(fds[0])
            if message.settings.trace_bytes:
                self._recorder = Recorder(message.settings.cache_dir, message.settings.trace_bytes, self._loop)
            settings = message.settings
            adapter = create_adapter(settings, self._ledger, self._loop)
            self.start_engine(adapter, settings.queue, settings.gpu)
        elif isinstance(message, host_link.QueryStatistics):
            task = self._loop.create_task(self._answer(message.query))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, host_link.Stop):
            self.stop()

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
        if self._adapter is not None and self._state is EngineState.READY:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_STATISTICS_TIMEOUT_S):
                    engine = await self._adapter.statistics()
        channels = [channel.statistics() for channel in self._channels.values()]
        self._tell(host_link.Statistics(query, engine, channels, time.process_time()))

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
        if self._adapter is not None:
            await self._adapter.stop()
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
