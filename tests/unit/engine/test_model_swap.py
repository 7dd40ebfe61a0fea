"""One model in the place of another: what happens in which order, and what stays when something goes wrong."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from support.swap_scene import CanaryAdapter, Scene, scene
from support.virtual_time import in_virtual_time

from seedance.engine import canary
from seedance.engine.adapter import Output
from seedance.engine.model_load import LoadPhase
from seedance.engine.model_reload import PAUSE_S
from seedance.engine.model_swap import LATE_S
from seedance.errors import EngineDead, EngineError

# -- beside -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_from_the_order_to_the_end_of_the_old_engine() -> None:
    async with scene() as it:
        state = await it.load()
        assert it.phases == ["checking", "starting", "trying", "preparing", "draining", "served"]
        assert (state.place, state.has_manifest, state.is_switched, state.pause_s) == ("beside", True, True, 0.0)
        assert it.news == ["prepare /new", "ready /new"]
        assert it.living() == ["/new active"]
        assert it.source.adapters[0].stopped
        assert it.outputs == [], "the canary's tokens are nobody's"
        assert it.engines.active is not None
        it.engines.active.step_completed([Output(1, [2])])
        assert it.outputs == [Output(1, [2])]


@in_virtual_time
async def test_streams_have_time_to_end() -> None:
    async with scene() as it:
        it.streams = {"/old": 3}
        task = it.begin(drain_s=50.0)
        await asyncio.sleep(10)
        assert it.living() == ["/old leaving", "/new active"]
        assert it.states[-1].streams == 3
        it.streams["/old"] = 0
        await task
        assert it.news == ["prepare /new", "ready /new"]
        assert it.living() == ["/new active"]


@in_virtual_time
async def test_streams_that_take_too_long_go_on_with_the_new_model() -> None:
    async with scene() as it:
        it.streams = {"/old": 3}
        began_s = asyncio.get_running_loop().time()
        await it.load(drain_s=50.0)
        assert it.news[2:] == ["tell /old", "move 3 to /new"]
        assert 50 <= asyncio.get_running_loop().time() - began_s < 60


@in_virtual_time
async def test_streams_go_on_at_once_if_that_is_wanted() -> None:
    async with scene() as it:
        it.streams = {"/old": 3}
        await it.load(policy="continue")
        assert it.news[2:] == ["tell /old", "move 3 to /new"]
        assert it.living() == ["/new active"]


@in_virtual_time
async def test_streams_of_other_tokens_end_with_an_error_when_their_time_is_up() -> None:
    async with scene() as it:
        it.streams = {"/old": 3}
        await it.load("/other", drain_s=10.0)
        assert it.news[1:] == ["ready /other", "drop 3: engine_unavailable"]


@in_virtual_time
async def test_requests_that_were_tokenised_for_the_old_model_have_a_moment() -> None:
    async with scene() as it:
        task = it.begin("/other", drain_s=0.0)
        while not it.swap.is_switched:
            await asyncio.sleep(0.1)
        switched_s = asyncio.get_running_loop().time()
        await task
        assert asyncio.get_running_loop().time() - switched_s > LATE_S - 0.5


@in_virtual_time
async def test_streams_of_other_tokens_cannot_go_on() -> None:
    async with scene() as it:
        state = await it.load("/other", policy="continue")
        assert state.phase is LoadPhase.FAILED
        assert "its token ids mean something else; use --policy finish" in state.reason
        assert len(it.source.adapters) == 1, "nothing was started for it"


@in_virtual_time
async def test_engines_that_stand_by_are_of_the_new_model_from_then_on() -> None:
    async with scene(standby=True) as it:
        assert it.living() == ["/old active", "/old standby"]
        await it.load()
        await asyncio.sleep(10)
        assert it.living() == ["/new active", "/new standby"]


@in_virtual_time
async def test_what_is_started_after_the_switch_is_the_new_model() -> None:
    async with scene() as it:
        await it.load()
        it.source.adapters[-1].die()
        await asyncio.sleep(10)
        assert it.living() == ["/new active"]


@in_virtual_time
async def test_an_old_engine_that_dies_while_it_drains_ends_the_draining() -> None:
    async with scene() as it:
        it.streams = {"/old": 3}
        task = it.begin(drain_s=500.0)
        await asyncio.sleep(10)
        it.source.adapters[0].die()
        it.streams = {}
        await asyncio.wait_for(task, 5)
        assert it.states[-1].phase is LoadPhase.SERVED
        assert it.living() == ["/new active"]


@in_virtual_time
async def test_an_old_engine_that_dies_before_the_switch_is_started_again_meanwhile() -> None:
    async with scene() as it:
        it.zygote_reason = None
        task = it.begin()
        await asyncio.sleep(5)
        assert it.states[-1].phase is LoadPhase.PREPARING
        it.source.adapters[0].die()
        await asyncio.sleep(10)
        assert it.served == "/old"
        it.swap.new_workers_ready("")
        await task
        assert it.living() == ["/new active"]


# -- what goes wrong --------------------------------------------------------------------------------------------------


def with_new(change: Callable[[CanaryAdapter], object]) -> Callable[[CanaryAdapter], object]:
    return lambda adapter: change(adapter) if adapter.settings.model != "/old" else None


def setter(name: str, value: Any) -> Callable[[Scene], None]:
    """Return what gives a new engine a property."""

    def spoil(it: Scene) -> None:
        it.source.prepare = with_new(lambda adapter: setattr(adapter, name, value))

    return spoil


SPOILED: dict[str, tuple[Callable[[Scene], None], str]] = {
    "check": (lambda it: setattr(it, "check_error", EngineError("x", "cannot use '/new'")), "cannot use '/new'"),
    "start": (setter("start_error", EngineDead("cannot start the engine: x")), "cannot start the engine: x"),
    "nan": (setter("logprob", math.nan), "cannot serve the new model: asked for a few tokens, it gave the log"),
    "silence": (setter("answers", False), f"it gave 0 within {canary.LIMIT_S:g} s"),
    "refusal": (setter("refusal", EngineError("x", "too long")), "asked for a few tokens, it said: too long"),
    "zygote": (lambda it: setattr(it, "zygote_reason", "it is broken"), "cannot serve the new model: it is broken"),
    "zygote's silence": (lambda it: setattr(it, "zygote_reason", None), "its tokenizer was not loaded within"),
    "worker": (lambda it: setattr(it, "workers_error", EngineError("x", "cannot serve: y")), "cannot serve: y"),
}


@pytest.mark.parametrize("load", ["beside", "instead"])
@pytest.mark.parametrize("case", SPOILED)
@in_virtual_time
async def test_the_old_model_serves_when_something_goes_wrong(case: str, load: str) -> None:
    async with scene() as it:
        spoil, reason = SPOILED[case]
        spoil(it)
        state = await it.load(load=load)
        assert (state.phase, state.is_switched) == (LoadPhase.FAILED, False)
        assert reason in state.reason
        await asyncio.sleep(20)
        assert it.living() == ["/old active"]
        assert not any("/new" in news for news in it.news if news.startswith("ready"))
        assert it.engines.settings is it.settings
        assert it.engines.taking is it.engines.active
        it.source.prepare = lambda adapter: None
        it.check_error = it.workers_error = None
        it.zygote_reason = ""
        assert (await it.load(load=load)).phase is LoadPhase.SERVED
        assert it.living() == ["/new active"]


@pytest.mark.parametrize("phase", ["checking", "starting", "trying", "preparing"])
@in_virtual_time
async def test_a_load_can_be_given_up_before_the_switch(phase: str) -> None:
    async with scene() as it:
        it.zygote_reason = None
        task = it.begin()
        while not it.states or it.states[-1].phase != phase:
            await asyncio.sleep(0.1)
        task.cancel()
        await task
        assert (it.states[-1].phase, it.states[-1].reason) == (LoadPhase.FAILED, "it was cancelled")
        await asyncio.sleep(5)
        assert it.living() == ["/old active"]


@in_virtual_time
async def test_a_new_engine_that_dies_before_the_switch_is_no_engine() -> None:
    async with scene() as it:
        it.zygote_reason = None
        task = it.begin()
        await asyncio.sleep(5)
        it.source.adapters[1].die()
        it.swap.new_workers_ready("")
        await task
        assert it.states[-1].reason == "cannot serve the new model: its engine died before the switch"
        assert it.living() == ["/old active"]


@in_virtual_time
async def test_without_an_engine_there_is_nothing_to_replace() -> None:
    async with scene() as it:
        it.source.prepare = lambda adapter: setattr(adapter, "start_error", EngineDead("no"))
        it.source.adapters[0].die()
        state = await it.load()
        assert "cannot load a model while no engine serves" in state.reason


# -- instead ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_with_room_for_one_the_old_engine_goes_first() -> None:
    async with scene() as it:
        it.streams = {"/old": 2}
        task = it.begin(load="instead", drain_s=50.0)
        await asyncio.sleep(10)
        assert it.engines.taking is None, "new requests wait"
        assert it.served == "/old"
        it.streams["/old"] = 0
        await task
        assert it.phases == ["checking", "preparing", "draining", "starting", "trying", "draining", "served"]
        assert it.news == ["prepare /new", "/old left", "recovering", "ready /new", "tell /new"]
        assert it.engines.taking is it.engines.active
        assert it.states[-1].pause_s is not None
        assert it.states[-1].pause_s > 9


@in_virtual_time
async def test_with_room_for_one_streams_wait_for_the_new_engine() -> None:
    async with scene(standby=True) as it:
        it.streams = {"/old": 2}
        await it.load(load="instead", policy="continue")
        assert it.news == ["prepare /new", "/old left", "/old left", "recovering", "ready /new", "tell /new"]
        await asyncio.sleep(10)
        assert it.living() == ["/new active", "/new standby"]


@in_virtual_time
async def test_with_room_for_one_streams_of_other_tokens_end_first() -> None:
    async with scene() as it:
        it.streams = {"/old": 2}
        await it.load("/other", load="instead", drain_s=3.0)
        assert it.news[1:4] == ["drop 2: engine_unavailable", "/old left", "recovering"]


@in_virtual_time
async def test_a_pause_is_bounded() -> None:
    async with scene() as it:
        it.source.prepare = with_new(lambda adapter: setattr(adapter, "answers", False))
        began_s = asyncio.get_running_loop().time()
        state = await it.load(load="instead")
        assert state.phase is LoadPhase.FAILED
        assert asyncio.get_running_loop().time() - began_s < PAUSE_S + 10
        await asyncio.sleep(5)
        assert it.living() == ["/old active"]
