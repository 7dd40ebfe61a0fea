"""Other weights for the engine that serves, where memory does not hold a second one: there, and back when it must be.

    ask the old model ─► load the new weights ─► ask the new model
                                 └───────────────────┴─► load the old weights ─► ask: does it say what it did before?

Nothing runs on the engine meanwhile. An engine that cannot go back, or takes too long, or is left halfway since the
load was cancelled, is given up: the next one is started with the old model, as after any other death.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from seedance.engine import model_trial
from seedance.engine.canary import Canary
from seedance.engine.engine import Engine, Role
from seedance.engine.engines import Engines
from seedance.engine.settings import EngineSettings
from seedance.errors import EngineError

PAUSE_S: Final = 120.0
"""So long new requests wait for another model at most, where memory holds one; then the old one is to serve again."""

log = logging.getLogger("seedance.engine.host")


async def reload(engines: Engines, engine: Engine, settings: EngineSettings, free_key: Callable[[], int]) -> None:
    """Have an engine serve another model of the same layout and tokens; returns when that has answered the canary.

    Raises EngineError saying why it does not: then it serves the old model as before, or has been given up.
    """
    old = engine.settings
    before = await model_trial.ask(engine, free_key())
    try:
        async with asyncio.timeout(PAUSE_S):
            try:
                await engines.reload(engine, settings)
                model_trial.require_right(await model_trial.ask(engine, free_key()))
            except EngineError as exc:
                if engine.role is not Role.GONE:
                    log.warning("going back to '%s': %s", old.model, exc)
                    await _go_back(engines, engine, old, before, free_key)
                raise
    except TimeoutError as exc:
        text = f"the weights of '{settings.model}' were not loaded within {PAUSE_S:g} s"
        engine.adapter.give_up(text)
        raise EngineError("engine_unavailable", f"cannot serve the new model: {text}") from exc
    except asyncio.CancelledError:
        engine.adapter.give_up("it was to load other weights, and that was cancelled")
        raise


async def _go_back(
    engines: Engines, engine: Engine, old: EngineSettings, before: Canary, free_key: Callable[[], int]
) -> None:
    """Load the old weights, or give the engine up."""
    try:
        await engines.reload(engine, old)
        again = await model_trial.ask(engine, free_key())
        fault = again.fault or ("" if again.token_ids == before.token_ids else "it says something else than before")
    except EngineError as exc:
        fault = str(exc)
    if fault:
        engine.adapter.give_up(f"it cannot go back to '{old.model}': {fault}")
