"""One model in the place of another: what happens in which order, and what stays when something goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from support.virtual_time import run_in_virtual_time

from seedance.engine import canary, model_swap
from seedance.engine.adapter import EngineAdapter, EngineEvents, EngineState, EngineStatistics, Output
from seedance.engine.engines import Engine, Engines, Role
from seedance.engine.ledger import Ledger
from seedance.engine.model_check import Read, Request
from seedance.engine.model_files import ModelFiles
from seedance.engine.model_load import LoadOrder, LoadPhase, LoadState
from seedance.engine.model_shapes import ModelConfig
from seedance.engine.model_swap import LATE_S, ModelSwap
from seedance.engine.request import NOT_URGENT, FinishReason, ModelInfo, Sampling, TenantContext, TokenLogprobs, Urgency
from seedance.engine.settings import EngineSettings, FailoverSettings
from seedance.engine.vllm_control import LeftCore
from seedance.errors import EngineDead, EngineError

OLD = EngineSettings(kind="vllm", name="m", model="/old", load="beside")
NEW = msgspec.structs.replace(OLD, model="/new")
TOKENS = {"/old": "t1", "/new": "t1", "/other": "t2"}


class FakeAdapter:
    """An engine that answers its canary as the test says."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.logprob = -1.0
        self.answers = True
        self.refusal: EngineError | None = None
        self.start_error: EngineDead | None = None
        self.events: EngineEvents
        self.aborted: list[int] = []
        self.stopped = False
        self.core_pid: int | None = None
        self.unclaimed: Collection[int] = ()

    async def start(self, events: EngineEvents) -> ModelInfo:
        self.events = events
        await asyncio.sleep(2)
        if self.start_error is not None:
            raise self.start_error
        return ModelInfo(
            name=self.settings.name,
            tokenizer_dir=self.settings.model,
            max_model_len=100,
            vocab_size=50,
            eos_token_ids=(),
            created=0,
            engine="fake",
            tokens=TOKENS[self.settings.model],
        )

    def submit(
        self,
        key: int,
        tenant: TenantContext,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        urgency: Urgency = NOT_URGENT,
        emitted_token_ids: Sequence[int] = (),
        claim: str = "",
    ) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.answers:
            positions = [TokenLogprobs([7, 8], [self.logprob, -2.0], 1)] * sampling.max_tokens
            output = Output(key, [7] * sampling.max_tokens, FinishReason.LENGTH, positions)
            asyncio.get_running_loop().call_later(1, lambda: self.events.step_completed([output]))

    def claim(self, claim: str, emitted_token_ids: Sequence[int]) -> Output | None:
        return None

    def remember(self, model: ModelInfo) -> None:
        pass

    def abort(self, keys: Sequence[int]) -> None:
        self.aborted += keys

    def set_paused(self, keys: Sequence[int], is_paused: bool) -> None:
        pass

    async def statistics(self) -> EngineStatistics:
        return EngineStatistics(state=EngineState.READY, running=0, waiting=0)

    def give_up(self, reason: str) -> None:
        pass

    def shrink(self) -> None:
        pass

    def die(self) -> None:
        self.events.state_changed(EngineState.DEAD, "killed")

    async def stop(self) -> None:
        self.stopped = True


class FakeSource:
    def __init__(self) -> None:
        self.adapters: list[FakeAdapter] = []
        self.prepare: Callable[[FakeAdapter], object] = lambda adapter: None

    async def left(self, settings: EngineSettings, most: int) -> Sequence[LeftCore]:
        return ()

    def create(self, settings: EngineSettings, ledger: Ledger, left: LeftCore | None = None) -> EngineAdapter:
        adapter = FakeAdapter(settings)
        self.prepare(adapter)
        self.adapters.append(adapter)
        return adapter

    async def stop(self) -> None:
        pass


class Scene:
    """A host of which nothing is real but its engines; `streams` counts the generations of each."""

    def __init__(self, **failover: Any) -> None:
        self.source = FakeSource()
        settings = msgspec.structs.replace(OLD, failover=FailoverSettings(**failover))
        self.engines = Engines(self.source, settings, Ledger.create(), self, 1.0)
        self.settings = settings
        self.states: list[LoadState] = []
        self.news: list[str] = []
        self.streams: dict[str, int] = {}
        self.workers_error: EngineError | None = None
        self.zygote_reason: str | None = ""
        self.swap: ModelSwap
        self.outputs: list[Output] = []
        self.check_error: EngineError | None = None

    # an EnginesOwner

    def step_completed(self, outputs: Sequence[Output], singles: bytes = b"") -> None:
        self.outputs += outputs

    def state_changed(self, state: EngineState, detail: str, note: str = "") -> None:
        active = self.engines.active
        self.news.append(f"{state} {active.settings.model}" if active is not None else str(state))

    def engine_ended(self, engine: Engine) -> None:
        self.news.append(f"{engine.settings.model} ended")

    def engine_left(self, engine: Engine) -> None:
        self.news.append(f"{engine.settings.model} left")

    def engine_takes(self, engine: Engine) -> None:
        pass

    # a SwapHost

    def load_changed(self, state: LoadState, tokenizer_dir: str) -> None:
        if state.phase is LoadPhase.PREPARING and self.zygote_reason is not None:
            assert tokenizer_dir == state.order.path
            self.swap.new_workers_ready(self.zygote_reason)
        self.states.append(state)

    def free_key(self) -> int:
        return 9

    async def prepare_workers(self, tokenizer_dir: str) -> None:
        self.news.append(f"prepare {tokenizer_dir}")
        if self.workers_error is not None:
            raise self.workers_error

    def running(self, engine: Engine) -> int:
        return self.streams.get(engine.settings.model, 0)

    def move(self, source: Engine, target: Engine) -> None:
        self.news.append(f"move {self.streams.pop(source.settings.model)} to {target.settings.model}")

    def tell_replaced(self, engine: Engine) -> None:
        self.news.append(f"tell {engine.settings.model}")

    def drop(self, engine: Engine, error: EngineError) -> None:
        self.news.append(f"drop {self.streams.pop(engine.settings.model, 0)}: {error.code}")

    # the test's

    async def check(self, request: Request, progress: Callable[[Read], None]) -> ModelFiles:
        progress(Read(5, 10))
        await asyncio.sleep(1)
        if self.check_error is not None:
            raise self.check_error
        return ModelFiles(
            path=request.path,
            weights=("model.safetensors",),
            weight_bytes=10,
            parameters=5,
            dtypes=("F16",),
            config=ModelConfig(),
            tokens_digest=TOKENS[request.path],
            checksums={"model.safetensors": "0"},
        )

    def begin(self, path: str = "/new", *, load: str = "beside", **order: Any) -> asyncio.Task[None]:
        settings = msgspec.structs.replace(self.settings, model=path, load=load)
        self.swap = ModelSwap(self, self.engines, LoadOrder(path=path, **order), settings, self.check)
        return asyncio.create_task(self.swap.run())

    async def load(self, path: str = "/new", **order: Any) -> LoadState:
        await self.begin(path, **order)
        return self.states[-1]

    @property
    def phases(self) -> list[str]:
        """The phases, each once in a row."""
        return [s.phase.value for at, s in enumerate(self.states) if not at or self.states[at - 1].phase is not s.phase]

    @property
    def served(self) -> str:
        active = self.engines.active
        return "" if active is None else active.settings.model

    def living(self) -> list[str]:
        return [f"{engine.settings.model} {engine.role}" for engine in self.engines.all]


@contextlib.asynccontextmanager
async def scene(**failover: Any) -> AsyncIterator[Scene]:
    it = Scene(**failover)
    keeping = asyncio.create_task(it.engines.keep())
    wanted = 2 if failover.get("standby") else 1
    while [e.role for e in it.engines.all].count(Role.STANDBY) + (it.engines.active is not None) < wanted:
        await asyncio.sleep(0.1)
    it.news.clear()
    try:
        yield it
    finally:
        keeping.cancel()
        await it.engines.stop()


def run(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def sync(*arguments: Any, **named: Any) -> None:
        run_in_virtual_time(test(*arguments, **named))

    sync.__name__, sync.__doc__ = test.__name__, test.__doc__
    sync.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return sync


# -- beside -----------------------------------------------------------------------------------------------------------


@run
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


@run
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


@run
async def test_streams_that_take_too_long_go_on_with_the_new_model() -> None:
    async with scene() as it:
        it.streams = {"/old": 3}
        began_s = asyncio.get_running_loop().time()
        await it.load(drain_s=50.0)
        assert it.news[2:] == ["tell /old", "move 3 to /new"]
        assert 50 <= asyncio.get_running_loop().time() - began_s < 60


@run
async def test_streams_go_on_at_once_if_that_is_wanted() -> None:
    async with scene() as it:
        it.streams = {"/old": 3}
        await it.load(policy="continue")
        assert it.news[2:] == ["tell /old", "move 3 to /new"]
        assert it.living() == ["/new active"]


@run
async def test_streams_of_other_tokens_end_with_an_error_when_their_time_is_up() -> None:
    async with scene() as it:
        it.streams = {"/old": 3}
        await it.load("/other", drain_s=10.0)
        assert it.news[1:] == ["ready /other", "drop 3: engine_unavailable"]


@run
async def test_requests_that_were_tokenised_for_the_old_model_have_a_moment() -> None:
    async with scene() as it:
        task = it.begin("/other", drain_s=0.0)
        while not it.swap.is_switched:
            await asyncio.sleep(0.1)
        switched_s = asyncio.get_running_loop().time()
        await task
        assert asyncio.get_running_loop().time() - switched_s > LATE_S - 0.5


@run
async def test_streams_of_other_tokens_cannot_go_on() -> None:
    async with scene() as it:
        state = await it.load("/other", policy="continue")
        assert state.phase is LoadPhase.FAILED
        assert "its token ids mean something else; use --policy finish" in state.reason
        assert len(it.source.adapters) == 1, "nothing was started for it"


@run
async def test_engines_that_stand_by_are_of_the_new_model_from_then_on() -> None:
    async with scene(standby=True) as it:
        assert it.living() == ["/old active", "/old standby"]
        await it.load()
        await asyncio.sleep(10)
        assert it.living() == ["/new active", "/new standby"]


@run
async def test_what_is_started_after_the_switch_is_the_new_model() -> None:
    async with scene() as it:
        await it.load()
        it.source.adapters[-1].die()
        await asyncio.sleep(10)
        assert it.living() == ["/new active"]


@run
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


@run
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


def with_new(change: Callable[[FakeAdapter], object]) -> Callable[[FakeAdapter], object]:
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
@run
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
@run
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


@run
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


@run
async def test_without_an_engine_there_is_nothing_to_replace() -> None:
    async with scene() as it:
        it.source.prepare = lambda adapter: setattr(adapter, "start_error", EngineDead("no"))
        it.source.adapters[0].die()
        state = await it.load()
        assert "cannot load a model while no engine serves" in state.reason


# -- instead ----------------------------------------------------------------------------------------------------------


@run
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


@run
async def test_with_room_for_one_streams_wait_for_the_new_engine() -> None:
    async with scene(standby=True) as it:
        it.streams = {"/old": 2}
        await it.load(load="instead", policy="continue")
        assert it.news == ["prepare /new", "/old left", "/old left", "recovering", "ready /new", "tell /new"]
        await asyncio.sleep(10)
        assert it.living() == ["/new active", "/new standby"]


@run
async def test_with_room_for_one_streams_of_other_tokens_end_first() -> None:
    async with scene() as it:
        it.streams = {"/old": 2}
        await it.load("/other", load="instead", drain_s=3.0)
        assert it.news[1:4] == ["drop 2: engine_unavailable", "/old left", "recovering"]


@run
async def test_a_pause_is_bounded() -> None:
    async with scene() as it:
        it.source.prepare = with_new(lambda adapter: setattr(adapter, "answers", False))
        began_s = asyncio.get_running_loop().time()
        state = await it.load(load="instead")
        assert state.phase is LoadPhase.FAILED
        assert asyncio.get_running_loop().time() - began_s < model_swap.PAUSE_S + 10
        await asyncio.sleep(5)
        assert it.living() == ["/old active"]
