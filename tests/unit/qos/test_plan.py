"""What the kernel is to hold for quotas, and the actions that get it there."""

from __future__ import annotations

import errno

import pytest

from seedance.errors import KernelError, TenantRefused
from seedance.qos import plan
from seedance.qos.plan import FILES, MakeGroup, Rates, SetRates, State, WriteFile
from seedance.qos.quota import CpuQuota, MemoryQuota, NetworkQuota, Quota

FULL = Quota(
    tenant="acme",
    cpu=CpuQuota(max_cores=1.5, burst_s=0.05, cpuset=(0, 1, 2, 8)),
    memory=MemoryQuota(max_bytes=2 << 30, high_bytes=1 << 30),
    network=NetworkQuota(egress_bytes_per_s=6_250_000),
)


class TestDesired:
    def test_files_of_a_full_quota(self) -> None:
        assert plan.group_files(FULL) == {
            "pids.max": "4096",
            "cpuset.cpus": "0-2,8",
            "cpu.max": "150000 100000",
            "cpu.max.burst": "50000",
            "memory.oom.group": "1",
            "memory.swap.max": "0",
            "memory.high": "1073741824",
            "memory.max": "2147483648",
        }

    def test_files_of_a_quota_without_limits(self) -> None:
        texts = plan.group_files(Quota(tenant="acme"))
        assert texts == {**FILES, "pids.max": "4096", "memory.oom.group": "1"}

    def test_only_files_that_there_are(self) -> None:
        state = plan.desired({"acme": FULL}, {"acme": 3}, files={"cpu.max"}, has_rates=True)
        assert state == State(groups={"acme": {"cpu.max": "150000 100000"}}, rates={3: Rates("acme", 6_250_000, 0)})

    def test_a_machine_that_has_nothing(self) -> None:
        assert plan.desired({"acme": FULL}, {"acme": 3}, files=None, has_rates=False) == State()

    @pytest.mark.parametrize(
        ("cpus", "text"),
        [((), ""), ((0,), "0"), ((0, 1), "0-1"), ((0, 2), "0,2"), ((1, 2, 3, 5, 7, 8), "1-3,5,7-8")],
    )
    def test_cpu_list(self, cpus: tuple[int, ...], text: str) -> None:
        assert plan.cpu_list(cpus) == text


class TestAllocate:
    def test_who_has_an_index_keeps_it(self) -> None:
        assert plan.allocate({"b": 7, "gone": 2}, ["a", "b", "c"], (), 7, 99) == ({"b": 7, "a": 8, "c": 9}, 9)

    def test_a_free_index_is_given_again_after_all_others(self) -> None:
        assert plan.allocate({"a": 1}, ["a", "b"], (), 3, 4) == ({"a": 1, "b": 4}, 4)
        assert plan.allocate({"a": 1}, ["a", "b"], (3,), 4, 4) == ({"a": 1, "b": 2}, 2)

    def test_used_up(self) -> None:
        with pytest.raises(TenantRefused, match="cannot number tenant 'b': there are 2 tenants already") as caught:
            plan.allocate({"a": 1}, ["a", "b"], (2,), 1, 2)
        assert caught.value.tenant == "b"


class TestDiff:
    def test_nothing_to_do(self) -> None:
        state = plan.desired({"acme": FULL}, {"acme": 1}, files=FILES, has_rates=True)
        assert plan.diff(state, state) == []

    def test_a_new_tenant(self) -> None:
        new = State(
            groups={"a": {"pids.max": "5", "memory.max": "9", "cpu.max": "max 100000"}}, rates={1: Rates("a", 5)}
        )
        assert plan.diff(State(), new) == [
            MakeGroup("a"),
            WriteFile("a", "pids.max", "max", "5"),
            SetRates(1, None, Rates("a", 5)),
            WriteFile("a", "memory.max", "max", "9"),
        ]

    def test_a_removed_tenant_is_for_later(self) -> None:
        old = State(groups={"a": {"pids.max": "5"}}, rates={1: Rates("a", 5)})
        assert plan.diff(old, State()) == []

    def test_a_burst_goes_down_before_the_quota_changes_and_up_after(self) -> None:
        old = State(groups={"a": {"cpu.max": "100000 100000", "cpu.max.burst": "90000"}})
        new = State(groups={"a": {"cpu.max": "20000 100000", "cpu.max.burst": "10000"}})
        assert plan.diff(old, new) == [
            WriteFile("a", "cpu.max.burst", "90000", "0"),
            WriteFile("a", "cpu.max", "100000 100000", "20000 100000"),
            WriteFile("a", "cpu.max.burst", "0", "10000"),
        ]

    def test_what_cannot_be_taken_back_comes_last(self) -> None:
        texts = {"memory.max": "max", "pids.max": "5"}
        old = State(groups={"a": texts, "b": texts}, rates={1: Rates("a", 5)})
        new = State(
            groups={"a": {"memory.max": "1", "pids.max": "6"}, "b": {"memory.max": "2", "pids.max": "6"}},
            rates={1: Rates("a", 6)},
        )
        kinds = [getattr(action, "file", type(action).__name__) for action in plan.diff(old, new)]
        assert kinds == ["pids.max", "pids.max", "SetRates", "memory.max", "memory.max"]


class Refusing:
    """A kernel that refuses some calls, and keeps a list of the others."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.done: list[str] = []

    def _do(self, call: str) -> None:
        if call in self.refused:
            raise KernelError(call, errno.EINVAL)
        self.done.append(call)

    def make_group(self, tenant: str) -> None:
        self._do(f"make {tenant}")

    def remove_group(self, tenant: str) -> None:
        self._do(f"remove {tenant}")

    def write_file(self, tenant: str, file: str, text: str) -> None:
        self._do(f"{file}={text}")

    def set_rates(self, index: int, rates: Rates) -> None:
        self._do(f"{index}={rates.egress_bytes_per_s}")

    def remove_rates(self, index: int) -> None:
        self._do(f"{index}=none")


class TestApply:
    ACTIONS = plan.diff(State(), State(groups={"a": {"pids.max": "5"}}, rates={1: Rates("a", 7)}))

    def test_in_order(self) -> None:
        kernel = Refusing()
        plan.apply(self.ACTIONS, kernel)
        assert kernel.done == ["make a", "pids.max=5", "1=7"]

    def test_a_failure_takes_back_what_was_done_and_names_the_tenant(self) -> None:
        kernel = Refusing("2=8")
        other = SetRates(2, Rates("b", 4), Rates("b", 8))
        with pytest.raises(TenantRefused, match="cannot 2=8: Invalid argument") as caught:
            plan.apply([*self.ACTIONS, SetRates(3, Rates("c", 1), Rates("c", 2)), other], kernel)
        assert caught.value.tenant == "b"
        assert kernel.done == [
            *("make a", "pids.max=5", "1=7", "3=2"),
            *("3=1", "1=none", "pids.max=max", "remove a"),
        ]

    def test_taking_back_goes_on_when_it_fails_too(self) -> None:
        kernel = Refusing("1=7", "pids.max=max")
        with pytest.raises(KernelError, match="nor take back what was done before: cannot pids.max=max: Invalid"):
            plan.apply(self.ACTIONS, kernel)
        assert kernel.done[-1] == "remove a"


class TestUnenforceable:
    def test_only_limits_that_are_set_and_off(self) -> None:
        off = {"cpu": "c", "cpuset": "s", "memory": "m", "ingress": "i"}
        assert plan.unenforceable(FULL, off) == [
            ("cpu.max", "c"),
            ("cpu.cpuset", "s"),
            ("memory.max", "m"),
            ("memory.high", "m"),
        ]
        assert plan.unenforceable(FULL, {"egress": "e"}) == [("network.egress", "e")]
        assert plan.unenforceable(Quota(tenant="a"), off) == []
