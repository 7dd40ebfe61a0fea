"""Applying the difference of two states puts the second one in force; a failure anywhere leaves the first."""

from __future__ import annotations

import copy
import errno

import hypothesis.strategies as st
import pytest
from hypothesis import given

from seedance.errors import KernelError, TenantRefused
from seedance.qos import plan
from seedance.qos.plan import FILES, Rates, State
from seedance.qos.quota import CpuQuota, MemoryQuota, NetworkQuota, Quota

TENANTS = ("a", "b", "c", "d")


class ModelKernel:
    """Groups and rows in memory, with the kernel's rule for bursts; the `fail_at`-th call fails."""

    def __init__(self, state: State, fail_at: int = -1) -> None:
        self.groups = {tenant: dict(files) for tenant, files in state.groups.items()}
        self.rates = dict(state.rates)
        self.files = frozenset(file for files in state.groups.values() for file in files)
        self.fail_at = fail_at
        self.calls = 0

    def state(self) -> State:
        return State(groups=copy.deepcopy(self.groups), rates=dict(self.rates))

    def _called(self) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise KernelError("do it", errno.EIO)

    def make_group(self, tenant: str) -> None:
        self._called()
        self.groups.setdefault(tenant, {file: FILES[file] for file in self.files})

    def remove_group(self, tenant: str) -> None:
        self._called()
        del self.groups[tenant]

    def write_file(self, tenant: str, file: str, text: str) -> None:
        self._called()
        files = {**self.groups[tenant], file: text}
        quota = files.get("cpu.max", "max").partition(" ")[0]
        if quota != "max" and int(files.get("cpu.max.burst", "0")) > int(quota):
            raise KernelError("have a burst above the quota", errno.EINVAL)
        self.groups[tenant] = files

    def set_rates(self, index: int, rates: Rates) -> None:
        self._called()
        self.rates[index] = rates

    def remove_rates(self, index: int) -> None:
        self._called()
        del self.rates[index]


def optional(most: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(1, most)


@st.composite
def quotas(draw: st.DrawFn) -> dict[str, Quota]:
    found = {}
    for tenant in draw(st.sets(st.sampled_from(TENANTS))):
        percent = draw(optional(300))
        cpu = CpuQuota(
            max_cores=None if percent is None else percent / 100,
            burst_s=None if percent is None else draw(st.sampled_from([None, 0.0, percent / 2000, percent / 1000])),
            cpuset=draw(st.sampled_from([(), (0,), (0, 1)])),
        )
        memory = MemoryQuota(max_bytes=draw(optional(1 << 40)), high_bytes=draw(optional(1 << 40)))
        network = NetworkQuota(egress_bytes_per_s=draw(optional(10**9)), ingress_bytes_per_s=draw(optional(10**9)))
        found[tenant] = Quota(tenant=tenant, cpu=cpu, memory=memory, network=network)
    return found


@st.composite
def machines(draw: st.DrawFn) -> tuple[State, State, frozenset[str]]:
    files = frozenset(draw(st.sets(st.sampled_from(sorted(FILES)))))
    has_groups, has_rates = draw(st.booleans()), draw(st.booleans())
    indices = {tenant: number for number, tenant in enumerate(TENANTS, start=1)}

    def state() -> State:
        return plan.desired(draw(quotas()), indices, files=files if has_groups else None, has_rates=has_rates)

    return state(), state(), files


def kernel_of(state: State, files: frozenset[str], fail_at: int = -1) -> ModelKernel:
    kernel = ModelKernel(state, fail_at)
    kernel.files = files
    return kernel


@given(machines())
def test_the_difference_of_two_states_puts_the_second_in_force(machine: tuple[State, State, frozenset[str]]) -> None:
    old, new, files = machine
    kernel = kernel_of(old, files)
    plan.apply(plan.diff(old, new), kernel)
    # Who is gone is removed after that, by itself.
    assert kernel.state() == State(groups={**old.groups, **new.groups}, rates={**old.rates, **new.rates})


@given(machines(), st.data())
def test_a_failure_anywhere_leaves_what_was(machine: tuple[State, State, frozenset[str]], data: st.DataObject) -> None:
    old, new, files = machine
    actions = plan.diff(old, new)
    if not actions:
        return
    kernel = kernel_of(old, files, fail_at=data.draw(st.integers(1, len(actions))))
    failing = actions[kernel.fail_at - 1]
    with pytest.raises(TenantRefused, match="cannot do it") as caught:
        plan.apply(actions, kernel)
    assert caught.value.tenant == failing.tenant
    assert kernel.state() == old


@given(
    st.sets(st.sampled_from(TENANTS)), st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 9)), st.integers(0, 9)
)
def test_every_tenant_has_an_index_of_its_own(tenants: set[str], before: dict[str, int], last: int) -> None:
    indices = {tenant: index for index, tenant in {index: tenant for tenant, index in before.items()}.items()}
    found, _ = plan.allocate(indices, tenants, indices.values(), last, 20)
    assert found.keys() == tenants
    assert len(set(found.values())) == len(found)
    assert all(found[tenant] == indices[tenant] for tenant in tenants & indices.keys())
    assert all(1 <= index <= 20 for index in found.values())
