"""Limits in a real kernel, in namespaces, cgroups and a BPF file system of the test's own, and gone after it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.namespaces import Namespace, join
from support.observed import new_bpffs

from seedance.bpf import loader
from seedance.bpf.abi import TenantPace, TenantTraffic
from seedance.bpf.loader import BpfObject
from seedance.bpf.maps import HashMap, PerCpuHashMap, open_pinned
from seedance.errors import ConfigError, KernelError
from seedance.qos import kernel as kernel_module
from seedance.qos.cgroup_site import Site, choose_site, parse_mounts
from seedance.qos.kernel import KernelLimits
from seedance.qos.machine import NetworkSide
from seedance.qos.quota import CpuQuota, MemoryQuota, NetworkQuota, Quota
from seedance.qos.settings import KernelSettings

NAME = f"seedance-test-{os.getpid()}"
SO_MARK = 36
RATE = 1_000_000
BURST_S = 0.5
SECONDS = 2.0
# A packet passes whole while the burst is not used up.
MOST_BYTES = round(RATE * (SECONDS + BURST_S)) + (64 << 10)


def missing() -> str:
    """Return why these tests cannot run here, or ""."""
    if os.geteuid() != 0:
        return "needs root"
    return loader.supported()


pytestmark = pytest.mark.skipif(bool(missing()), reason=f"limits cannot be put into this kernel: {missing()}")


def top() -> Path:
    site = choose_site(
        parse_mounts(Path("/proc/self/mountinfo").read_text()), "/", "", NAME, lambda path: False, is_root=True
    )
    assert isinstance(site, Site), site
    return site.top


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with contextlib.closing(Namespace()) as made:
        yield made


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[KernelSettings]:
    before = Path("/proc/self/cgroup").read_text()
    with new_bpffs(tmp_path / "bpf") as folder:
        yield KernelSettings(name=NAME, bpffs=str(folder), cgroup=str(top()), observe=False)
        assert not (folder / NAME).exists()
    assert not top().exists()
    assert Path("/proc/self/cgroup").read_text() == before


@contextlib.contextmanager
def limits(namespace: Namespace, settings: KernelSettings) -> Iterator[KernelLimits]:
    with namespace:
        kernel = KernelLimits(settings)
    try:
        yield kernel
    finally:
        kernel.close()


def remove(namespace: Namespace, settings: KernelSettings) -> list[str]:
    with namespace:
        return kernel_module.remove(settings)


def changed(monitor: NetworkSide) -> None:
    """Do what the event loop does when the monitor is readable, and soon after."""
    monitor.devices_changed()
    monitor.update_devices()


def add_devices(namespace: Namespace) -> None:
    """Add a pair of devices, v0 and v1, and set v0 up."""
    namespace.run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1")
    namespace.run("ip", "link", "set", "v0", "up")


def quota(tenant: str, egress: int | None = None, ingress: int | None = None) -> Quota:
    return Quota(tenant=tenant, network=NetworkQuota(egress_bytes_per_s=egress, ingress_bytes_per_s=ingress))


def quotas(*found: Quota) -> dict[str, Quota]:
    return {one.tenant: one for one in found}


def connect(mark: int) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over loopback, the accepted one with a mark."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    accepted.setsockopt(socket.SOL_SOCKET, SO_MARK, mark)
    return client, accepted


def flow(sender: socket.socket, receiver: socket.socket, seconds: float) -> int:
    """Send as fast as it goes for so long; return how many bytes arrived in that time."""
    deadline = time.monotonic() + seconds
    sender.settimeout(seconds)

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                sender.sendall(bytes(16384))

    thread = threading.Thread(target=send)
    thread.start()
    received = 0
    while (left := deadline - time.monotonic()) > 0:
        if select.select([receiver], [], [], left)[0]:
            received += len(receiver.recv(1 << 20))
    receiver.close()
    thread.join()
    sender.close()
    return received


def measured(namespace: Namespace, kernel: KernelLimits, tenant: str, direction: str) -> int:
    """Return how many bytes a tenant's connection carried in SECONDS, as fast as it went."""
    with namespace:
        client, accepted = connect(kernel.mark(tenant))
    sender, receiver = (accepted, client) if direction == "egress" else (client, accepted)
    return flow(sender, receiver, SECONDS)


@pytest.mark.parametrize("direction", ["egress", "ingress"])
def test_a_rate_holds_and_another_tenant_is_not_touched(
    namespace: Namespace, settings: KernelSettings, direction: str
) -> None:
    with limits(namespace, settings) as kernel:
        assert not {"egress", "ingress"} & kernel.off.keys(), kernel.off
        kernel.apply(quotas(quota("slow", **{direction: RATE}), quota("free")))
        received = measured(namespace, kernel, "slow", direction)
        # What arrives is less than what is counted: headers are, and what is sent again.
        assert 0.5 * RATE * SECONDS < received <= MOST_BYTES
        used = kernel.usage()["slow"]
        assert getattr(used, f"{direction}_bytes") >= received
        assert getattr(used, f"{direction}_bytes") <= RATE * (SECONDS + 2 * BURST_S)
        unlimited = measured(namespace, kernel, "free", direction)
        assert unlimited > 10 * RATE * SECONDS
        assert getattr(kernel.usage()["free"], f"{direction}_dropped_packets") == 0


def test_a_changed_rate_holds_at_once(namespace: Namespace, settings: KernelSettings) -> None:
    with limits(namespace, settings) as kernel:
        kernel.apply(quotas(quota("acme", egress=10 * RATE)))
        assert kernel.enforced("acme")["egress_bytes_per_s"] == str(10 * RATE)
        kernel.apply(quotas(quota("acme", egress=RATE)))
        assert kernel.enforced("acme")["egress_bytes_per_s"] == str(RATE)
        assert measured(namespace, kernel, "acme", "egress") <= MOST_BYTES


def test_what_is_owed_at_a_rate_is_not_owed_at_another(namespace: Namespace, settings: KernelSettings) -> None:
    with limits(namespace, settings) as kernel:
        kernel.apply(quotas(quota("acme", egress=100)))
        measured(namespace, kernel, "acme", "egress")
        kernel.apply(quotas(quota("acme", egress=RATE)))
        assert 0.5 * RATE * SECONDS < measured(namespace, kernel, "acme", "egress") <= MOST_BYTES


def test_all_rows_of_a_tenant_are_there_before_its_first_packet(namespace: Namespace, settings: KernelSettings) -> None:
    with limits(namespace, settings) as kernel:
        kernel.apply(quotas(quota("acme", egress=RATE)))
        folder = Path(settings.bpffs) / NAME
        with open_pinned(folder / "tenant_pace") as pace, open_pinned(folder / "tenant_traffic") as traffic:
            assert HashMap(pace, ctypes.c_uint32, TenantPace).get(1) is not None
            counts: PerCpuHashMap[int, TenantTraffic] = PerCpuHashMap(traffic, ctypes.c_uint32, TenantTraffic)
            assert counts.get(1) is not None


def test_a_device_that_has_no_room_for_us(namespace: Namespace, settings: KernelSettings) -> None:
    add_devices(namespace)
    namespace.run("tc", "qdisc", "add", "dev", "v0", "ingress")
    with limits(namespace, settings) as kernel:
        assert "`tc qdisc del dev v0 ingress` makes room" in kernel.off["egress"]
        with pytest.raises(ConfigError, match="cannot be kept here: device 'v0'"):
            kernel.check(quota("acme", egress=RATE), "/t/acme.toml")
        namespace.run("tc", "qdisc", "del", "dev", "v0", "ingress")
        assert kernel.monitor is not None
        changed(kernel.monitor)
        assert "egress" not in kernel.off
        assert f"{NAME}_egress" in namespace.run("tc", "filter", "show", "dev", "v0", "egress")


def test_filters_of_others_come_after_ours(namespace: Namespace, settings: KernelSettings) -> None:
    namespace.run("tc", "qdisc", "add", "dev", "lo", "clsact")
    namespace.run("tc", *shlex.split("filter add dev lo egress u32 match u32 0 0 flowid 1:1"))
    before = namespace.run("tc", "filter", "show", "dev", "lo", "egress")
    with limits(namespace, settings) as kernel:
        assert "lo" not in kernel.notes
        shown = namespace.run("tc", "filter", "show", "dev", "lo", "egress")
        assert shown.splitlines()[0].startswith("filter protocol all pref 1 bpf")
        kernel.apply(quotas(quota("slow", egress=RATE)))
        assert measured(namespace, kernel, "slow", "egress") <= MOST_BYTES
    assert namespace.run("tc", "filter", "show", "dev", "lo", "egress") == before


def test_listening_sockets(namespace: Namespace, settings: KernelSettings) -> None:
    with namespace, socket.create_server(("127.0.0.1", 0)) as outside, limits(namespace, settings) as kernel:
        with socket.create_server(("127.0.0.1", 0)) as inside:
            kernel.check_sockets([inside.fileno()])
            assert "ingress" not in kernel.off
            kernel.check_sockets([inside.fileno(), outside.fileno()])
        assert f"the listening socket 127.0.0.1:{outside.getsockname()[1]} was made outside" in kernel.off["ingress"]


def test_devices_come_and_go(namespace: Namespace, settings: KernelSettings) -> None:
    with limits(namespace, settings) as kernel:
        monitor = kernel.monitor
        assert monitor is not None
        assert [line.partition(":")[0] for line in kernel.attachments()] == [str(top()), "lo", str(top()), str(top())]
        changed(monitor)
        assert not select.select([monitor], [], [], 0)[0]

        add_devices(namespace)
        namespace.run("ip", "link", "set", "v1", "up")
        assert select.select([monitor], [], [], 5)[0]
        changed(monitor)
        shown = namespace.run("tc", "filter", "show", "dev", "v0", "egress")
        assert f"{NAME}_egress direct-action" in shown
        assert "v1: egress" in "\n".join(kernel.attachments())

        # What we changed ourselves makes it readable once more, and then it is quiet.
        changed(monitor)
        assert not select.select([monitor], [], [], 0)[0]

        namespace.run("tc", "qdisc", "del", "dev", "v0", "clsact")
        assert select.select([monitor], [], [], 5)[0]
        changed(monitor)
        assert f"{NAME}_egress" in namespace.run("tc", "filter", "show", "dev", "v0", "egress")

        namespace.run("ip", "link", "del", "v0")
        assert select.select([monitor], [], [], 5)[0]
        changed(monitor)
        assert "v0" not in "\n".join(kernel.attachments())
    assert namespace.run("tc", "qdisc", "show", "dev", "lo") == "qdisc noqueue 0: root refcnt 2 \n"


def test_a_queue_of_an_administrator_stays(namespace: Namespace, settings: KernelSettings) -> None:
    add_devices(namespace)
    namespace.run("tc", *shlex.split("qdisc add dev v0 root tbf rate 1gbit burst 100k latency 1s"))
    before = namespace.run("tc", "qdisc", "show", "dev", "v0")
    with limits(namespace, settings) as kernel:
        assert "its queue 'tbf' was configured by somebody" in kernel.notes["v0"]
        assert before in namespace.run("tc", "qdisc", "show", "dev", "v0")
    assert namespace.run("tc", "qdisc", "show", "dev", "v0") == before


def test_every_hardware_queue_paces(namespace: Namespace, settings: KernelSettings) -> None:
    try:
        namespace.run("ip", "tuntap", "add", "dev", "t0", "mode", "tap", "multi_queue")
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"there is no device with several queues: {exc.stderr.strip()}")
    namespace.run("ip", "link", "set", "t0", "up")
    before = namespace.run("tc", "qdisc", "show", "dev", "t0")
    assert before.startswith("qdisc mq 0: root")
    with limits(namespace, settings) as kernel:
        now = namespace.run("tc", "qdisc", "show", "dev", "t0")
        if "egress" in kernel.notes:
            assert before in now
        else:
            queues = before.count(" parent ")
            assert "qdisc mq 5eed: root" in now
            assert now.count("qdisc fq ") == queues
            assert "t0: egress paced" in "\n".join(kernel.attachments())
    assert namespace.run("tc", "qdisc", "show", "dev", "t0") == before


@pytest.mark.parametrize("device", ["card", "bridge"])
def test_new_connections_are_policed_by_their_source(
    namespace: Namespace, settings: KernelSettings, device: str
) -> None:
    with contextlib.closing(Namespace()) as peer:
        join(namespace, peer)
        if device == "bridge":
            for command in (
                *("address flush dev v0", "link add b0 type bridge", "link set v0 master b0"),
                *("address add 10.77.0.1/24 dev b0", "link set b0 up"),
            ):
                namespace.run("ip", *command.split())
        policed = msgspec.structs.replace(settings, connections_per_s=0.01, connections_burst=3)
        with limits(namespace, policed) as kernel, contextlib.ExitStack() as stack:
            assert "new_connections" not in kernel.off
            with namespace:
                server = stack.enter_context(socket.create_server(("10.77.0.1", 0)))
            address = server.getsockname()
            kernel.set_ports([address[1]])

            def attempt() -> bool:
                with peer:
                    client = stack.enter_context(socket.socket())
                client.settimeout(0.3)
                return client.connect_ex(address) == 0

            assert [attempt() for _ in range(5)] == [True] * 3 + [False] * 2
            assert "new connections policed" in "\n".join(kernel.attachments())


def test_processes_are_placed_and_a_removed_tenants_group_waits_for_them(
    namespace: Namespace, settings: KernelSettings
) -> None:
    with limits(namespace, settings) as kernel, subprocess.Popen(["sleep", "60"]) as worker:
        kernel.apply(quotas(quota("acme", egress=RATE)))
        kernel.place(worker.pid, "tenants/acme")
        assert f"/{NAME}/tenants/acme" in Path(f"/proc/{worker.pid}/cgroup").read_text()
        assert kernel.usage()["acme"].tasks == 1
        kernel.apply({})
        kernel.tenant_gone("acme")
        assert "trying again later" in kernel.notes["acme"]
        assert kernel.enforced("acme")["egress_bytes_per_s"] == str(RATE)
        worker.kill()
        worker.wait()
        kernel.tenant_gone("acme")
        assert kernel.indices == {}
        assert not (top() / "tenants/acme").exists()
        with pytest.raises(KernelError) as caught:
            kernel.place(worker.pid, "engine")
        assert caught.value.errno == errno.ESRCH


@contextlib.contextmanager
def another_daemon(namespace: Namespace, settings: KernelSettings, *found: Quota) -> Iterator[subprocess.Popen[str]]:
    """Run another process that puts limits into the kernel, up to where they are in force; kill it at the end."""
    arguments = [msgspec.json.encode(argument).decode() for argument in (settings, quotas(*found))]
    command = [sys.executable, "-m", "support.kernel_process", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with namespace:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    with started as process:
        try:
            yield process
        finally:
            process.kill()


def ready(process: subprocess.Popen[str]) -> dict[str, int]:
    """Wait until the limits are in force; return the tenants' indices."""
    assert process.stdout is not None
    found: dict[str, int] = msgspec.json.decode(process.stdout.readline())
    return found


def link_number(settings: KernelSettings) -> str:
    """Return the number of the link that holds the ingress program."""
    with contextlib.closing(loader.open_link(Path(settings.bpffs) / NAME / "ingress_link")) as link:
        text = Path(f"/proc/self/fdinfo/{link.fd}").read_text()
    return next(line for line in text.splitlines() if line.startswith("link_id:"))


def test_limits_hold_after_a_kill_and_the_next_run_takes_them_over(
    namespace: Namespace, settings: KernelSettings
) -> None:
    found = (quota("acme"), quota("slow", egress=RATE))
    with another_daemon(namespace, settings, *found) as process:
        assert ready(process) == {"acme": 1, "slow": 2}
        process.kill()
    before = namespace.run("tc", "filter", "show", "dev", "lo", "egress")
    assert f"{NAME}_egress" in before
    link = link_number(settings)
    with namespace:
        client, accepted = connect(0x5EED0002)
    assert flow(accepted, client, SECONDS) <= MOST_BYTES

    with limits(namespace, settings) as kernel:
        assert kernel.indices == {"acme": 1, "slow": 2}
        counted = kernel.usage()["slow"].egress_bytes
        assert counted > RATE
        assert link_number(settings) == link
        after = namespace.run("tc", "filter", "show", "dev", "lo", "egress")
        assert len(after.splitlines()) == len(before.splitlines())
        assert after != before
        kernel.apply(quotas(quota("new"), quota("slow", egress=RATE)))
        assert kernel.indices == {"slow": 2, "new": 3}
        assert kernel.usage()["slow"].egress_bytes == counted
        assert measured(namespace, kernel, "slow", "egress") <= MOST_BYTES


def test_a_running_daemon_is_not_touched(namespace: Namespace, settings: KernelSettings) -> None:
    with another_daemon(namespace, settings, quota("slow", egress=RATE)) as process:
        ready(process)
        with limits(namespace, settings) as second:
            for limit in ("cpu", "egress", "ingress"):
                assert "which another seedanced holds" in second.off[limit]
        with pytest.raises(KernelError) as caught:
            remove(namespace, settings)
        assert caught.value.errno == errno.EBUSY
        other = msgspec.structs.replace(settings, name=f"{NAME}-b", cgroup=f"{top()}-b")
        with limits(namespace, other) as third:
            assert "of another seedanced is there" in third.notes["lo"]
        assert f"{NAME}_egress" in namespace.run("tc", "filter", "show", "dev", "lo", "egress")
        process.kill()
        process.wait()
        assert remove(namespace, settings)


def test_remove_cleans_up_after_a_kill(namespace: Namespace, settings: KernelSettings) -> None:
    add_devices(namespace)
    with another_daemon(namespace, settings, quota("slow", egress=RATE)) as process:
        ready(process)
    removed = "\n".join(remove(namespace, settings))
    for line in (
        f"filter '{NAME}_egress' of lo",
        "of v0",
        "tenant_limits",
        "ingress_link",
        "egress_window_link",
        f"{top()}/tenants/slow",
    ):
        assert line in removed
    assert "clsact" not in namespace.run("tc", "qdisc", "show")
    assert remove(namespace, settings) == []


def test_what_a_killed_run_left_goes_with_limits_off(namespace: Namespace, settings: KernelSettings) -> None:
    with another_daemon(namespace, settings, quota("slow", egress=RATE)) as process:
        ready(process)
        with limits(namespace, msgspec.structs.replace(settings, limits="off")) as kernel:
            assert "which another seedanced holds" in kernel.notes["leftovers"]
        assert f"{NAME}_egress" in namespace.run("tc", "filter", "show", "dev", "lo", "egress")
        process.kill()
        process.wait()
        with limits(namespace, msgspec.structs.replace(settings, limits="off")) as kernel:
            assert kernel.notes == {}
        assert "clsact" not in namespace.run("tc", "qdisc", "show")


def test_what_another_version_left_is_made_anew(namespace: Namespace, settings: KernelSettings) -> None:
    folder = Path(settings.bpffs) / NAME
    folder.mkdir()
    with BpfObject("connections") as other:
        other.map("listen_ports").pin(folder / "tenant_pace")
    with limits(namespace, settings) as kernel:
        assert not {"egress", "ingress"} & kernel.off.keys()
        assert kernel.notes["network"] == "what another version left did not fit, and was made anew"
        kernel.apply(quotas(quota("slow", egress=RATE)))
        assert measured(namespace, kernel, "slow", "egress") <= MOST_BYTES


def test_a_folder_that_a_service_manager_has_mounted_stays(namespace: Namespace, settings: KernelSettings) -> None:
    folder = Path(settings.bpffs) / NAME
    folder.mkdir()
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        with limits(namespace, settings) as kernel:
            assert "egress" not in kernel.off
            assert (folder / "tenant_limits").exists()
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()


def test_a_folder_that_is_no_bpf_file_system(namespace: Namespace, settings: KernelSettings, tmp_path: Path) -> None:
    with limits(namespace, msgspec.structs.replace(settings, bpffs=str(tmp_path))) as kernel:
        assert f"`mount -t bpf bpf {tmp_path}` makes it one" in kernel.off["egress"]


def test_controllers(namespace: Namespace, settings: KernelSettings) -> None:
    limited = Quota(
        tenant="acme",
        cpu=CpuQuota(max_cores=0.5, burst_s=0.01),
        memory=MemoryQuota(max_bytes=1 << 26, high_bytes=1 << 25),
    )
    with limits(namespace, settings) as kernel:
        kernel.apply({"acme": limited})
        enforced = kernel.enforced("acme")
        available = (top().parent / "cgroup.controllers").read_text().split()
        for controller in ("cpu", "cpuset", "memory", "pids"):
            if controller not in available:
                assert "this machine's cgroup v2 has no " + controller in kernel.off[controller]
        assert enforced.get("cpu.max", "50000 100000") == "50000 100000"
        assert enforced.get("memory.max", str(1 << 26)) == str(1 << 26)
        if "cpu" in available:
            with pytest.raises(KernelError, match="it takes at least 1 ms in 100 ms"):
                kernel.apply({"acme": Quota(tenant="acme", cpu=CpuQuota(max_cores=0.001))})
            assert kernel.enforced("acme") == enforced
        if not {"cpu", "memory", "pids"} <= set(available):
            pytest.skip("this machine's cgroup v2 has not all of the controllers cpu, memory and pids")
