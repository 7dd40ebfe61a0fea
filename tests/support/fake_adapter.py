"""Engines that do what a test says, and where they come from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

import msgspec

from seedance.engine.adapter import EngineAdapter, EngineEvents, EngineState, EngineStatistics, Output
from seedance.engine.ledger import Ledger
from seedance.engine.request import NOT_URGENT, ModelInfo, Sampling, TenantContext, Urgency
from seedance.engine.settings import EngineSettings
from seedance.engine.vllm_control import Launch, LeftCore, VllmSettings
from seedance.errors import EngineError

MODEL = ModelInfo(
    name="m", tokenizer_dir="", max_model_len=100, vocab_size=50, eos_token_ids=(), created=0, engine="fake"
)


class FakeAdapter:
    """An engine that is up at once, notes what it is told, and makes nothing of it."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.submitted: list[tuple[int, str, list[int], Sampling]] = []
        self.urgencies: list[Urgency] = []
        self.emitted: list[list[int]] = []
        self.aborted: list[int] = []
        self.paused: dict[int, bool] = {}
        self.stopped = self.shrunk = 0
        self.start_error: Exception | None = None
        self.refusal: EngineError | None = None
        self.during_start: Callable[[], None] = lambda: None
        self.running = self.waiting = 0
        self.statistics_never_come = False
        self.events: EngineEvents
        self.core_pid: int | None = None
        self.unclaimed: Collection[int] = ()
        self.claimable: dict[tuple[str, tuple[int, ...]], Output] = {}
        self.claims: list[str] = []
        self.remembered: list[ModelInfo] = []

    async def start(self, events: EngineEvents) -> ModelInfo:
        self.events = events
        self.starts.append(asyncio.get_running_loop().time())
        self.during_start()
        if self.start_error is not None:
            raise self.start_error
        return MODEL

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
        self.claims.append(claim)
        self.urgencies.append(urgency)
        self.emitted.append(list(emitted_token_ids))
        self.submitted.append((key, tenant.name, list(prompt_token_ids), sampling))

    def claim(self, claim: str, emitted_token_ids: Sequence[int]) -> Output | None:
        return self.claimable.pop((claim, tuple(emitted_token_ids)), None)

    def remember(self, model: ModelInfo) -> None:
        self.remembered.append(model)

    async def reload(self, name: str, model: str) -> ModelInfo:
        return msgspec.structs.replace(MODEL, name=name, tokenizer_dir=model)

    def abort(self, keys: Sequence[int]) -> None:
        self.aborted += keys

    def set_paused(self, keys: Sequence[int], is_paused: bool) -> None:
        self.paused = {**self.paused, **dict.fromkeys(keys, is_paused)}

    async def statistics(self) -> EngineStatistics:
        if self.statistics_never_come:
            await asyncio.Event().wait()
        return EngineStatistics(state=EngineState.READY, running=self.running, waiting=self.waiting)

    def give_up(self, reason: str) -> None:
        self.die(reason)

    def shrink(self) -> None:
        self.shrunk += 1

    def die(self, detail: str = "killed") -> None:
        self.events.state_changed(EngineState.DEAD, detail)

    async def stop(self) -> None:
        self.stopped += 1


class FakeSource:
    """Engines as `make` makes them; `left_rows` are the ledger's rows of those that another host left."""

    def __init__(self, make: Callable[[EngineSettings], FakeAdapter]) -> None:
        self._make = make
        self.created: list[EngineSettings] = []
        self.rows: list[int] = []
        self.left_rows: list[int] = []
        self.most: list[int] = []
        self.stopped = 0

    async def left(self, settings: EngineSettings, most: int) -> Sequence[LeftCore]:
        self.most.append(most)
        vllm = VllmSettings(model="m", name="m", run_dir="/")
        launches = [Launch(number, vllm, "ipc://in", "ipc://out", row) for number, row in enumerate(self.left_rows)]
        return [LeftCore(launch, 100 + launch.launch, None) for launch in launches]

    def create(self, settings: EngineSettings, ledger: Ledger, left: LeftCore | None = None) -> EngineAdapter:
        assert left is None or left.engine_row == ledger.engine_row
        self.rows.append(ledger.engine_row)
        self.created.append(settings)
        return self._make(settings)

    async def stop(self) -> None:
        self.stopped += 1


def one_after_the_other(*adapters: FakeAdapter) -> Callable[[EngineSettings], FakeAdapter]:
    """Return what gives out these engines in their order, and the last one again and again."""
    left = list(adapters)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]
