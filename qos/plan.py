"""What the kernel is to hold for a set of quotas, and the actions that turn what it holds into that.

A `State` is all that quotas put into the kernel: a cgroup with its files for each tenant, and a row of rates for each
tenant's number. `diff` gives the actions between two states, and each action can be taken back. So `apply` can
promise: either the new state, or the old one and the name of the tenant that was refused. What `diff` leaves out is who
is gone: a removed group loses its counters, which nothing brings back, and nobody else's limits depend on it.

Order matters in three places. A group is made before its files are written. `cpu.max.burst` may never exceed the quota
in `cpu.max`, so a burst is put down before the quota changes and up again after. And what cannot really be taken back
comes last: a lower `memory.max` may make the kernel kill at once.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from seedance.errors import KernelError, TenantRefused
from seedance.qos.quota import CPU_PERIOD_S, Quota

# Far above what a worker needs (about ten threads), far below what troubles the machine.
TASKS_PER_TENANT: Final = 4096

_PERIOD_US: Final = round(CPU_PERIOD_S * 1e6)
_NO_QUOTA: Final = f"max {_PERIOD_US}"
_BURST: Final = "cpu.max.burst"

# The files of a tenant's cgroup that quotas decide, in the order in which they are written, with what a new cgroup has.
FILES: Final[Mapping[str, str]] = {
    "pids.max": "max",
    "cpuset.cpus": "",
    "cpu.max": _NO_QUOTA,
    _BURST: "0",
    "memory.oom.group": "0",
    "memory.swap.max": "max",
    "memory.high": "max",
    "memory.max": "max",
}


class Rates(msgspec.Struct, frozen=True):
    """A tenant's row among the network limits, in bytes per second on the wire; 0 is no limit."""

    tenant: str
    egress_bytes_per_s: int = 0
    ingress_bytes_per_s: int = 0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Cgroups by tenant, each with its files' texts, and rates by tenant index."""

    groups: Mapping[str, Mapping[str, str]] = {}
    rates: Mapping[int, Rates] = {}


class Kernel(Protocol):
    """What the actions act on; every method raises KernelError and has then changed nothing."""

    def make_group(self, tenant: str) -> None:
        """Make the tenant's cgroup, without limits; well if it is there already."""

    def remove_group(self, tenant: str) -> None:
        """Remove the tenant's cgroup, which has no process."""

    def write_file(self, tenant: str, file: str, text: str) -> None:
        """Write a file of the tenant's cgroup."""

    def set_rates(self, index: int, rates: Rates) -> None:
        """Set the row of a tenant index."""

    def remove_rates(self, index: int) -> None:
        """Remove the row of a tenant index, and what was counted for it."""


class MakeGroup(msgspec.Struct, frozen=True):
    """Make a tenant's cgroup."""

    tenant: str

    def run(self, kernel: Kernel) -> None:
        """Do it."""
        kernel.make_group(self.tenant)

    def undo(self, kernel: Kernel) -> None:
        """Take it back."""
        kernel.remove_group(self.tenant)


class WriteFile(msgspec.Struct, frozen=True):
    """Write a file of a tenant's cgroup."""

    tenant: str
    file: str
    old: str
    new: str

    def run(self, kernel: Kernel) -> None:
        """Do it."""
        kernel.write_file(self.tenant, self.file, self.new)

    def undo(self, kernel: Kernel) -> None:
        """Take it back."""
        kernel.write_file(self.tenant, self.file, self.old)


class SetRates(msgspec.Struct, frozen=True):
    """Set the row of a tenant index; `old` is None where there was none."""

    index: int
    old: Rates | None
    new: Rates

    @property
    def tenant(self) -> str:
        """Whose row it is."""
        return self.new.tenant

    def run(self, kernel: Kernel) -> None:
        """Do it."""
        kernel.set_rates(self.index, self.new)

    def undo(self, kernel: Kernel) -> None:
        """Take it back."""
        if self.old is None:
            kernel.remove_rates(self.index)
        else:
            kernel.set_rates(self.index, self.old)


Action: TypeAlias = MakeGroup | WriteFile | SetRates


def desired(
    quotas: Mapping[str, Quota], indices: Mapping[str, int], *, files: Collection[str] | None, has_rates: bool
) -> State:
    """Return what the kernel is to hold for these quotas.

    `files` are the cgroup files that this machine has; None when it has no cgroups for us. Every tenant has a row of
    rates, also one without limits: by it, tenants are counted and keep their index.
    """
    groups: dict[str, dict[str, str]] = {}
    if files is not None:
        for tenant, quota in quotas.items():
            groups[tenant] = {file: text for file, text in group_files(quota).items() if file in files}
    rates = {indices[tenant]: tenant_rates(quota) for tenant, quota in quotas.items()} if has_rates else {}
    return State(groups=groups, rates=rates)


def group_files(quota: Quota) -> dict[str, str]:
    """Return the texts of a tenant's cgroup files, as the kernel reads them back (cgroup-v2.rst)."""
    cpu, memory = quota.cpu, quota.memory
    return {
        "pids.max": str(TASKS_PER_TENANT),
        "cpuset.cpus": cpu_list(cpu.cpuset),
        "cpu.max": _NO_QUOTA if cpu.max_cores is None else f"{round(cpu.max_cores * _PERIOD_US)} {_PERIOD_US}",
        _BURST: str(round((cpu.burst_s or 0) * 1e6)) if cpu.max_cores is not None else "0",
        "memory.oom.group": "1",
        # Else a tenant at its limit would swap, and so use the disk of everybody, instead of ending.
        "memory.swap.max": "max" if memory.max_bytes is None else "0",
        "memory.high": _size(memory.high_bytes),
        "memory.max": _size(memory.max_bytes),
    }


def tenant_rates(quota: Quota) -> Rates:
    """Return a tenant's row of rates."""
    network = quota.network
    return Rates(quota.tenant, network.egress_bytes_per_s or 0, network.ingress_bytes_per_s or 0)


def cpu_list(cpus: Sequence[int]) -> str:
    """Return CPU numbers in ascending order as the kernel writes them: "0-3,8"; "" for none."""
    ranges: list[list[int]] = []
    for cpu in cpus:
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _size(size_bytes: int | None) -> str:
    return "max" if size_bytes is None else str(size_bytes)


def allocate(
    indices: Mapping[str, int], tenants: Collection[str], used: Collection[int], last: int, most: int
) -> tuple[dict[str, int], int]:
    """Return an index for every tenant, where one that has an index keeps it, and the index that was given last.

    None of `used` is given; `most` is the highest there is. An index that fell free is given again only after all
    others, so that a socket which still bears a removed tenant's mark is not taken for another tenant's. Raises
    TenantRefused when there is none left.
    """
    found = {tenant: indices[tenant] for tenant in tenants if tenant in indices}
    taken = {*found.values(), *used}
    for tenant in sorted(tenant for tenant in tenants if tenant not in indices):
        candidates = itertools.chain(range(last + 1, most + 1), range(1, last + 1))
        index = next((candidate for candidate in candidates if candidate not in taken), None)
        if index is None:
            raise TenantRefused(tenant, f"number tenant '{tenant}': there are {most} tenants already", errno.ENOSPC)
        found[tenant] = last = index
        taken.add(index)
    return found, last


def diff(old: State, new: State) -> list[Action]:
    """Return the actions that bring `new` in force, in the order in which they must run; what else there is stays."""
    actions: list[Action] = []
    late: list[Action] = []
    for tenant in sorted(new.groups):
        before = old.groups.get(tenant)
        if before is None:
            actions.append(MakeGroup(tenant))
            before = _fresh(new.groups[tenant])
        for action in _writes(tenant, before, new.groups[tenant]):
            (late if action.file.startswith("memory.") else actions).append(action)
    for index in sorted(new.rates):
        if old.rates.get(index) != new.rates[index]:
            actions.append(SetRates(index, old.rates.get(index), new.rates[index]))
    return actions + late


def _fresh(files: Mapping[str, str]) -> dict[str, str]:
    """Return what those files hold in a new cgroup."""
    return {file: FILES[file] for file in files}


def _writes(tenant: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[WriteFile]:
    """Yield the writes between two contents of the same files of one group."""
    burst = old.get(_BURST, "0")
    if burst != "0" and old.get("cpu.max") != new.get("cpu.max"):
        yield WriteFile(tenant, _BURST, burst, "0")
        burst = "0"
    for file in FILES:
        if file not in new:
            continue
        before = burst if file == _BURST else old.get(file, FILES[file])
        if before != new[file]:
            yield WriteFile(tenant, file, before, new[file])


def apply(actions: Sequence[Action], kernel: Kernel) -> None:
    """Run the actions; when one fails, take back those before it, last first, and raise TenantRefused.

    Should taking back fail as well, the rest is taken back all the same, and the error says what could not be.
    """
    for number, action in enumerate(actions):
        try:
            action.run(kernel)
        except KernelError as exc:
            stuck = _undo(actions[:number], kernel)
            more = f" (nor take back what was done before: {'; '.join(stuck)})" if stuck else ""
            raise TenantRefused(action.tenant, exc.what + more, exc.errno) from exc


def _undo(done: Sequence[Action], kernel: Kernel) -> list[str]:
    stuck: list[str] = []
    for action in reversed(done):
        try:
            action.undo(kernel)
        except KernelError as exc:
            stuck.append(str(exc))
    return stuck


def unenforceable(quota: Quota, off: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the limits set in a quota that cannot be kept: the key in the tenant's file, and the reason in `off`."""
    cpu, memory, network = quota.cpu, quota.memory, quota.network
    limits = [
        ("cpu.max", "cpu", cpu.max_cores),
        ("cpu.cpuset", "cpuset", cpu.cpuset or None),
        ("memory.max", "memory", memory.max_bytes),
        ("memory.high", "memory", memory.high_bytes),
        ("network.egress", "egress", network.egress_bytes_per_s),
        ("network.ingress", "ingress", network.ingress_bytes_per_s),
    ]
    return [(key, off[limit]) for key, limit, value in limits if value is not None and limit in off]
