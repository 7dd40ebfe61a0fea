"""The kernel's limits as the daemon uses them, on a machine in memory."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from support.fake_cgroup import MOUNT
from support.fake_machine import FakeMachine

from seedance.bpf.abi import TenantTraffic
from seedance.bpf.observe import ObservedUsage
from seedance.errors import ConfigError, KernelError, TenantRefused
from seedance.qos.kernel import KernelLimits
from seedance.qos.plan import Rates
from seedance.qos.quota import CpuQuota, MemoryQuota, NetworkQuota, Quota
from seedance.qos.settings import KernelSettings
from seedance.qos.usage import TenantUsage

TOP = MOUNT / "seedance"
WORKER = 4711


def quota(tenant: str, egress: int | None = None, cores: float | None = None, memory: int | None = None) -> Quota:
    return Quota(
        tenant=tenant,
        cpu=CpuQuota(max_cores=cores),
        memory=MemoryQuota(max_bytes=memory),
        network=NetworkQuota(egress_bytes_per_s=egress),
    )


def quotas(*found: Quota) -> dict[str, Quota]:
    return {one.tenant: one for one in found}


def limits(machine: FakeMachine, **settings: object) -> KernelLimits:
    return KernelLimits(KernelSettings(**settings), machine)  # type: ignore[arg-type]


def refusing(file: str) -> object:
    def refuse(path: Path, text: str) -> None:
        if path.name == file and text != "max":
            raise KernelError(f"write '{text}' to '{path}'", errno.EINVAL)

    return refuse


class TestApply:
    def test_groups_and_rows(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        kernel.apply(quotas(quota("acme", egress=1000, cores=0.5, memory=4096), quota("globex")))
        assert kernel.indices == {"acme": 1, "globex": 2}
        assert kernel.mark("globex") == 0x5EED0002
        assert machine.network_side.rates == {1: Rates("acme", 1000), 2: Rates("globex")}
        enforced = kernel.enforced("acme")
        assert enforced["cpu.max"] == "50000 100000"
        assert enforced["memory.max"] == "4096"
        assert enforced["memory.oom.group"] == "1"
        assert (enforced["egress_bytes_per_s"], enforced["ingress_bytes_per_s"]) == ("1000", "0")
        groups = {kernel_id: index for index, kernel_id in enumerate(machine.observer_side.groups, start=1)}
        assert machine.observer_side.groups == groups

    def test_the_same_again_writes_nothing(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        kernel.apply(quotas(quota("acme", cores=0.5)))
        machine.folders.writes.clear()
        machine.network_side.failing = KernelError("write", errno.EIO)
        kernel.apply(quotas(quota("acme", cores=0.5)))
        assert machine.folders.writes == []

    def test_a_refusal_changes_nothing(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        kernel.apply(quotas(quota("acme", egress=1000, memory=4096)))
        before = kernel.enforced("acme")
        machine.folders.refuse = refusing("memory.max")  # type: ignore[assignment]
        refusal = "cannot write '8192' to '/fake/cgroup/seedance/tenants/acme/memory.max'"
        with pytest.raises(TenantRefused, match=refusal) as caught:
            kernel.apply(quotas(quota("acme", egress=5, cores=1, memory=8192), quota("new")))
        assert caught.value.tenant == "acme"
        assert kernel.enforced("acme") == before
        assert kernel.indices == {"acme": 1}
        assert not machine.folders.exists(TOP / "tenants/new")
        machine.folders.refuse = lambda path, text: None
        kernel.apply(quotas(quota("acme", egress=5, memory=8192), quota("new")))
        assert kernel.enforced("acme")["memory.max"] == "8192"
        assert kernel.indices == {"acme": 1, "new": 2}

    def test_what_could_not_be_taken_back_is_put_right_by_the_next_one(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        before = quotas(quota("acme", cores=0.5, memory=4096))
        kernel.apply(before)

        def refuse(path: Path, text: str) -> None:
            if text in ("8192", "50000 100000"):
                raise KernelError(f"write '{text}'", errno.EINVAL)

        machine.folders.refuse = refuse
        with pytest.raises(KernelError, match="nor take back"):
            kernel.apply(quotas(quota("acme", cores=1, memory=8192)))
        machine.folders.refuse = lambda path, text: None
        assert kernel.enforced("acme")["cpu.max"] == "100000 100000"
        kernel.apply(before)
        assert kernel.enforced("acme")["cpu.max"] == "50000 100000"

    def test_new_connections_are_for_the_network_side(self) -> None:
        machine = FakeMachine()
        limits(machine).set_ports([80, 443])
        assert machine.network_side.ports == {80, 443}


class TestRemovedTenants:
    def test_one_that_cannot_be_removed_troubles_nobody_else(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        kernel.apply(quotas(quota("acme", cores=0.5), quota("globex")))
        machine.folders.stuck.add(TOP / "tenants/acme")
        kernel.apply(quotas(quota("globex", cores=0.5), quota("new")))
        assert kernel.enforced("globex")["cpu.max"] == "50000 100000"
        assert kernel.indices == {"acme": 1, "globex": 2, "new": 3}
        assert kernel.notes["acme"].endswith("trying again later")
        machine.folders.stuck.clear()
        kernel.apply(quotas(quota("globex"), quota("new")))
        assert kernel.indices == {"globex": 2, "new": 3}
        assert kernel.notes == {}
        assert machine.observer_side.forgotten == [1]

    def test_what_was_removed_of_one_that_stays_is_made_again_when_it_comes_back(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        kernel.apply(quotas(quota("acme", cores=0.5)))
        machine.network_side.failing = KernelError("write a row", errno.ENOMEM)
        kernel.apply({})
        assert not machine.folders.exists(TOP / "tenants/acme")
        assert "cannot write a row" in kernel.notes["acme"]
        machine.network_side.failing = None
        kernel.apply(quotas(quota("acme", cores=0.5)))
        assert kernel.enforced("acme")["cpu.max"] == "50000 100000"
        assert kernel.indices == {"acme": 1}
        assert kernel.notes == {}

    def test_groups_in_its_group_go_too(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        kernel.apply(quotas(quota("acme")))
        machine.folders.add(TOP / "tenants/acme/inner/most")
        kernel.apply({})
        assert not machine.folders.exists(TOP / "tenants/acme")
        assert kernel.indices == {}

    def test_one_without_processes_goes_at_once(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        kernel.apply(quotas(quota("acme"), quota("globex")))
        kernel.apply(quotas(quota("globex")))
        assert kernel.indices == {"globex": 2}
        assert not machine.folders.exists(TOP / "tenants/acme")
        assert machine.network_side.rates.keys() == {2}
        assert machine.observer_side.forgotten == [1]

    def test_one_with_a_process_keeps_its_limits_until_that_ends(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        kernel.apply(quotas(quota("acme", egress=1000, cores=0.5)))
        machine.folders.processes[WORKER] = TOP / "supervisor"
        kernel.place(WORKER, "tenants/acme")
        kernel.apply({})
        kernel.apply(quotas(quota("globex")))
        assert kernel.enforced("acme")["cpu.max"] == "50000 100000"
        assert kernel.mark("acme") == 0x5EED0001
        kernel.tenant_gone("acme")
        assert "trying again later" in kernel.notes["acme"]
        machine.folders.end(WORKER)
        kernel.tenant_gone("acme")
        assert kernel.notes == {}
        assert kernel.indices == {"globex": 2}
        assert not machine.folders.exists(TOP / "tenants/acme")

    def test_one_that_comes_back_keeps_its_number(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        kernel.apply(quotas(quota("acme"), quota("globex")))
        machine.folders.processes[WORKER] = TOP / "tenants/acme"
        kernel.apply(quotas(quota("globex")))
        kernel.apply(quotas(quota("acme", egress=7), quota("globex")))
        kernel.tenant_gone("acme")
        assert kernel.indices == {"acme": 1, "globex": 2}
        assert machine.network_side.rates[1] == Rates("acme", 7)

    def test_without_cgroups_a_worker_is_remembered(self) -> None:
        machine = FakeMachine(no_cgroups="no cgroups here")
        kernel = limits(machine)
        kernel.apply(quotas(quota("acme"), quota("globex")))
        kernel.place(WORKER, "tenants/acme")
        kernel.apply({})
        assert kernel.indices.keys() == {"acme"}
        kernel.tenant_gone("acme")
        assert machine.network_side.rates == {}

    def test_a_number_is_not_given_to_the_next_one(self) -> None:
        kernel = limits(FakeMachine())
        kernel.apply(quotas(quota("acme")))
        kernel.apply({})
        kernel.apply(quotas(quota("globex")))
        assert kernel.indices == {"globex": 2}


class TestTakingOver:
    def test_numbers_groups_and_limits_are_kept(self) -> None:
        machine = FakeMachine()
        limits(machine).apply(quotas(quota("acme"), quota("globex", egress=5, cores=0.5)))
        machine.restart()
        machine.folders.writes.clear()
        kernel = limits(machine)
        assert kernel.indices == {"acme": 1, "globex": 2}
        assert kernel.enforced("globex")["cpu.max"] == "50000 100000"
        kernel.apply(quotas(quota("globex", egress=5, cores=0.5), quota("new")))
        assert kernel.indices == {"globex": 2, "new": 3}
        assert not [write for write in machine.folders.writes if write[0].startswith("globex")]
        assert not machine.folders.exists(TOP / "tenants/acme")

    def test_a_stale_tenant_whose_worker_lives_goes_when_it_ends(self) -> None:
        machine = FakeMachine()
        limits(machine).apply(quotas(quota("acme", cores=0.5)))
        machine.folders.processes[WORKER] = TOP / "tenants/acme"
        machine.restart()
        kernel = limits(machine)
        kernel.apply({})
        assert kernel.enforced("acme")["cpu.max"] == "50000 100000"
        machine.folders.end(WORKER)
        kernel.apply({})
        assert kernel.indices == {}


class TestWhatIsOff:
    def test_no_cgroups(self) -> None:
        machine = FakeMachine(no_cgroups="no cgroups here")
        kernel = limits(machine)
        assert kernel.off["cpu"] == kernel.off["memory"] == "no cgroups here"
        assert machine.sockets == "no cgroups here"
        kernel.apply(quotas(quota("acme", egress=5, cores=1)))
        assert kernel.enforced("acme") == {"egress_bytes_per_s": "5", "ingress_bytes_per_s": "0"}

    def test_no_network(self) -> None:
        kernel = limits(FakeMachine(no_network=KernelError("load BPF programs", errno.EPERM)), connections_per_s=5.0)
        reason = "cannot load BPF programs: Operation not permitted (errno 1)"
        keys = ("egress", "ingress", "new_connections", "observe_network", "observe_cpu")
        assert kernel.off == dict.fromkeys(keys, reason)
        assert kernel.monitor is None
        kernel.apply(quotas(quota("acme", egress=5, cores=1)))
        # The maps may be those of another daemon, where this number is another tenant's.
        assert kernel.mark("acme") == 0
        assert kernel.enforced("acme")["cpu.max"] == "100000 100000"
        assert "egress_bytes_per_s" not in kernel.enforced("acme")

    def test_observing_that_nobody_asked_for_is_not_missed(self) -> None:
        kernel = limits(FakeMachine())
        assert kernel.off == {"observe_network": "no sock_ops"}

    def test_observing_that_was_switched_off(self) -> None:
        kernel = limits(FakeMachine(), observe=False, cuda_library="/lib/cuda.so")
        assert kernel.off == {"observe_cuda": "[kernel] observe is false"}

    def test_a_device_without_its_filter(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        served = quota("acme", egress=5)
        kernel.check(served, "/t/acme.toml")
        machine.network_side.off["egress"] = "device 'eth0': no room"
        with pytest.raises(ConfigError, match="cannot be kept here: device 'eth0': no room"):
            kernel.check(served, "/t/acme.toml")
        machine.network_side.off.clear()
        kernel.check(served, "/t/acme.toml")

    def test_marks(self) -> None:
        kernel = limits(FakeMachine())
        kernel.marks_are_off("no CAP_NET_RAW")
        reason = "sockets cannot be marked: no CAP_NET_RAW"
        assert (kernel.off["egress"], kernel.off["ingress"]) == (reason, reason)
        with pytest.raises(ConfigError, match="no CAP_NET_RAW"):
            kernel.check(quota("acme", egress=5), "/t/acme.toml")
        kernel.marks_are_off("")
        assert not {"egress", "ingress"} & kernel.off.keys()

    def test_a_socket_that_was_made_elsewhere(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        machine.folders.add(MOUNT / "system.slice/seedanced.socket")
        machine.made_in = {"[::]:80": TOP / "supervisor", "0.0.0.0:80": TOP}
        kernel.check_sockets([3, 4])
        assert "ingress" not in kernel.off
        machine.made_in["[::]:443"] = MOUNT / "system.slice/seedanced.socket"
        kernel.check_sockets([3, 4, 5])
        assert kernel.off["ingress"] == (
            f"the listening socket [::]:443 was made outside of the group '{TOP}'; a socket unit belongs into the"
            " service's own slice, with IPAccounting=yes"
        )

    def test_everything_switched_off_touches_nothing(self) -> None:
        kernel = limits(FakeMachine(), limits="off")
        kernel.apply(quotas(quota("acme", egress=5)))
        assert kernel.mark("acme") == 0
        assert kernel.notes == {}
        assert kernel.enforced("acme") == {}
        assert kernel.usage() == {"acme": TenantUsage()}
        kernel.place(WORKER, "tenants/acme")
        kernel.tenant_gone("acme")
        kernel.check_sockets([3])
        kernel.close()

    def test_what_a_former_run_left_goes_when_all_is_switched_off(self) -> None:
        machine = FakeMachine()
        machine.leftovers = ["filter 'seedance_egress' of eth0"]
        kernel = limits(machine, limits="off")
        assert machine.leftovers == []
        assert kernel.notes == {}

    def test_it_is_a_note_when_that_cannot_be(self) -> None:
        machine = FakeMachine(no_network=KernelError("use '/b', which another seedanced holds", errno.EBUSY))
        machine.leftovers = ["filter 'seedance_egress' of eth0"]
        kernel = limits(machine, limits="off")
        assert kernel.notes["leftovers"].startswith("limits of a former run are still in force: cannot use '/b'")


class TestCheck:
    OFF = FakeMachine(no_cgroups="no cgroups here")

    def test_a_limit_that_cannot_be_kept_is_refused(self) -> None:
        with pytest.raises(ConfigError) as caught:
            limits(self.OFF).check(quota("acme", cores=1), "/t/acme.toml")
        assert (caught.value.path, caught.value.key) == ("/t/acme.toml", "cpu.max")
        assert str(caught.value) == (
            "cannot use '/t/acme.toml', key 'cpu.max': cannot be kept here: no cgroups here; take the limit out, or"
            " write best_effort = true to do without where it must be"
        )

    def test_one_that_can_is_not(self) -> None:
        limits(self.OFF).check(quota("acme", egress=5), "/t/acme.toml")

    def test_best_effort(self) -> None:
        limits(self.OFF).check(Quota(tenant="acme", best_effort=True, cpu=CpuQuota(max_cores=1)), "/t/acme.toml")
        limits(self.OFF, limits="best_effort").check(quota("acme", cores=1), "/t/acme.toml")
        KernelLimits(KernelSettings(limits="off")).check(quota("acme", cores=1), "/t/acme.toml")


def test_usage() -> None:
    machine = FakeMachine()
    kernel = limits(machine)
    kernel.apply(quotas(quota("acme"), quota("globex")))
    machine.folders.texts[TOP / "tenants/acme"]["cpu.stat"] = "usage_usec 1500000"
    machine.network_side.counts[1] = TenantTraffic(egress_bytes=7, ingress_dropped_packets=2)
    machine.observer_side.seen[1] = ObservedUsage(rtt_us=21, min_rtt_us=9, on_cpu_s=0.5)
    assert kernel.usage() == {
        "acme": TenantUsage(
            cpu_s=1.5, egress_bytes=7, ingress_dropped_packets=2, rtt_us=21, min_rtt_us=9, on_cpu_s=0.5
        ),
        "globex": TenantUsage(),
    }
    assert {tenant: kernel.usage_of(tenant) for tenant in kernel.indices} == kernel.usage()
    machine.folders.texts[TOP / "tenants/acme"]["memory.events"] = "oom 4\noom_kill 3"
    assert (kernel.oom_kills("acme"), kernel.oom_kills("globex"), kernel.oom_kills("nobody")) == (3, 0, 0)


def test_monitor_and_notes() -> None:
    machine = FakeMachine()
    kernel = limits(machine)
    assert kernel.monitor is not None
    assert kernel.monitor.fileno() == 7
    kernel.monitor.devices_changed()
    assert machine.network_side.changes == 1
    assert kernel.notes == {}
    kernel.monitor.update_devices()
    assert kernel.notes == {"eth0": "looked at"}
    machine.network_side.descriptor = -1
    assert kernel.monitor is None


def test_attachments() -> None:
    kernel = limits(FakeMachine())
    assert kernel.attachments() == [f"{TOP}: cgroups of no tenant", "eth0: attached"]
    kernel.apply(quotas(quota("acme"), quota("globex")))
    assert kernel.attachments() == [f"{TOP}: cgroups of acme, globex", "eth0: attached"]


class TestClose:
    def test_nothing_is_left(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        kernel.apply(quotas(quota("acme")))
        kernel.close()
        kernel.close()
        assert machine.folders.texts.keys() == {MOUNT}
        assert machine.network_side.is_removed
        assert machine.observer_side.is_closed

    def test_one_failure_does_not_stop_the_rest(self) -> None:
        machine = FakeMachine()
        kernel = limits(machine)
        machine.network_side.failing = KernelError("remove the pins", errno.EPERM)
        with pytest.raises(KernelError, match="cannot remove the pins: Operation not permitted"):
            kernel.close()
        assert machine.folders.texts.keys() == {MOUNT}
