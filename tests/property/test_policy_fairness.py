"""How far two tenants that both wait can drift apart, and how long a request can wait: the bounds of virtual counters.

With S slots, c the engine time that one request can be charged at most (all alone in its steps), w the least weight
and a the most that a turn is advanced (for urgent requests, short ones and far clients): while two tenants both wait,
neither gets more than

    G = (S x c + a + one step) / w

engine seconds per weight more than the other (what it has in the engine when they begin to wait or when it catches up,
its advance, and the step under way). So a request that is its tenant's head has its turn before the others have had
G per weight, and the seconds that they were behind it, plus the rest of what runs.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.workloads import PRICES
from support.workloads import settings as engine_settings

from seedance.engine.cost import CostModel, StepLoad
from seedance.engine.policy import Policy
from seedance.engine.scheduling import PolicySettings, TenantLimits
from seedance.engine.simulation import SimulatedTenant, Simulation
from seedance.engine.states import Key, Request, Tenant
from seedance.engine.trace import Arrival

pytestmark = pytest.mark.property

SLOTS = 4
PROMPT_MOST, OUTPUT_MOST = 1500, 40

arrivals = st.builds(
    Arrival,
    at_s=st.just(0.0),
    tenant=st.just(""),
    prompt_tokens=st.integers(1, PROMPT_MOST),
    output_tokens=st.integers(1, OUTPUT_MOST),
    priority=st.sampled_from([0, 0, 0, 1]),
    deadline_s=st.sampled_from([None, None, None, 0.0, 1.0]),
    rtt_s=st.sampled_from([0.0, 0.0, 0.1, 60.0]),
)
crowds = st.lists(arrivals, min_size=15, max_size=40)
classes = st.builds(TenantLimits, weight=st.sampled_from([1.0, 2.0, 4.0]), priority=st.sampled_from([0, 0, 0, 1, 3]))


def alone_s(setting: PolicySettings) -> float:
    """Return the engine time of the longest request in the smallest chunks, all alone."""
    reading = StepLoad()
    chunks = -(-PROMPT_MOST // setting.min_chunk_tokens)
    for chunk in range(chunks):
        reading.add_prefill(setting.min_chunk_tokens, chunk * setting.min_chunk_tokens)
    decode = StepLoad(requests=1, decodes=1, context_tokens=PROMPT_MOST + OUTPUT_MOST)
    whole = PRICES.cost_s(reading) + (chunks - 1) * (PRICES.fixed_s + PRICES.mixed_s)
    return whole + OUTPUT_MOST * PRICES.cost_s(decode)


class Watch:
    """Looks at the policy before each step."""

    def __init__(self, policy: Policy, gap_s: float, step_most_s: float) -> None:
        self.roster = policy._roster
        self.gap_s = gap_s
        self.step_most_s = step_most_s
        self.differences: dict[tuple[Tenant, Tenant], tuple[float, float]] = {}
        self.heads: dict[Tenant, tuple[Key, float]] = {}
        self.simulation: Simulation | None = None

    def look(self, _number: int) -> float:
        for tenant in self.roster.tenants.values():
            tenant.settle()
        self.drift()
        self.waits()
        return 1.0

    def drift(self) -> None:
        waiting = sorted(self.roster.counters.waiting, key=lambda tenant: tenant.row)
        pairs = set(itertools.combinations(waiting, 2))
        for pair in set(self.differences) - pairs:
            del self.differences[pair]
        for first, second in pairs:
            difference = first.virtual_s - second.virtual_s
            low, high = self.differences.get((first, second), (difference, difference))
            low, high = min(low, difference), max(high, difference)
            self.differences[first, second] = low, high
            # Who is ahead may be caught up with; to get further ahead than G is what must not happen.
            assert difference - max(low, 0.0) <= self.gap_s
            assert min(high, 0.0) - difference <= self.gap_s

    def waits(self) -> None:
        assert self.simulation is not None
        now_s = self.simulation.now_s
        for tenant in self.roster.tenants.values():
            head = tenant.queue.head(now_s)
            if head is None:
                self.heads.pop(tenant, None)
            elif self.heads.get(tenant, (None,))[0] != head.key:
                self.heads[tenant] = head.key, now_s + self.most_wait_s(head)
            else:
                assert now_s <= self.heads[tenant][1], "a head waits for too long"

    def most_wait_s(self, head: Request) -> float:
        behind_s = sum(
            max(0.0, head.tenant.virtual_s - other.virtual_s) * other.weight for other in self.roster.tenants.values()
        )
        weight = sum(other.weight for other in self.roster.tenants.values())
        return behind_s + weight * self.gap_s + self.step_most_s


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(classes, crowds), min_size=2, max_size=4))
def test_two_that_wait_drift_apart_by_a_bound_and_no_head_waits_longer(
    given_tenants: list[tuple[TenantLimits, list[Arrival]]],
) -> None:
    setting = engine_settings(slots=SLOTS, step_tokens=512)
    policy = Policy(setting, 0.0, CostModel(PRICES))
    least = min(limits.weight for limits, _ in given_tenants)
    advance_s = setting.light_advance_s + setting.urgent_advance_s + setting.max_advance_s
    step_load = StepLoad(requests=SLOTS)
    step_load.add_prefill(setting.step_tokens, PROMPT_MOST)
    step_most_s = PRICES.cost_s(step_load)
    gap_s = (SLOTS * alone_s(setting) + advance_s + step_most_s) / least
    watch = Watch(policy, gap_s, step_most_s)
    tenants = {str(number): SimulatedTenant(limits=limits) for number, (limits, _) in enumerate(given_tenants)}
    simulation = Simulation(policy, setting, PRICES, tenants, slowdown=watch.look)
    watch.simulation = simulation
    report = simulation.run(
        msgspec.structs.replace(arrival, tenant=str(number))
        for number, (_, crowd) in enumerate(given_tenants)
        for arrival in crowd
    )
    assert all(entry.finished == entry.requests for entry in report.tenants.values())
