"""The canary prompt, asked of an engine that nobody else asks anything meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from seedance.engine import canary
from seedance.engine.adapter import Output
from seedance.engine.canary import Canary
from seedance.engine.engine import Engine
from seedance.engine.request import NOT_URGENT, TenantContext
from seedance.errors import EngineError

_TENANT: Final = TenantContext(name="", scheduling_class="", cache_salt="canary")


async def ask(engine: Engine, key: int) -> Canary:
    """Return what an engine says, and what is wrong with it; `key` is one that no generation has."""
    assert engine.model is not None
    done = asyncio.Event()
    probe = Canary(key, engine.model)

    def take(outputs: Sequence[Output], _: bytes = b"") -> None:
        probe.take(outputs)
        if probe.is_done:
            done.set()

    with engine.probed(take):
        try:
            engine.adapter.submit(key, _TENANT, canary.prompt(engine.model), canary.SAMPLING, NOT_URGENT)
            async with asyncio.timeout(canary.LIMIT_S):
                await done.wait()
        except TimeoutError:
            probe.fault = f"it gave {len(probe.token_ids)} within {canary.LIMIT_S:g} s"
        except EngineError as exc:
            probe.fault = f"it said: {exc}"
        finally:
            if not probe.is_done:
                engine.adapter.abort([key])
    return probe


def require_right(probe: Canary) -> None:
    """Raise EngineError when the answer cannot be a model's."""
    if probe.fault:
        text = f"cannot serve the new model: asked for a few tokens, {probe.fault}"
        raise EngineError("engine_unavailable", text)
