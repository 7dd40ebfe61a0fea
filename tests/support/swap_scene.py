"""A host of which nothing is real but its engines, and adapters that answer the canary as a test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from support.fake_adapter import MODEL, FakeAdapter, FakeSource

from seedance.engine.adapter import EngineEvents, EngineState, Output
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
from seedance.errors import EngineDead, EngineError

OLD = EngineSettings(kind="vllm", name="m", model="/old", load="beside")
NEW = msgspec.structs.replace(OLD, model="/new")
TOKENS = {"/old": "t1", "/new": "t1", "/other": "t2"}


class CanaryAdapter(FakeAdapter):
    """An engine that takes its time, and answers its canary as the test says."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        self.settings = settings
        self.logprob = -1.0
        self.answers = True
        self.weights = settings.model
        self.reloads: list[str] = []
        self.reload_s = 3.0
        self.reload_errors: dict[str, EngineError] = {}  # by model
        self.logprobs: dict[str, float] = {}
        self.tokens = [7, 7, 7, 7]  # of its answers, one after the other

    @property
    def known(self) -> list[str]:
        """The models that the next host would have been told of."""
        return [f"{model.tokenizer_dir} {model.tokens}" for model in self.remembered]

    async def start(self, events: EngineEvents) -> ModelInfo:
        self.events = events
        await asyncio.sleep(2)
        await super().start(events)
        return self.info(TOKENS[self.settings.model])

    def info(self, tokens: str = "") -> ModelInfo:
        return msgspec.structs.replace(MODEL, name=self.settings.name, tokenizer_dir=self.weights, tokens=tokens)

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
        super().submit(key, tenant, prompt_token_ids, sampling, urgency, emitted_token_ids, claim)
        if self.answers:
            logprob = self.logprobs.get(self.weights, self.logprob)
            positions = [TokenLogprobs([7, 8], [logprob, -2.0], 1)] * sampling.max_tokens
            output = Output(key, [self.tokens.pop(0)] * sampling.max_tokens, FinishReason.LENGTH, positions)
            asyncio.get_running_loop().call_later(1, lambda: self.events.step_completed([output]))


class CanarySource(FakeSource):
    """Such engines; `prepare` is told of each before it starts."""

    def __init__(self) -> None:
        super().__init__(self._prepared)
        self.adapters: list[CanaryAdapter] = []
        self.prepare: Callable[[CanaryAdapter], object] = lambda adapter: None

    def _prepared(self, settings: EngineSettings) -> CanaryAdapter:
        adapter = CanaryAdapter(settings)
        self.prepare(adapter)
        self.adapters.append(adapter)
        return adapter


class Scene:
    """A host of which nothing is real but its engines; `streams` counts the generations of each."""

    def __init__(self, **failover: Any) -> None:
        self.source = CanarySource()
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
