"""vLLM engines of the benches that compare schedulers: ours, and vLLM's own, driven through the adapter."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

from support.tiny_model import VOCAB_SIZE, tiny_model

from bench.report import say
from seedance.engine.adapter import EngineState, Output, outputs_of
from seedance.engine.ledger import EngineRecord, Ledger
from seedance.engine.request import Sampling, TenantContext
from seedance.engine.scheduling import NOTHING_COUNTED, TenantLimits, TenantStatistics
from seedance.engine.vllm import VllmAdapter, VllmSettings

KV_BYTES = 256 << 20


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Return a prompt that has no beginning in common with others."""
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=tokens)


class Request:
    """One request: when it was sent, when each of its tokens came, and that it has ended."""

    def __init__(self, row: int, prompt_tokens: int) -> None:
        self.row = row
        self.prompt_tokens = prompt_tokens
        self.sent_s = time.perf_counter()
        self.times_s: list[float] = []
        self.ended = asyncio.Event()

    @property
    def first_token_s(self) -> float:
        """The time to the first token."""
        return self.times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """The times between tokens."""
        return [later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)]


class BenchEngine:
    """One engine with its own ledger; an `EngineEvents`."""

    def __init__(
        self, run_dir: Path, *, plain: bool, slots: int, threads: int = 1, step_target_s: float = 0.03
    ) -> None:
        self.name = "plain" if plain else "seedance"
        self.ledger = Ledger.create()
        settings = VllmSettings(
            model=str(tiny_model()),
            name="tiny",
            run_dir=str(run_dir),
            kv_bytes=KV_BYTES,
            max_num_seqs=slots,
            step_target_s=step_target_s,
            threads=threads,
            dtype="float32",
            plain_scheduler=plain,
        )
        self._adapter = VllmAdapter(settings, self.ledger)
        self._requests: dict[int, Request] = {}
        self._key = 0
        self._is_being_renewed = False
        self.tokens = 0

    async def start(self) -> None:
        """Bring it up."""
        await self._adapter.start(self)
        say(f"{self.name} is up")

    async def renew(self) -> None:
        """Let another process take the EngineCore's place: some are faster than others for as long as they live."""
        self._is_being_renewed = True
        self._adapter.give_up("another process takes its place")
        self._is_being_renewed = False
        await self._adapter.start(self)

    async def stop(self) -> None:
        """End it."""
        await self._adapter.stop()
        self.ledger.close()

    def set_limits(self, limits: dict[int, TenantLimits]) -> None:
        """Put limits in force, by row."""
        for row, given in limits.items():
            self.ledger.set_limits(row, given)
        self.ledger.limits_changed()

    def submit(self, row: int, prompt: Sequence[int], max_tokens: int) -> Request:
        """Send a request that ends after just so many tokens."""
        self._key = self._key % 60_000 + 1
        request = self._requests[self._key] = Request(row, len(prompt))
        tenant = TenantContext(name=str(row), scheduling_class="", cache_salt=f"salt {row}", row=row)
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._adapter.submit(self._key, tenant, prompt, sampling)
        return request

    async def abort_all(self) -> None:
        """End what runs; returns when the engine has nothing left."""
        self._adapter.abort(list(self._requests))
        for request in self._requests.values():
            request.ended.set()
        self._requests.clear()
        while (counted := await self._adapter.statistics()).running or counted.waiting:
            await asyncio.sleep(0.01)

    def statistics(self, row: int) -> TenantStatistics:
        """Return what the scheduler has counted for a tenant; nothing with vLLM's own."""
        return self.ledger.statistics(row) or NOTHING_COUNTED

    def record(self) -> EngineRecord:
        """Return the scheduler's record of the engine."""
        return self.ledger.engine() or EngineRecord()

    def step_completed(self, outputs: Sequence[Output], singles: bytes = b"") -> None:
        """See `EngineEvents`."""
        now_s = time.perf_counter()
        for output in (*outputs, *outputs_of(singles)):
            request = self._requests.get(output.key)
            if request is None:
                continue
            self.tokens += len(output.token_ids)
            request.times_s += [now_s] * len(output.token_ids)
            if output.finish_reason is not None:
                del self._requests[output.key]
                request.ended.set()

    def state_changed(self, state: EngineState, detail: str) -> None:
        """See `EngineEvents`."""
        if state is EngineState.DEAD and not self._is_being_renewed:
            raise SystemExit(f"cannot go on: {detail}")
