from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.engine.decoding import Decoding
from seedance.engine.states import Request, Tenant

pytestmark = pytest.mark.unit

BLOCK_TOKENS = 4
WEIGHTS = (1.0, 2.0, 0.5)

EVENTS = st.one_of(
    st.tuples(st.just("join"), st.integers(0, 50)),
    st.tuples(st.sampled_from(["leave", "settle"]), st.integers(0, 50)),
    st.tuples(st.sampled_from(["begin", "begin", "begin", "end", "end", "anew"]), st.integers(0, 9)),
)


class Counted:
    """What a tenant is charged when each of its requests is looked at in each round."""

    def __init__(self) -> None:
        self.tokens = self.blocks = 0
        self.step_s = self.usage = 0.0


class Book:
    """Decoding beside a book that has every request in every round."""

    def __init__(self) -> None:
        self.decoding = Decoding(BLOCK_TOKENS)
        self.tenants = [Tenant(row, self.decoding) for row in range(len(WEIGHTS))]
        for tenant, weight in zip(self.tenants, WEIGHTS, strict=True):
            tenant.inverse_weight = 1 / weight
        self.counted = [Counted() for _ in WEIGHTS]
        self.positions: dict[Request, int] = {}
        self.open: deque[dict[Request, int]] = deque()

    def do(self, event: str, number: int) -> None:
        decoding = self.decoding
        if event == "join":
            request = Request(object(), self.tenants[number % len(WEIGHTS)], number, 1, 0.0)
            self.positions[request] = request.computed = number
            decoding.join(request)
        elif event == "begin":
            self._begin()
        elif event == "end" and self.open:
            self._end(token_s=0.01 * (1 + number), context_s=1e-4 * number, scale=1.0 + number)
        elif event == "settle":
            self.tenants[number % len(WEIGHTS)].settle()
        elif event == "anew":
            decoding.settle_all()
        elif event == "leave" and self.positions:
            request = list(self.positions)[number % len(self.positions)]
            decoding.leave(request)
            assert request.computed == self.positions.pop(request)

    def _begin(self) -> None:
        growing = {request for request, position in self.positions.items() if position % BLOCK_TOKENS == 0}
        assert self.decoding.growth() == len(growing)
        for row, tenant in enumerate(self.tenants):
            grown = sum(request.tenant is tenant for request in growing)
            assert self.decoding.growth_of(tenant) == grown
            self.counted[row].blocks += grown
            self.counted[row].tokens += sum(request.tenant is tenant for request in self.positions)
        self.open.append(dict(self.positions))
        self.decoding.begin_round()
        for request in self.positions:
            self.positions[request] += 1

    def _end(self, token_s: float, context_s: float, scale: float) -> None:
        owed_s = dict.fromkeys(self.tenants, 0.0)
        for request, position in self.open.popleft().items():
            charge_s = token_s + context_s * position
            owed_s[request.tenant] += charge_s
            self.counted[request.tenant.row].step_s += charge_s
            self.counted[request.tenant.row].usage += scale * charge_s
        for tenant, size, context_tokens in self.decoding.end_round(token_s, context_s, scale):
            charge_s = token_s * size + context_s * context_tokens
            owed_s[tenant] -= charge_s
            tenant.step_s += charge_s
            tenant.virtual_s += charge_s * tenant.inverse_weight
            tenant.usage += charge_s * scale
        for tenant, charge_s in owed_s.items():
            assert self.decoding.last_s(tenant) == pytest.approx(charge_s, abs=1e-9)

    def check(self) -> None:
        decoding = self.decoding
        assert decoding.size == len(self.positions)
        assert decoding.context_tokens == sum(self.positions.values())
        assert {request: request.position for request in self.positions} == self.positions
        assert set(decoding.tenants) == {request.tenant for request in self.positions}
        for tenant, counted in zip(self.tenants, self.counted, strict=True):
            own = [position for request, position in self.positions.items() if request.tenant is tenant]
            assert self.decoding.load_of([tenant]) == (len(own), sum(own))
            assert (tenant.output_tokens, tenant.blocks) == (counted.tokens, counted.blocks)
            assert self.decoding.blocks_of(tenant) == sum(-(-position // BLOCK_TOKENS) for position in own)


@given(st.lists(EVENTS, max_size=80))
def test_it_counts_as_if_each_request_were_counted_in_each_round(events: list[tuple[str, int]]) -> None:
    book = Book()
    for event, number in events:
        book.do(event, number)
        book.check()
    while book.open:  # what a tenant owes is exact once all rounds have ended
        book.do("end", 3)
    for tenant, counted in zip(book.tenants, book.counted, strict=True):
        tenant.settle()
        assert tenant.step_s == pytest.approx(counted.step_s, abs=1e-9)
        assert tenant.virtual_s == pytest.approx(counted.step_s * tenant.inverse_weight, abs=1e-9)
        assert tenant.usage == pytest.approx(counted.usage, abs=1e-9)


def test_a_tenant_that_is_not_settled_lags_behind_and_settling_returns_what_it_owes() -> None:
    book = Book()
    book.do("join", 0)
    tenant = book.tenants[0]
    for _ in range(10):
        book.do("begin", 0)
        book.do("end", 4)
    assert (tenant.output_tokens, tenant.step_s) == (10, 0.0)
    assert book.decoding.settle(tenant) == pytest.approx(book.counted[0].step_s)
    assert book.decoding.settle(tenant) == 0.0


def test_only_tenants_with_limits_that_decode_are_watched() -> None:
    book = Book()
    tenant = book.tenants[0]
    tenant.is_metered = True
    book.decoding.watch(tenant)
    assert not book.decoding.limited
    book.do("join", 0)
    assert list(book.decoding.limited) == [tenant]
    tenant.is_metered = False
    book.decoding.watch(tenant)
    assert not book.decoding.limited
    tenant.is_metered = True
    book.decoding.watch(tenant)
    book.do("leave", 0)
    assert not book.decoding.limited


def test_sums_stay_exact_over_a_month_of_rounds() -> None:
    decoding = Decoding(BLOCK_TOKENS)
    tenant = Tenant(0, decoding)
    decoding.rounds = decoding.ended = 10**9
    decoding.settle_all()
    request = Request(1, tenant, 1_000, 1, 0.0)
    request.computed = 1_000
    decoding.join(request)
    decoding.begin_round()
    decoding.end_round(1e-5, 1e-9, 1.0)
    assert decoding.settle(tenant) == pytest.approx(1e-5 + 1e-6, rel=1e-12)
