"""The engines of one host: which there are, what each is for, and who takes over when one dies.

    STARTING ─► TRIAL ─► STANDBY ─► ACTIVE ─► LEAVING ─► gone
        └─────────┴─────────┴──────────┴─────────┴─────► gone, when it dies

New requests go to the active one. One on trial is up, and gets nothing by itself; one that stands by is to be the next
active one. One that leaves has what it was given before another one became active, and nothing new.

When the active engine dies, an engine that stands by is active at once; without one the next that comes up is.
Meanwhile the owner keeps the generations, and gets `engine_takes` with the engine that is to go on with them. When as
many starts in a row have failed as may, the engine on the processor serves, if there is to be one, until the other is
up again; otherwise what waits is given up.

A new version of a model comes up the same way: `bring_up` with other settings, `choose`, `retire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from seedance.engine import failover
from seedance.engine.adapter import EngineState, Output
from seedance.engine.core_watch import CoreWatch
from seedance.engine.engine import Engine, Role
from seedance.engine.fallback import fallback_settings, require_mps
from seedance.engine.gpu_memory import Action, Watermark
from seedance.engine.gpu_watch import GpuWatch
from seedance.engine.ledger import ENGINES, Ledger
from seedance.engine.progress import LOOK_EVERY_S
from seedance.engine.settings import EngineSettings
from seedance.engine.source import EngineSource
from seedance.engine.token_names import TokenNames
from seedance.errors import EngineDead

if TYPE_CHECKING:
    from seedance.engine.vllm_control import LeftCore

log = logging.getLogger("seedance.engine.host")


class EnginesOwner(Protocol):
    """What the host does with the news of its engines."""

    def step_completed(self, outputs: Sequence[Output], singles: bytes = b"") -> None:
        """Take what one step of any engine brought; see `EngineEvents`."""

    def state_changed(self, state: EngineState, detail: str, note: str = "") -> None:
        """Take the state of all engines together: READY while one is active, RECOVERING until the next is.

        With DEAD there is none, and what waits for one is given up. `note` is what clients are told.
        """

    def engine_ended(self, engine: Engine) -> None:
        """Keep the generations of an engine that died."""

    def engine_left(self, engine: Engine) -> None:
        """Keep the generations of an engine that was stopped."""

    def engine_takes(self, engine: Engine) -> None:
        """Give the active engine all generations that have none."""

    def move(self, source: Engine, target: Engine) -> None:
        """Have another engine go on with an engine's generations."""


class Engines:
    """The engines of one host, on a running event loop; they end by `stop`. The ledger stays its owner's.

    `settings` are those of the next engine that is started to be the active one; `active` gets the new requests, which
    wait while `is_held`.
    """

    def __init__(
        self,
        source: EngineSource,
        settings: EngineSettings,
        ledger: Ledger,
        owner: EnginesOwner,
        first_restart_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._source = source
        self.settings = settings
        self._ledger = ledger
        self._owner = owner
        self.step_completed = owner.step_completed
        self.active: Engine | None = None
        self.all: list[Engine] = []
        self._row = 0
        self._needed = failover.Restarts(first_restart_s, settings.failover.attempts)
        self._spare = failover.Restarts(first_restart_s, settings.failover.attempts)  # of one that is to stand by
        self._recovers = False
        self._settle_s = 0.0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_held = False
        self._gpu = GpuWatch(settings.gpu.device) if settings.kind == "vllm" else None
        if self._gpu is not None:
            self._gpu.start()
        self._watches = [self._loop.create_task(CoreWatch(self._up, self._gpu).run())]
        if self._gpu is not None and settings.failover.gpu_memory is not None:
            watermark = Watermark(settings.failover.gpu_memory)
            self._watches.append(self._loop.create_task(self._watch_memory(watermark, self._gpu)))
        self._fallback: asyncio.Task[None] | None = None
        self._is_replacing = False
        self._is_frozen = False
        self._names = TokenNames()

    # -- what a host does with them -----------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Keep as many engines up as there are to be, one start at a time, until cancelled."""
        await self._take_over()
        while True:
            kept = [e for e in self.all if e.role in {Role.STANDBY, Role.ACTIVE} and not e.is_fallback]
            if len(kept) <= self.settings.failover.standby and not self._is_replacing:
                await self._start_one()
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _take_over(self) -> None:
        """Go on with the engines of a host that has died."""
        for left in await self._source.left(self.settings, 1 + self.settings.failover.standby):
            try:
                self._take_in(await self.bring_up(self.settings, left=left))
            except EngineDead as exc:
                log.warning("cannot go on with an engine of the last host: %s", exc)

    async def bring_up(
        self, settings: EngineSettings, *, is_fallback: bool = False, left: LeftCore | None = None
    ) -> Engine:
        """Start one more engine, or go on with one that a host left; it is on trial then.

        Raises EngineDead when it does not come up.
        """
        require_mps(settings.gpu)
        ledger = self._ledger.for_engine(self._free_row() if left is None else left.engine_row)
        adapter = self._source.create(settings, ledger, left)
        engine = Engine(settings, adapter, ledger, self, is_fallback=is_fallback, was_left=left is not None)
        self.all.append(engine)
        try:
            engine.model = await engine.adapter.start(engine)
        except BaseException:
            self._let_go(engine)
            raise
        engine.role = Role.TRIAL
        engine.ready_s = self._loop.time()
        engine.model = await self._names.named(engine.model)
        engine.adapter.remember(engine.model)
        if engine.role is not Role.TRIAL:
            raise EngineDead("cannot use the engine: it died when it had just come up")
        return engine

    def choose(self, engine: Engine, note: str = "") -> None:
        """Make an engine the active one, and have it go on with what waits; the last one leaves.

        `note` is what the clients of streams that run are told.
        """
        if self.active is not None:
            self.active.role = Role.LEAVING
        self.active = engine
        engine.role = Role.ACTIVE
        self._recovers = False
        if not engine.was_left or engine.row != self._ledger.active_row:  # else it has been active all the time
            self._ledger.choose(engine.row)
        if not self._is_frozen:  # once, at the start: it would hold up streams
            self._is_frozen = True
            if not engine.was_left:
                gc.collect()
            gc.freeze()
        self._owner.state_changed(EngineState.READY, engine.figures, note)
        self._owner.engine_takes(engine)
        self._changed.set()

    def retire(self, engine: Engine) -> None:
        """End an engine that is not active, and that nothing runs on any more."""
        assert engine is not self.active, "cannot retire the engine that gets the requests"
        self._let_go(engine)

    async def dismiss(self, engine: Engine) -> None:
        """End an engine as `retire` does; returns when it has gone, and its memory is free."""
        assert engine is not self.active, "cannot end the engine that gets the requests"
        if engine.role is not Role.GONE:
            engine.role = Role.GONE
            self.all.remove(engine)
            self._changed.set()
            await self._dispose(engine)

    def hold(self) -> None:
        """Start no engine, and give new requests to none: they wait, until `release`."""
        self._is_replacing = True

    def release(self) -> None:
        """Go on as before `hold`, with what has waited."""
        self._is_replacing = False
        self._changed.set()
        if self.taking is not None:
            self._owner.engine_takes(self.taking)

    @property
    def taking(self) -> Engine | None:
        """The engine that new requests go to, None while they wait."""
        return None if self.is_held or self._is_replacing else self.active

    @property
    def standing_by(self) -> int:
        """How many engines would take over at once."""
        return sum(engine.role is Role.STANDBY for engine in self.all)

    async def reload(self, engine: Engine, settings: EngineSettings) -> None:
        """Have an engine load the weights of a model with the same layout and tokens; between `hold` and `release`.

        Nothing may run on it. Raises EngineError when it has not done so, EngineDead when it has died of it.
        """
        assert self._is_replacing, "cannot load other weights into an engine that gets requests"
        assert engine.model is not None, "cannot load other weights into an engine that has none"
        model = await engine.adapter.reload(settings.name, settings.model)
        engine.model = msgspec.structs.replace(model, tokens=engine.model.tokens)
        engine.settings = settings
        engine.adapter.remember(engine.model)

    async def step_down(self) -> None:
        """End the active engine and those that stand by, with nobody to follow; returns when they have gone.

        What runs waits for the next engine that is chosen. Only between `hold` and `release`.
        """
        assert self._is_replacing, "cannot end the active engine without a word"
        ended = [engine for engine in self.all if engine.role in {Role.ACTIVE, Role.STANDBY}]
        self.active = None
        self._recovers = True
        for engine in ended:
            engine.role = Role.GONE
            self.all.remove(engine)
            self._owner.engine_left(engine)
        self._owner.state_changed(EngineState.RECOVERING, "another model takes its place", failover.RESTARTING)
        for engine in ended:
            await self._dispose(engine)

    async def stop(self) -> None:
        """End all engines and what they have in common."""
        self.active = None
        for engine in list(self.all):
            self._let_go(engine)
        if self._gpu is not None:
            self._gpu.close()
        running = [*self._watches, *([self._fallback] if self._fallback is not None else [])]
        for task in running:
            task.cancel()
        await asyncio.wait([*running, *self._tasks])
        await self._source.stop()

    # -- their news ---------------------------------------------------------------------------------------------------

    def starts(self, engine: Engine, detail: str) -> None:
        """Take what an engine says of its start."""
        if self.active is None and not self._recovers and engine.model is None:
            self._owner.state_changed(EngineState.STARTING, detail)

    def engine_died(self, engine: Engine, detail: str) -> None:
        """Take an engine's death, and have another one take over what it had."""
        if engine.role is Role.GONE:
            return
        log.warning("engine %d (%s) died: %s", engine.row, engine.role, detail)
        if not engine.is_fallback and engine.role in {Role.ACTIVE, Role.STANDBY}:
            restarts = self._needed if engine is self.active else self._spare
            restarts.died(self._loop.time() - engine.ready_s)
        self._let_go(engine)
        self._owner.engine_ended(engine)
        if engine is not self.active:
            if self.taking is not None:
                self._owner.engine_takes(self.taking)
            return
        self.active = None
        self._recovers = True
        self._settle_s = failover.SETTLE_S
        successor = next((other for other in self.all if other.role is Role.STANDBY), None)
        if successor is not None:
            self.choose(successor, failover.CONTINUED)
        else:
            self._owner.state_changed(EngineState.RECOVERING, detail, failover.RESTARTING)

    # -- starts -------------------------------------------------------------------------------------------------------

    async def _wait_turn(self) -> None:
        """Wait until the next engine may be started; an engine's death may make that sooner."""
        began_s = self._loop.time()
        while (left_s := began_s + self._wait_s() - self._loop.time()) > 0:
            log.info("an engine is started in %.0f s", left_s)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    def _wait_s(self) -> float:
        return self._needed.wait_s if self._is_needed else max(self._spare.wait_s, self._settle_s)

    @property
    def _is_needed(self) -> bool:
        """Whether the next engine is to be the active one."""
        return self.active is None or self.active.is_fallback

    async def _start_one(self) -> None:
        await self._wait_turn()
        if self._is_replacing:
            return
        if not self._is_needed:
            self._settle_s = 0.0
        if self.active is None and not self._recovers:
            self._owner.state_changed(EngineState.STARTING, "")
        try:
            engine = await self.bring_up(self.settings)
        except EngineDead as exc:
            (self._needed if self._is_needed else self._spare).failed()
            self._start_failed(str(exc))
        else:
            self._needed.succeeded()
            self._spare.succeeded()
            self._take_in(engine)

    def _take_in(self, engine: Engine) -> None:
        """Give an engine that is up its role."""
        if self._is_replacing or not self._is_of_now(engine):
            self.retire(engine)
        elif self.active is None:
            note = failover.ON_CPU if engine.is_fallback else failover.CONTINUED
            self.choose(engine, note if self._recovers else "")
        elif self.active.is_fallback and not engine.is_fallback:
            fallback = self.active
            self.choose(engine, failover.CONTINUED)
            self._owner.move(fallback, engine)
            self.retire(fallback)
        elif engine.is_fallback:
            self.retire(engine)
        else:
            engine.role = Role.STANDBY

    def _is_of_now(self, engine: Engine) -> bool:
        """Return whether an engine would be started like this now: there may be another model since."""
        if engine.is_fallback:
            return engine.settings == fallback_settings(self.settings)
        return engine.settings is self.settings

    def _start_failed(self, detail: str) -> None:
        log.warning("an engine did not start: %s", detail)
        if self.active is not None or (self._recovers and not self._needed.exhausted):
            return
        if self._needed.exhausted and self.settings.failover.cpu_python:
            if self._fallback is None or self._fallback.done():
                self._fallback = self._loop.create_task(self._fall_back())
            if self._recovers:
                return
        self._give_up(detail)

    async def _fall_back(self) -> None:
        """Bring up the engine on the processor."""
        try:
            engine = await self.bring_up(fallback_settings(self.settings), is_fallback=True)
        except EngineDead as exc:
            log.warning("the engine on the processor did not start: %s", exc)
            if self.active is None:
                self._give_up(str(exc))
        else:
            self._take_in(engine)

    def _give_up(self, detail: str) -> None:
        self._recovers = False
        self._owner.state_changed(EngineState.DEAD, detail)

    async def _watch_memory(self, watermark: Watermark, gpu: GpuWatch) -> None:
        while True:
            action = watermark.look(self._loop.time(), gpu.used(time.monotonic()))
            if action is not Action.NONE:
                self.memory_low(action)
            await asyncio.sleep(LOOK_EVERY_S)

    def memory_low(self, action: Action) -> None:
        """Do what is to be done about the GPU's memory."""
        log.warning("the GPU's memory is nearly used up: %s", action.value)
        self.is_held = action in {Action.HOLD, Action.SHRINK}
        if self.active is None:
            return
        if action is Action.SHRINK:
            self.active.adapter.shrink()
        elif action is Action.MOVE:
            self.active.adapter.give_up("the GPU's memory is nearly used up")
        elif action is Action.RELEASE and self.taking is not None:
            self._owner.engine_takes(self.taking)

    def _up(self) -> list[Engine]:
        return [engine for engine in self.all if engine.role is not Role.STARTING]

    def _free_row(self) -> int:
        """Return a row of the ledger, and none that was in use a moment ago."""
        taken = {engine.row for engine in self.all}
        while self._row in taken:
            self._row = (self._row + 1) % ENGINES
        row, self._row = self._row, (self._row + 1) % ENGINES
        return row

    def _let_go(self, engine: Engine) -> None:
        """Forget an engine, and end what is left of it."""
        if engine.role is not Role.GONE:
            engine.role = Role.GONE
            self.all.remove(engine)
            self._changed.set()
            self._run(self._dispose(engine))

    async def _dispose(self, engine: Engine) -> None:
        await engine.adapter.stop()
        engine.ledger.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
