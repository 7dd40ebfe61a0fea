"""One model in the place of another: from the order to the end of the old engine, as a task of the engine host.

    beside:   check ─► start ─► try ─► prepare ─► switch ─► drain the old ─► end it
    reload:   check ─► prepare ─► drain the old ─► take back what runs ─► reload ─► try ─► switch
    instead:  check ─► prepare ─► drain the old ─► end it ─► start ─► try ─► switch

Where there is memory for one engine alone, it is given other weights (`model_reload`) if the new model has the layout
and the tokens of the old one, and is ended for another one if not. Until the switch everything that goes wrong ends the
load with a reason, and the old model serves: it was never touched, or is loaded or started again. The switch itself is
one call in the host's loop. A request that was tokenised for the old model goes there as long as that is up, and so it
stays for a moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from seedance.engine import model_reload, model_trial, placement
from seedance.engine.check_process import check_model
from seedance.engine.engine import Engine, Role
from seedance.engine.engines import Engines
from seedance.engine.model_check import Read, Request
from seedance.engine.model_files import ModelFiles
from seedance.engine.model_load import LoadOrder, LoadPhase, LoadState, Place
from seedance.engine.model_reload import PAUSE_S
from seedance.engine.request import ModelInfo
from seedance.engine.settings import EngineSettings
from seedance.errors import EngineError

LATE_S: Final = 5.0
"""So long after the switch requests still come that were tokenised for the old model."""

_PREPARE_S: Final = 120.0
_LOOK_S: Final = 0.1

Check = Callable[[Request, Callable[[Read], None]], Awaitable[ModelFiles]]
"""How a directory is checked; see `check_process.check_model`."""

log = logging.getLogger("seedance.engine.host")


class SwapHost(Protocol):
    """What the engine host does for a load."""

    def load_changed(self, state: LoadState, tokenizer_dir: str) -> None:
        """Tell how it goes."""

    def free_key(self) -> int:
        """Return a key that no generation has; it must be in use before the loop turns."""

    async def prepare_workers(self, tokenizer_dir: str) -> None:
        """Return once all workers can serve a model with this tokenizer. Raises EngineError when one cannot."""

    def running(self, engine: Engine) -> int:
        """Return how many generations an engine has."""

    def move(self, source: Engine, target: Engine) -> None:
        """Have another engine go on with an engine's generations."""

    def take_back(self, engine: Engine) -> None:
        """Have an engine drop its generations, which wait from now on."""

    def tell_replaced(self, engine: Engine) -> None:
        """Tell the clients of an engine's generations that these go on with another model."""

    def drop(self, engine: Engine, error: EngineError) -> None:
        """End an engine's generations with an error."""


class ModelSwap:
    """One load; `run` is its life. `switched` says that it cannot be given up any more."""

    def __init__(
        self,
        host: SwapHost,
        engines: Engines,
        order: LoadOrder,
        settings: EngineSettings,
        check: Check = check_model,
    ) -> None:
        self._check = check
        self._host = host
        self._engines = engines
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._zygote: asyncio.Future[str] = self._loop.create_future()
        self._tokenizer_dir = ""
        self._state = LoadState(order=order)

    @property
    def is_switched(self) -> bool:
        """Return whether new requests go to the new model."""
        return self._state.is_switched

    def new_workers_ready(self, reason: str) -> None:
        """Take the supervisor's word that new workers can have the model, or for what reason they cannot."""
        if not self._zygote.done():
            self._zygote.set_result(reason)

    async def run(self) -> None:
        """Load the model, and tell how that goes until its end; raises nothing."""
        try:
            await self._load()
        except EngineError as exc:
            self._tell(LoadPhase.FAILED, reason=str(exc))
        except asyncio.CancelledError:
            self._tell(LoadPhase.FAILED, reason="it was cancelled")
        else:
            self._tell(LoadPhase.SERVED)

    def _tell(self, phase: LoadPhase, **changes: Any) -> None:
        self._state = msgspec.structs.replace(self._state, phase=phase, **changes)
        self._host.load_changed(self._state, self._tokenizer_dir)

    async def _load(self) -> None:
        order, settings = self._state.order, self._settings
        self._tell(LoadPhase.CHECKING)
        request = Request(
            path=settings.model, needs_tokenizer=settings.kind != "synthetic", needs_manifest=order.needs_manifest
        )
        files = await self._check(request, self._checked)
        old = self._serving()
        if order.policy == "continue" and not self._same_tokens(files, old):
            raise EngineError(
                "invalid_request",
                f"cannot continue streams with '{order.path}': its token ids mean something else; use --policy finish",
            )
        place = await self._place(files)
        self._tell(LoadPhase.CHECKING, place=place, weight_bytes=files.weight_bytes, has_manifest=bool(files.checksums))
        log.info("'%s' comes up %s the one that is served", order.path, place if place == "beside" else "instead of")
        if place == "beside":
            await self._load_beside()
        else:
            await self._load_instead(files)

    def _checked(self, read: Read) -> None:
        self._tell(LoadPhase.CHECKING, done_bytes=read.done_bytes, total_bytes=read.total_bytes)

    def _serving(self) -> Engine:
        """Return the engine that serves. Raises EngineError while there is none."""
        if self._engines.active is None:
            raise EngineError("engine_unavailable", "cannot load a model while no engine serves; wait until one does")
        return self._engines.active

    @staticmethod
    def _same_tokens(files: ModelFiles, old: Engine) -> bool:
        """Return whether token ids mean the same; the synthetic engine's always do."""
        return old.model is not None and (not files.tokens_digest or files.tokens_digest == old.model.tokens)

    async def _place(self, files: ModelFiles) -> Place:
        on_gpu = placement.has_gpu() and self._settings.kind != "synthetic"
        needed = placement.needed_bytes(self._settings, files.weight_bytes, on_gpu=on_gpu)
        free = None
        if self._settings.load == "auto" and needed:
            free = await asyncio.to_thread(placement.free_bytes, self._settings, on_gpu=on_gpu)
        return placement.choose(self._settings.load, needed, free)

    # -- beside -------------------------------------------------------------------------------------------------------

    async def _load_beside(self) -> None:
        self._tell(LoadPhase.STARTING)
        engine = await self._engines.bring_up(self._settings)
        try:
            await self._try(engine)
            assert engine.model is not None
            await self._prepare(engine.model.tokenizer_dir)
            if engine.role is Role.GONE:
                raise EngineError("engine_unavailable", "cannot serve the new model: its engine died before the switch")
        except BaseException:
            self._engines.retire(engine)
            raise
        old, began_s = self._engines.active, self._loop.time()
        self._switch(engine, began_s)
        if old is not None:
            await self._drain(old)
            self._engines.retire(old)

    def _switch(self, engine: Engine, began_s: float, *, reload_s: float | None = None) -> None:
        """Give new requests to the new model, and start no engine of another one from now on."""
        self._engines.settings = self._settings
        self._engines.choose(engine)
        for other in [other for other in self._engines.all if other.role is Role.STANDBY]:
            self._engines.retire(other)
        pause_s = self._loop.time() - began_s
        self._tell(LoadPhase.DRAINING, is_switched=True, pause_s=pause_s, reload_s=reload_s, streams=0)

    # -- instead ------------------------------------------------------------------------------------------------------

    async def _load_instead(self, files: ModelFiles) -> None:
        synthetic = self._settings.kind == "synthetic"
        await self._prepare("" if synthetic else str(Path(self._settings.model).resolve()))
        restart_reason = await self._restart_reason(files)
        old = self._serving()
        began_s = self._loop.time()
        self._engines.hold()
        try:
            if self._state.order.policy == "finish":
                await self._until_drained(old, 0.0)
            if not self._same_tokens(files, old):
                self._host.drop(old, _other_tokens(self._state.order.path))
            if old.role is Role.GONE or old.is_fallback:
                restart_reason = restart_reason or "the engine that served it has died"
            if restart_reason:
                log.info("an engine is started for '%s': %s", self._state.order.path, restart_reason)
                await self._restart(restart_reason, began_s)
            else:
                await self._reload(old, began_s)
        finally:
            self._engines.release()  # the old settings, if there was no switch

    async def _restart_reason(self, files: ModelFiles) -> str:
        """Say why the engine that serves cannot be given the new model's weights, nothing when it can."""
        old = self._serving()
        if not self._same_tokens(files, old):
            return "its tokens mean something else"
        if Path(old.settings.model).resolve() == Path(self._settings.model).resolve():
            return "it is in the directory of the old one"
        request = Request(path=old.settings.model, needs_tokenizer=False, heads_only=True)
        try:
            known = await self._check(request, lambda _: None)
        except EngineError as exc:
            return f"the old one cannot be compared with it: {exc}"
        return (
            ""
            if known.layout == files.layout
            else "its config.json says something else, or its tensors have other shapes"
        )

    async def _restart(self, reason: str, began_s: float) -> None:
        """End the engine that serves, and start one with the new model."""
        await self._engines.step_down()
        self._tell(LoadPhase.STARTING, restart_reason=reason)
        try:
            async with asyncio.timeout(PAUSE_S):
                engine = await self._engines.bring_up(self._settings)
                try:
                    await self._try(engine)
                except BaseException:
                    await self._engines.dismiss(engine)
                    raise
        except TimeoutError as exc:
            text = f"cannot serve the new model: it was not up within {PAUSE_S:g} s"
            raise EngineError("engine_unavailable", text) from exc
        self._switch(engine, began_s)
        self._host.tell_replaced(engine)

    async def _reload(self, engine: Engine, began_s: float) -> None:
        """Have the engine that serves go on with the new model's weights."""
        self._tell(LoadPhase.RELOADING, place="reload")
        stopped_s = self._loop.time()
        self._host.take_back(engine)
        await model_reload.reload(self._engines, engine, self._settings, self._host.free_key)
        self._switch(engine, began_s, reload_s=self._loop.time() - stopped_s)
        self._host.tell_replaced(engine)

    # -- steps of both ------------------------------------------------------------------------------------------------

    async def _try(self, engine: Engine) -> None:
        """Have an engine answer the canary prompt. Raises EngineError when the answer cannot be a model's."""
        self._tell(LoadPhase.TRYING)
        model_trial.require_right(await model_trial.ask(engine, self._host.free_key()))

    async def _prepare(self, tokenizer_dir: str) -> None:
        """Have the workers, and those that are started from now on, load the tokenizer. Raises EngineError."""
        self._tokenizer_dir = tokenizer_dir
        self._tell(LoadPhase.PREPARING)
        try:
            async with asyncio.timeout(_PREPARE_S):
                if reason := await self._zygote:
                    raise EngineError("engine_unavailable", f"cannot serve the new model: {reason}")
                await self._host.prepare_workers(tokenizer_dir)
        except TimeoutError as exc:
            text = f"cannot serve the new model: its tokenizer was not loaded within {_PREPARE_S:g} s"
            raise EngineError("engine_unavailable", text) from exc

    async def _drain(self, old: Engine) -> None:
        """Let the old engine's streams end, or have the new one go on with them, by policy and deadline."""
        new = self._engines.active
        same = new is None or _tokens(new.model) == _tokens(old.model)
        if self._state.order.policy == "finish":
            await self._until_drained(old, 0.0 if same else LATE_S)
        if not self._host.running(old):
            return
        if not same:
            self._host.drop(old, _other_tokens(self._state.order.path))
            return
        while (active := self._engines.active) is None:
            await asyncio.sleep(_LOOK_S)
        self._host.tell_replaced(old)
        self._host.move(old, active)

    async def _until_drained(self, old: Engine, least_s: float) -> None:
        """Return when an engine has no generation any more and so much time has passed, or when its time is up."""
        began_s = self._loop.time()
        told = -1
        while old.role is not Role.GONE:
            passed_s, streams = self._loop.time() - began_s, self._host.running(old)
            if streams != told:
                self._tell(LoadPhase.DRAINING, streams=streams)
                told = streams
            if passed_s >= max(self._state.order.drain_s, least_s) or (not streams and passed_s >= least_s):
                return
            await asyncio.sleep(_LOOK_S)


def _tokens(model: ModelInfo | None) -> str:
    return "" if model is None else model.tokens


def _other_tokens(path: str) -> EngineError:
    text = f"cannot finish this request: its model has been replaced by '{Path(path).name}', which has other tokens"
    return EngineError("engine_unavailable", text)
