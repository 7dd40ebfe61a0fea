"""What urgency may do and what not: a client's line is worth a bounded advance, and nobody yields to a lower class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.workloads import PRICES
from support.workloads import settings as engine_settings

from seedance.engine.cost import CostModel
from seedance.engine.decoding import Decoding
from seedance.engine.policy import Policy
from seedance.engine.preemption import victim_for_slot
from seedance.engine.scheduling import TenantLimits
from seedance.engine.states import MAX_PREEMPTIONS, Request, Tenant

pytestmark = pytest.mark.property

seconds = st.floats(0, 1e6)
MOST_S = engine_settings().max_advance_s


@given(rtt_s=seconds, variance_s=seconds, prompt_tokens=st.integers(1, 100), ahead_s=st.floats(1.01 * MOST_S, 1.0))
def test_no_line_is_worth_more_than_the_most_advance(
    rtt_s: float, variance_s: float, prompt_tokens: int, ahead_s: float
) -> None:
    policy = Policy(engine_settings(slots=1), 0.0, CostModel(PRICES))
    policy.submitted("first", 1, 100, 100_000, 0.0)
    policy.submitted("later", 1, prompt_tokens, 1, ahead_s, rtt_s=rtt_s, rtt_variance_s=variance_s)
    assert policy.step_begins(ahead_s, 10_000, 1).admit == ["first"]


@given(
    near=st.tuples(st.floats(0, 0.02), st.floats(0, 0.01)),
    farther_s=st.floats(0, 10),
    more_variance_s=st.floats(0, 10),
)
def test_a_farther_or_more_jittery_client_never_goes_later_for_it(
    near: tuple[float, float], farther_s: float, more_variance_s: float
) -> None:
    policy = Policy(engine_settings(slots=1), 0.0, CostModel(PRICES))
    rtt_s, variance_s = near
    far = policy._advance_s(100, rtt_s + farther_s, variance_s + more_variance_s)
    assert policy._advance_s(100, rtt_s, variance_s) <= far <= MOST_S


tenants = st.builds(TenantLimits, weight=st.sampled_from([100.0, 200.0, 400.0]), priority=st.integers(0, 3))
running = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, MAX_PREEMPTIONS)), max_size=12)


@given(limits=st.lists(tenants, min_size=4, max_size=4), running=running, urgent=st.integers(0, 3))
def test_who_yields_is_of_the_lowest_class_and_of_a_lower_one(
    limits: list[TenantLimits], running: list[tuple[int, int, int]], urgent: int
) -> None:
    decoding = Decoding(16)
    known = [Tenant(row, decoding) for row in range(4)]
    for tenant, limit in zip(known, limits, strict=True):
        tenant.weight, tenant.priority = limit.weight, limit.priority

    def request(key: int, row: int, priority: int, preemptions: int) -> Request:
        made = Request(key, known[row], 10, 10, 0.0)
        made.priority, made.preemptions = max(priority, known[row].priority), preemptions
        return made

    def rank(tenant: Tenant) -> tuple[int, float]:
        return tenant.priority, tenant.weight

    requests = [request(key, *given) for key, given in enumerate(running)]
    asking = request(-1, urgent, 1, 0)
    lower = [
        each
        for each in requests
        if not each.is_protected
        and (
            each.priority < asking.priority if each.tenant is asking.tenant else rank(each.tenant) < rank(asking.tenant)
        )
    ]
    victim = victim_for_slot(requests, asking)
    if victim is None:
        assert not lower
    else:
        assert victim in lower
        assert rank(victim.tenant) == min(rank(each.tenant) for each in lower)
