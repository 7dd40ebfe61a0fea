"""A host of which nothing is real but its engines, and adapters that answer the canary as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any

import msgspec
from support.virtual_time import run_in_virtual_time

from seedance.engine.adapter import EngineAdapter, EngineEvents, EngineState, EngineStatistics, Output
from seedance.engine.engine import Engine, Role
from seedance.engine.engines import Engines
from seedance.engine.ledger import Ledger
from seedance.engine.model_check import Read, Request
from seedance.engine.model_files import ModelFiles
from seedance.engine.model_load import LoadOrder, LoadPhase, LoadState
from seedance.engine.model_shapes import ModelConfig
from seedance.engine.model_swap import ModelSwap
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
        self.weights = settings.model
        self.reloads: list[str] = []
        self.reload_s = 3.0
        self.reload_errors: dict[str, EngineError] = {}  # by model
        self.logprobs: dict[str, float] = {}
        self.tokens = [7, 7, 7, 7]  # of its answers, one after the other
        self.remembered: list[str] = []

    async def start(self, events: EngineEvents) -> ModelInfo:
        self.events = events
        await asyncio.sleep(2)
        if self.start_error is not None:
            raise self.start_error
        return self.info(TOKENS[self.settings.model])

    def info(self, tokens: str = "") -> ModelInfo:
        return ModelInfo(
            name=self.settings.name,
            tokenizer_dir=self.weights,
            max_model_len=100,
            vocab_size=50,
            eos_token_ids=(),
            created=0,
            engine="fake",
            tokens=tokens,
        )

    async def reload(self, name: str, model: str) -> ModelInfo:
        self.reloads.append(model)
        await asyncio.sleep(self.reload_s)
        error = self.reload_errors.get(model)
        if isinstance(error, EngineDead):
            self.die()
        if error is not None:
            raise error
        self.weights = model
        return self.info()

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
            logprob = self.logprobs.get(self.weights, self.logprob)
            positions = [TokenLogprobs([7, 8], [logprob, -2.0], 1)] * sampling.max_tokens
            output = Output(key, [self.tokens.pop(0)] * sampling.max_tokens, FinishReason.LENGTH, positions)
            asyncio.get_running_loop().call_later(1, lambda: self.events.step_completed([output]))

    def claim(self, claim: str, emitted_token_ids: Sequence[int]) -> Output | None:
        return None

    def remember(self, model: ModelInfo) -> None:
        self.remembered.append(f"{model.tokenizer_dir} {model.tokens}")

    def abort(self, keys: Sequence[int]) -> None:
        self.aborted += keys

    def set_paused(self, keys: Sequence[int], is_paused: bool) -> None:
        pass

    async def statistics(self) -> EngineStatistics:
        return EngineStatistics(state=EngineState.READY, running=0, waiting=0)

    def give_up(self, reason: str) -> None:
        self.die(reason)

    def shrink(self) -> None:
        pass

    def die(self, reason: str = "killed") -> None:
        self.events.state_changed(EngineState.DEAD, reason)

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
        self.layouts = {"/old": "1", "/new": "2", "/other": "3"}
        self.takes: list[str] = []
        self.details: list[str] = []

    # an EnginesOwner

    def step_completed(self, outputs: Sequence[Output], singles: bytes = b"") -> None:
        self.outputs += outputs

    def state_changed(self, state: EngineState, detail: str, note: str = "") -> None:
        active = self.engines.active
        self.details.append(detail)
        self.news.append(f"{state} {active.settings.model}" if active is not None else str(state))

    def engine_ended(self, engine: Engine) -> None:
        self.news.append(f"{engine.settings.model} ended")

    def engine_left(self, engine: Engine) -> None:
        self.news.append(f"{engine.settings.model} left")

    def engine_takes(self, engine: Engine) -> None:
        self.takes.append(engine.settings.model)

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

    def take_back(self, engine: Engine) -> None:
        self.news.append(f"take back {self.streams.pop(engine.settings.model, 0)}")

    def tell_replaced(self, engine: Engine) -> None:
        self.news.append(f"tell {engine.settings.model}")

    def drop(self, engine: Engine, error: EngineError) -> None:
        self.news.append(f"drop {self.streams.pop(engine.settings.model, 0)}: {error.code}")

    # the test's

    async def check(self, request: Request, progress: Callable[[Read], None]) -> ModelFiles:
        if not request.heads_only:
            progress(Read(5, 10))
            await asyncio.sleep(1)
        elif request.path not in self.layouts:
            raise EngineError("invalid_request", "cannot use it")
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
            layout=self.layouts.get(request.path, ""),
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
