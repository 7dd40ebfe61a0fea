"""The quotas' limits in the kernel: what the daemon uses of all that is in this folder.

Whatever a machine lacks goes into `off`, by limit: the rest works. What a former run of the daemon left, because it was
killed, is taken over: groups with their processes, attached programs, pinned maps with every tenant's index and counts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import msgspec

from seedance.bpf.abi import MARK_BASE, TENANT_INDEX_MAX
from seedance.bpf.observe import ObservedUsage
from seedance.errors import ConfigError, KernelError
from seedance.qos import plan
from seedance.qos.cgroup import LIMITS, CgroupTree
from seedance.qos.machine import Machine, NetworkSide, ObserverSide
from seedance.qos.plan import Rates, State
from seedance.qos.quota import Quota
from seedance.qos.settings import KernelSettings
from seedance.qos.teardown import run_all
from seedance.qos.usage import TenantUsage

_NETWORK: Final = ("egress", "ingress")
_OBSERVED: Final = (
    "rtt_us",
    "min_rtt_us",
    "ack_interval_us",
    "retransmits",
    "on_cpu_s",
    "run_queue_s",
    "cuda_launches",
    "cuda_bytes",
)
_TRAFFIC: Final = (
    "egress_bytes",
    "egress_packets",
    "egress_delayed_packets",
    "egress_dropped_packets",
    "ingress_bytes",
    "ingress_packets",
    "ingress_dropped_packets",
)
_traffic_counts: Final = operator.attrgetter(*_TRAFFIC)
_observed_counts: Final = operator.attrgetter(*_OBSERVED)


class KernelLimits:
    """Limits of all tenants, in force until `close`, also when this process is killed.

    Make it before the sockets that the daemon listens on: a socket belongs to the group in which it was made.
    `indices` has every tenant's number, which outlives the daemon.
    """

    def __init__(self, settings: KernelSettings, machine: Machine | None = None) -> None:
        """Take over or attach what can be; what cannot goes into `off`."""
        self.settings = settings
        self.indices: dict[str, int] = {}
        self._off: dict[str, str] = {}
        self._unmarked: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._machine = machine or Machine()
        self._state = State()
        self._quotas: Mapping[str, Quota] = {}
        self._placed: set[str] = set()
        self._last_index = 0
        self._tree: CgroupTree | None = None
        self._network: NetworkSide | None = None
        self._observer: ObserverSide | None = None
        if settings.limits == "off":
            self._off = dict.fromkeys((*LIMITS, *_NETWORK), '[kernel] limits is "off"')
            self._remove_leftovers()
            return
        self._open_network(self._take_tree())
        self._state = self._read_state()
        self.indices = {rates.tenant: index for index, rates in self._state.rates.items()}
        self._last_index = max(self._state.rates, default=0)

    def _remove_leftovers(self) -> None:
        """Let go of what a former run, with limits, left in force."""
        try:
            if self._machine.has_leftovers(self.settings):
                self._machine.remove_leftovers(self.settings)
        except KernelError as exc:
            self._notes["leftovers"] = f"limits of a former run are still in force: {exc}"

    def _take_tree(self) -> Path | str:
        """Take our cgroups; returns the group of our sockets, or why there is none."""
        try:
            tree: CgroupTree | str = self._machine.tree(self.settings)
        except KernelError as exc:
            tree = str(exc)
        if isinstance(tree, str):
            self._off.update(dict.fromkeys(LIMITS, tree))
            return tree
        self._tree = tree
        self._off.update(tree.off)
        return tree.site.sockets

    def _open_network(self, sockets: Path | str) -> None:
        settings = self.settings
        wanted = [*_NETWORK]
        wanted += ["new_connections"] if settings.connections_per_s is not None else []
        observed = ["observe_network", "observe_cpu"] if settings.observe else []
        observed += ["observe_cuda"] if settings.cuda_library else []
        try:
            self._network = self._machine.network(settings, sockets)
        except KernelError as exc:
            self._off.update(dict.fromkeys((*wanted, *observed), str(exc)))
            return
        if not settings.observe:
            self._off.update(dict.fromkeys(observed, "[kernel] observe is false"))
            return
        group = sockets if isinstance(sockets, Path) else None
        self._observer = self._machine.observer(settings, group, self._network.pins)
        self._off.update({limit: reason for limit, reason in self._observer.off.items() if limit in observed})

    @property
    def off(self) -> dict[str, str]:
        """What cannot be done now, by limit, and why.

        Limits are "cpu", "cpuset", "memory", "pids", "egress", "ingress", "new_connections" and "observe_…".
        """
        return self._off | (self._network.off if self._network is not None else {}) | self._unmarked

    @property
    def notes(self) -> dict[str, str]:
        """What works in another way than it should, by limit, device or tenant."""
        return self._notes | (self._network.notes if self._network is not None else {})

    @property
    def monitor(self) -> NetworkSide | None:
        """What the event loop waits for: whenever it is readable, its `devices_changed` is to be called."""
        return self._network if self._network is not None and self._network.fileno() >= 0 else None

    def set_ports(self, ports: Collection[int]) -> None:
        """Say on which TCP ports we listen, where new connections are limited. Raises KernelError."""
        if self._network is not None:
            self._network.set_ports(ports)

    def check_sockets(self, descriptors: Collection[int]) -> None:
        """Take note when a listening socket was made out of reach of ingress limits, as others may have done for us."""
        if self._tree is None or self._network is None:
            return
        try:
            groups = self._machine.socket_groups(descriptors)
        except KernelError as exc:
            self._notes["sockets"] = str(exc)
            return
        ours = self._tree.socket_group_ids() if groups else frozenset()
        outside = [name for name, group in groups.items() if group not in ours]
        if outside:
            self._off["ingress"] = (
                f"the listening socket {', '.join(outside)} was made outside of the group '{self._tree.site.sockets}';"
                " a socket unit belongs into the service's own slice, with IPAccounting=yes"
            )

    def marks_are_off(self, reason: str) -> None:
        """Take note of why sockets cannot be marked, "" when they can: without marks, no network limit holds."""
        self._unmarked = dict.fromkeys(_NETWORK, f"sockets cannot be marked: {reason}") if reason else {}

    def check(self, quota: Quota, path: str) -> None:
        """Raise ConfigError when this machine cannot keep a limit of the quota, and the quota insists on it."""
        if self.settings.limits != "required" or quota.best_effort:
            return
        for key, reason in plan.unenforceable(quota, self.off):
            advice = "take the limit out, or write best_effort = true to do without where it must be"
            raise ConfigError(path, key, f"cannot be kept here: {reason}; {advice}")

    def index(self, tenant: str) -> int:
        """Return the number of a tenant that `apply` has seen."""
        return self.indices[tenant]

    def mark(self, tenant: str) -> int:
        """Return the mark (SO_MARK) by which the kernel knows the tenant's sockets, 0 for none.

        Where the network side is not ours, the numbers are not those that the kernel knows tenants by.
        """
        return MARK_BASE | self.indices[tenant] if self._network is not None else 0

    def apply(self, quotas: Mapping[str, Quota]) -> None:
        """Put all quotas in force. Raises TenantRefused when one's limits are not taken; nothing has changed then.

        A tenant that is in none of them any more keeps its limits while it still has processes.
        """
        leaving = self._known() - quotas.keys()
        indices, last = plan.allocate(
            self.indices,
            quotas.keys() | (leaving & self.indices.keys()),
            self._state.rates,
            self._last_index,
            TENANT_INDEX_MAX,
        )
        files = self._tree.files if self._tree is not None else None
        new = plan.desired(quotas, indices, files=files, has_rates=self._network is not None)
        try:
            plan.apply(plan.diff(self._state, new), _Hands(self._tree, self._network))
        except KernelError:
            self._state = self._read_state()
            raise
        self._state = _with(new, self._state, leaving)
        self.indices, self._last_index, self._quotas = indices, last, dict(quotas)
        for tenant in quotas.keys() & self._notes.keys():
            del self._notes[tenant]
        self._remove([tenant for tenant in leaving if not self._has_processes(tenant)])

    def tenant_gone(self, tenant: str) -> None:
        """Take note that a tenant has no process any more: if it has no quota either, it is removed.

        Where the kernel still knows of a process, the next `apply` tries again.
        """
        self._placed.discard(tenant)
        if tenant not in self._quotas and tenant in self._known():
            self._remove([tenant])

    def _remove(self, tenants: Collection[str]) -> None:
        """Remove what the kernel holds of tenants; one that stays is noted, and troubles nobody else."""
        groups, rates = dict(self._state.groups), dict(self._state.rates)
        hands = _Hands(self._tree, self._network)
        for tenant in tenants:
            try:
                if tenant in groups:
                    hands.remove_group(tenant)
                    del groups[tenant]
                for index in [index for index, row in rates.items() if row.tenant == tenant]:
                    hands.remove_rates(index)
                    del rates[index]
            except KernelError as exc:
                self._notes[tenant] = f"{exc}, trying again later"
            else:
                self._notes.pop(tenant, None)
                self.indices.pop(tenant, None)
        gone = self._state.rates.keys() - rates.keys()
        self._state = State(groups=groups, rates=rates)
        self._tell_observer(gone)

    def _tell_observer(self, gone: Collection[int]) -> None:
        """Tell whose groups are whose. Observing limits nothing, so its failure is a note."""
        if self._observer is None:
            return
        tenants = {rates.tenant: index for index, rates in self._state.rates.items()}
        try:
            for index in gone:
                self._observer.forget(index)
            if self._tree is not None:
                groups = {self._tree.group_id(tenant): index for tenant, index in tenants.items()}
                self._observer.tenants_changed(groups)
        except KernelError as exc:
            self._notes["observe"] = str(exc)

    def _known(self) -> set[str]:
        return self._state.groups.keys() | {rates.tenant for rates in self._state.rates.values()}

    def _has_processes(self, tenant: str) -> bool:
        return tenant in self._placed if self._tree is None else self._tree.is_populated(tenant)

    def _read_state(self) -> State:
        """Read what the kernel holds of our tenants."""
        tree, network = self._tree, self._network
        groups = {tenant: tree.read_group(tenant) for tenant in tree.tenants()} if tree is not None else {}
        return State(groups=groups, rates=network.read_rates() if network is not None else {})

    def place(self, pid: int, group: str) -> None:
        """Put a process into "supervisor", "gateway", "engine" or "tenants/NAME". Raises KernelError.

        Where there are no cgroups, that a tenant has a process is all that is taken note of.
        """
        part, _, tenant = group.partition("/")
        if self._tree is not None:
            self._tree.place(pid, group)
        if part == "tenants":
            self._placed.add(tenant)

    def usage(self) -> dict[str, TenantUsage]:
        """Return what each tenant uses. Raises KernelError."""
        seen = self._observer.usage() if self._observer is not None else {}
        return {tenant: self._usage(tenant, index, seen.get(index)) for tenant, index in self.indices.items()}

    def usage_of(self, tenant: str) -> TenantUsage:
        """Return what one tenant uses, without looking at the others. Raises KernelError."""
        index = self.indices[tenant]
        return self._usage(tenant, index, self._observer.usage_of(index) if self._observer is not None else None)

    def oom_kills(self, tenant: str) -> int:
        """Return how many processes of a tenant have been killed for want of memory."""
        return self._tree.oom_kills(tenant) if self._tree is not None else 0

    def _usage(self, tenant: str, index: int, seen: ObservedUsage | None) -> TenantUsage:
        used = self._tree.usage(tenant) if self._tree is not None else TenantUsage()
        more: dict[str, float] = {}
        if self._network is not None:
            traffic = self._network.traffic(index)
            more.update(zip(_TRAFFIC, _traffic_counts(traffic), strict=True))
        if seen is not None:
            more.update(zip(_OBSERVED, _observed_counts(seen), strict=True))
        return msgspec.structs.replace(used, **more)

    def enforced(self, tenant: str) -> dict[str, str]:
        """Return what the kernel has for a tenant now, read back from it, in its own words. Raises KernelError."""
        found = self._tree.read_group(tenant) if self._tree is not None else {}
        index = self.indices.get(tenant)
        rates = self._network.read_rate(index) if self._network is not None and index is not None else None
        if rates is not None:
            found["egress_bytes_per_s"] = str(rates.egress_bytes_per_s)
            found["ingress_bytes_per_s"] = str(rates.ingress_bytes_per_s)
        return found

    def attachments(self) -> list[str]:
        """Return a line for each device and group to which something of ours is attached."""
        tree, network = self._tree, self._network
        groups = [f"{tree.site.top}: cgroups of {', '.join(tree.tenants()) or 'no tenant'}"] if tree is not None else []
        return groups + (network.attachments() if network is not None else [])

    def close(self) -> None:
        """Remove everything from the kernel, when all other processes have ended; closing twice does nothing.

        What can be is removed in any case; raises KernelError that says what could not be.
        """
        observer, network, tree = self._observer, self._network, self._tree
        self._observer = self._network = self._tree = None
        steps: list[Callable[[], object]] = []
        if observer is not None:
            steps.append(observer.close)
        if network is not None:
            steps.append(network.remove)
        if tree is not None:
            steps.append(tree.remove)
        run_all(steps)


class _Hands:
    """Does what `plan`'s actions ask; see `plan.Kernel`."""

    def __init__(self, tree: CgroupTree | None, network: NetworkSide | None) -> None:
        self._tree = tree
        self._network = network

    def make_group(self, tenant: str) -> None:
        assert self._tree is not None
        self._tree.make_group(tenant)

    def remove_group(self, tenant: str) -> None:
        assert self._tree is not None
        self._tree.remove_group(tenant)

    def write_file(self, tenant: str, file: str, text: str) -> None:
        assert self._tree is not None
        self._tree.write_file(tenant, file, text)

    def set_rates(self, index: int, rates: Rates) -> None:
        assert self._network is not None
        self._network.set_rates(index, rates)

    def remove_rates(self, index: int) -> None:
        assert self._network is not None
        self._network.remove_rates(index)


def _with(state: State, other: State, tenants: Collection[str]) -> State:
    """Return `state` with what `other` has for some tenants."""
    groups = {tenant: files for tenant, files in other.groups.items() if tenant in tenants}
    rates = {index: rates for index, rates in other.rates.items() if rates.tenant in tenants}
    return State(groups={**state.groups, **groups}, rates={**state.rates, **rates})


def remove(settings: KernelSettings) -> list[str]:
    """Remove what a daemon left that runs no more; returns what was removed, as lines for people.

    Raises KernelError, EBUSY when the daemon runs or one of its processes does.
    """
    return Machine().remove_leftovers(settings)
