"""The engine host's loads of models, one at a time; a `model_swap.SwapHost`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from seedance.engine import failover
from seedance.engine.channel import ModelComing, ModelPrepared, Noted
from seedance.engine.engine import Engine
from seedance.engine.engines import Engines
from seedance.engine.generations import Generations
from seedance.engine.host_channel import Channel, Generation
from seedance.engine.host_link import CancelLoad, LoadChanged, LoadModel, ModelReady
from seedance.engine.model_load import LoadState
from seedance.engine.model_swap import ModelSwap
from seedance.errors import EngineError

_WORKERS_S: Final = 20.0
"""So long workers may take for a tokenizer; one that takes longer loads it at the switch, and its streams wait then."""
_LOOK_S: Final = 0.2


class HostLoads:
    """What a host does for loads. Channels (by number) and generations stay the host's."""

    def __init__(
        self,
        engines: Engines,
        channels: Mapping[int, Channel],
        generations: Generations,
        tell: Callable[[LoadChanged], None],
        free_key: Callable[[], int],
        move: Callable[[Engine, Engine], None],
        fail: Callable[[Generation, EngineError], None],
    ) -> None:
        self._engines = engines
        self._channels = channels
        self._generations = generations
        self._tell = tell
        self.free_key = free_key
        self.move = move
        self._fail = fail
        self._number = 0
        self._swap: ModelSwap | None = None
        self._task: asyncio.Task[None] | None = None
        self._unprepared: set[int] = set()
        self._reason = ""
        self._prepared = asyncio.Event()

    # -- what the supervisor says -------------------------------------------------------------------------------------

    def ordered(self, message: LoadModel | ModelReady | CancelLoad) -> None:
        """Begin a load, or go on with it, or give it up; messages about another one are ignored."""
        if isinstance(message, LoadModel):
            if self._task is None or self._task.done():
                self._number = message.load
                self._swap = ModelSwap(self, self._engines, message.order, message.settings)
                self._task = asyncio.get_running_loop().create_task(self._swap.run())
        elif message.load != self._number or self._swap is None or self._task is None:
            pass
        elif isinstance(message, ModelReady):
            self._swap.new_workers_ready(message.reason)
        elif not self._swap.is_switched:
            self._task.cancel()

    async def stop(self) -> None:
        """End the load that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # -- what a load asks for -----------------------------------------------------------------------------------------

    def load_changed(self, state: LoadState, tokenizer_dir: str) -> None:
        """See `SwapHost`."""
        self._tell(LoadChanged(self._number, state, tokenizer_dir))

    async def prepare_workers(self, tokenizer_dir: str) -> None:
        """See `SwapHost`."""
        self._reason = ""
        self._unprepared = set(self._channels)
        for channel in self._channels.values():
            channel.send(ModelComing(tokenizer_dir))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WORKERS_S):
                while self._unprepared & self._channels.keys() and not self._reason:
                    self._prepared.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):  # a worker may also have gone
                            await self._prepared.wait()
        if self._reason:
            raise EngineError("engine_unavailable", f"cannot serve the new model: {self._reason}")

    def worker_prepared(self, channel: Channel, message: ModelPrepared) -> None:
        """Take a worker's answer to ModelComing."""
        self._unprepared.discard(channel.number)
        self._reason = self._reason or message.reason
        self._prepared.set()

    def running(self, engine: Engine) -> int:
        """See `SwapHost`."""
        return sum(generation.engine is engine for generation in self._generations)

    def take_back(self, engine: Engine) -> None:
        """See `SwapHost`."""
        self._generations.take_back(engine)

    def tell_replaced(self, engine: Engine) -> None:
        """See `SwapHost`."""
        self._generations.fold()
        for channel in self._channels.values():
            streams = [g.stream for g in channel.generations.values() if g.engine is engine and g.token_ids]
            if streams:
                channel.send(Noted(streams, failover.REPLACED))

    def drop(self, engine: Engine, error: EngineError) -> None:
        """See `SwapHost`."""
        for generation in self._generations.take_back(engine):
            self._fail(generation, error)
