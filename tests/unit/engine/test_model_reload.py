"""Another model's weights in the engine that serves: there, and back when something goes wrong."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest
from support.swap_scene import CanaryAdapter, Scene, scene
from support.virtual_time import in_virtual_time

from seedance.engine.adapter import EngineState
from seedance.engine.engine import Role
from seedance.engine.model_load import LoadPhase
from seedance.engine.model_reload import PAUSE_S
from seedance.errors import EngineDead, EngineError

ALIKE = {"/old": "1", "/new": "1", "/other": "1"}
DEATH = (EngineState.DEAD, "killed")
FULL = EngineError("engine_unavailable", "cannot load it: the disk failed")


def adapter_of(it: Scene) -> CanaryAdapter:
    """Return the engine that serves at first."""
    it.layouts = ALIKE
    return it.source.adapters[0]


@in_virtual_time
async def test_the_engine_that_serves_goes_on_with_the_new_weights() -> None:
    async with scene() as it:
        adapter = adapter_of(it)
        it.streams = {"/old": 2}
        state = await it.load(load="instead", policy="continue")
        assert it.phases == ["checking", "preparing", "reloading", "draining", "served"]
        assert (state.place, state.is_switched, state.restart_reason) == ("reload", True, "")
        assert it.news == ["prepare /new", "take back 2", "ready /new", "tell /new"]
        assert it.living() == ["/new active"]
        assert it.source.adapters == [adapter]
        assert adapter.reloads == ["/new"]
        assert adapter.known == ["/old t1", "/new t1"]
        assert it.engines.settings.model == "/new"
        assert it.engines.taking is it.engines.active
        assert state.reload_s == pytest.approx(adapter.reload_s + 2, abs=0.1)  # and two answers to the canary
        assert state.pause_s == state.reload_s
        assert it.outputs == [], "the canary's tokens are nobody's"


@in_virtual_time
async def test_new_requests_wait_meanwhile() -> None:
    async with scene() as it:
        adapter_of(it)
        task = it.begin(load="instead")
        while LoadPhase.RELOADING not in {state.phase for state in it.states}:
            await asyncio.sleep(0.1)
        assert it.engines.taking is None
        assert it.takes == ["/old"]  # as it came up
        await task
        assert it.takes[1] == "/new"


@in_virtual_time
async def test_streams_have_time_to_end_on_the_old_weights() -> None:
    async with scene() as it:
        adapter = adapter_of(it)
        it.streams = {"/old": 3}
        task = it.begin(load="instead", drain_s=50.0)
        await asyncio.sleep(20)
        assert adapter.reloads == []
        it.streams["/old"] = 0
        await task
        assert adapter.reloads == ["/new"]
        assert it.states[-1].pause_s is not None
        assert it.states[-1].reload_s is not None
        assert it.states[-1].pause_s > it.states[-1].reload_s + 15


@in_virtual_time
async def test_streams_that_take_too_long_go_on_with_the_new_weights() -> None:
    async with scene() as it:
        adapter_of(it)
        it.streams = {"/old": 3}
        began_s = asyncio.get_running_loop().time()
        await it.load(load="instead", drain_s=50.0)
        assert it.news[1] == "take back 3"
        assert asyncio.get_running_loop().time() - began_s < 60


@in_virtual_time
async def test_engines_that_stand_by_are_of_the_new_model_from_then_on() -> None:
    async with scene(standby=True) as it:
        adapter_of(it)
        await it.load(load="instead")
        await asyncio.sleep(10)
        assert it.living() == ["/new active", "/new standby"]
        it.source.adapters[0].die()
        await asyncio.sleep(10)
        assert it.living() == ["/new active", "/new standby"]


@in_virtual_time
async def test_there_and_back_again() -> None:
    async with scene() as it:
        adapter = adapter_of(it)
        adapter.tokens = [7] * 9
        await it.load(load="instead")
        await it.load("/old", load="instead")
        assert adapter.reloads == ["/new", "/old"]
        assert it.living() == ["/old active"]


# -- another engine instead -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "layouts", "reason"),
    [
        ("/new", {**ALIKE, "/new": "2"}, "its config.json says something else, or its tensors have other shapes"),
        ("/new", {"/new": "1"}, "the old one cannot be compared with it: cannot use it"),
        ("/other", ALIKE, "its tokens mean something else"),
        ("/old", ALIKE, "it is in the directory of the old one"),
    ],
)
@in_virtual_time
async def test_what_is_no_matter_of_weights_alone_takes_another_engine(
    path: str, layouts: dict[str, str], reason: str
) -> None:
    async with scene() as it:
        it.layouts = layouts
        state = await it.load(path, load="instead")
        assert (state.phase, state.place, state.restart_reason) == (LoadPhase.SERVED, "instead", reason)
        assert state.reload_s is None
        assert it.source.adapters[0].reloads == []
        assert it.living() == [f"{path} active"]
        assert len(it.source.adapters) == 2


@in_virtual_time
async def test_an_old_engine_that_dies_while_it_drains_takes_another_engine() -> None:
    async with scene() as it:
        adapter = adapter_of(it)
        it.streams = {"/old": 3}
        task = it.begin(load="instead", drain_s=500.0)
        await asyncio.sleep(10)
        adapter.die()
        await task
        assert it.states[-1].restart_reason == "the engine that served it has died"
        assert it.living() == ["/new active"]


# -- what goes wrong --------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[CanaryAdapter], object], str]] = {
    "nan": (lambda adapter: adapter.logprobs.update({"/new": math.nan}), "it gave the log probability nan"),
    "error": (lambda adapter: adapter.reload_errors.update({"/new": FULL}), "the disk failed"),
}


@pytest.mark.parametrize("case", WRONG)
@in_virtual_time
async def test_the_old_weights_are_loaded_again(case: str) -> None:
    async with scene() as it:
        adapter = adapter_of(it)
        spoil, reason = WRONG[case]
        spoil(adapter)
        it.streams = {"/old": 2}
        state = await it.load(load="instead", policy="continue")
        assert (state.phase, state.is_switched) == (LoadPhase.FAILED, False)
        assert reason in state.reason
        assert it.news == ["prepare /new", "take back 2"]
        assert adapter.reloads == ["/new", "/old"]
        assert adapter.known[-1] == "/old t1"
        assert it.source.adapters == [adapter]
        assert it.living() == ["/old active"]
        assert it.takes == ["/old", "/old"]
        assert it.engines.taking is it.engines.active
        adapter.die()
        await asyncio.sleep(10)
        assert it.living() == ["/old active"], "what is started now is the old model, too"


def forgets(adapter: CanaryAdapter) -> None:
    adapter.tokens = [7, 7, 8]


BACK: dict[str, tuple[Callable[[CanaryAdapter], object], str]] = {
    "error": (lambda adapter: adapter.reload_errors.update({"/old": FULL}), "the disk failed"),
    "nan": (lambda adapter: adapter.logprobs.update({"/old": math.nan}), "it gave the log probability nan"),
    "other tokens": (forgets, "it says something else than before"),
}


@pytest.mark.parametrize("standby", [False, True])
@pytest.mark.parametrize("case", BACK)
@in_virtual_time
async def test_an_engine_that_cannot_go_back_is_none(case: str, standby: bool) -> None:
    async with scene(standby=standby) as it:
        adapter = adapter_of(it)
        adapter.logprobs["/new"] = math.nan
        spoil, reason = BACK[case]
        spoil(adapter)
        state = await it.load(load="instead")
        assert "it gave the log probability nan" in state.reason
        if not standby:  # else the next one is active at once
            assert any("cannot go back to '/old'" in detail and reason in detail for detail in it.details)
        await asyncio.sleep(20)
        assert it.living() == ["/old active", "/old standby"][: 1 + standby]
        assert adapter.stopped
        assert it.engines.settings is it.settings
        assert it.engines.taking is it.engines.active


@in_virtual_time
async def test_an_engine_that_dies_of_it_is_followed_by_one_with_the_old_model() -> None:
    async with scene() as it:
        adapter = adapter_of(it)
        adapter.reload_errors["/new"] = EngineDead("cannot go on with the engine: killed by SIGBUS")
        state = await it.load(load="instead")
        assert state.reason == "cannot go on with the engine: killed by SIGBUS"
        assert adapter.reloads == ["/new"]
        await asyncio.sleep(10)
        assert it.living() == ["/old active"]


@in_virtual_time
async def test_a_pause_is_bounded() -> None:
    async with scene() as it:
        adapter = adapter_of(it)
        adapter.reload_s = 1000.0
        began_s = asyncio.get_running_loop().time()
        state = await it.load(load="instead")
        assert f"were not loaded within {PAUSE_S:g} s" in state.reason
        assert asyncio.get_running_loop().time() - began_s < PAUSE_S + 10
        await asyncio.sleep(10)
        assert adapter.stopped
        assert it.living() == ["/old active"]


@in_virtual_time
async def test_a_load_that_is_cancelled_halfway_leaves_the_old_model() -> None:
    async with scene() as it:
        adapter = adapter_of(it)
        task = it.begin(load="instead")
        while not adapter.reloads:
            await asyncio.sleep(0.1)
        task.cancel()
        await task
        assert it.states[-1].reason == "it was cancelled"
        await asyncio.sleep(10)
        assert adapter.stopped
        assert it.living() == ["/old active"]


@in_virtual_time
async def test_an_engine_that_stood_by_and_dies_gives_nobody_to_one_without_weights() -> None:
    async with scene(standby=True) as it:
        adapter = adapter_of(it)
        adapter.reload_s = 30.0
        task = it.begin(load="instead")
        while not adapter.reloads:
            await asyncio.sleep(0.1)
        next(engine for engine in it.engines.all if engine.role is Role.STANDBY).state_changed(*DEATH)
        assert it.takes == ["/old"]
        await task
        assert it.living()[0] == "/new active"
