"""Workloads for simulated engines, and an engine to run them on: prices of the order of a mid-size model on one GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from seedance.engine.cost import Prices
from seedance.engine.policy import Policy
from seedance.engine.scheduling import PolicySettings, TenantLimits
from seedance.engine.simulation import Scheduler, SimulatedTenant, Simulation
from seedance.engine.simulation_report import Report
from seedance.engine.trace import Arrival

PRICES: Final = Prices(fixed_s=8e-3, mixed_s=1e-3, prefill_s=2.5e-5, decode_s=5e-5, context_s=2e-9, attention_s=2e-7)


class Clients(msgspec.Struct, frozen=True, kw_only=True):
    """Clients of one tenant in a closed loop: each sends the next request when it has the answer."""

    count: int
    prompt_tokens: int = 200
    output_tokens: int = 200
    deadline_s: float | None = None

    def arrival(self, tenant: str, at_s: float) -> Arrival:
        return Arrival(
            at_s=at_s,
            tenant=tenant,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            deadline_s=self.deadline_s,
        )


def settings(slots: int = 64, kv_blocks: int = 100_000, **more: object) -> PolicySettings:
    return msgspec.convert({"slots": slots, "kv_blocks": kv_blocks, **more}, PolicySettings)


def steadily(
    tenant: str, every_s: float, until_s: float, prompt_tokens: int, output_tokens: int, from_s: float = 0.0
) -> list[Arrival]:
    times = itertools.takewhile(lambda at_s: at_s < until_s, (from_s + every_s * i for i in itertools.count()))
    return [
        Arrival(at_s=at_s, tenant=tenant, prompt_tokens=prompt_tokens, output_tokens=output_tokens) for at_s in times
    ]


def merged(*traces: Iterable[Arrival]) -> list[Arrival]:
    return sorted(itertools.chain(*traces), key=lambda arrival: arrival.at_s)


def run(
    trace: Iterable[Arrival],
    *,
    limits: Mapping[str, TenantLimits] | None = None,
    until_s: float = math.inf,
    setting: PolicySettings | None = None,
    policy: Scheduler | None = None,
) -> Report:
    setting = setting or settings()
    tenants = {name: SimulatedTenant(limits=limit) for name, limit in (limits or {}).items()}
    return Simulation(policy or Policy(setting, 0.0), setting, PRICES, tenants).run(trace, until_s)


def run_clients(
    clients: Mapping[str, Clients],
    until_s: float,
    *,
    limits: Mapping[str, TenantLimits] | None = None,
    setting: PolicySettings | None = None,
    policy: Scheduler | None = None,
) -> Report:
    setting = setting or settings()
    tenants = {name: SimulatedTenant(limits=limit) for name, limit in (limits or {}).items()}
    simulation = Simulation(
        policy or Policy(setting, 0.0),
        setting,
        PRICES,
        tenants,
        next_arrival=lambda tenant, now_s: clients[tenant].arrival(tenant, now_s),
    )
    first = [crowd.arrival(name, 0.0) for name, crowd in clients.items() for _ in range(crowd.count)]
    return simulation.run(first, until_s)
