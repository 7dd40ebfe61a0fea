"""maps.py and loader.py with the kernel: values, keys, pins, links, and what is said when something does not fit."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import observed
from support.limits import LoadedLimits, mark_of
from support.packets import ACK, SkBuff, ipv4, tcp

from seedance.bpf import libbpf
from seedance.bpf.abi import SourcePace, SourcePrefix, TenantLimit, TenantPace, TenantTraffic
from seedance.bpf.loader import BpfObject, open_link
from seedance.bpf.maps import HashMap, PerCpuHashMap, open_pinned
from seedance.errors import BpfLoadError, KernelError

observed.require_bpf()


@pytest.fixture
def limits() -> Iterator[LoadedLimits]:
    with LoadedLimits("egress") as loaded:
        yield loaded


@pytest.fixture
def bpffs(tmp_path: Path) -> Iterator[Path]:
    with observed.new_bpffs(tmp_path / "bpf") as mount:
        folder = mount / "seedance"
        folder.mkdir()
        yield folder


@contextlib.contextmanager
def group_descriptor(group: Path) -> Iterator[int]:
    descriptor = os.open(group, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def rows(table: HashMap[int, TenantLimit]) -> dict[int, tuple[bytes, int, int]]:
    return {index: (row.name, row.egress_bytes_per_s, row.ingress_bytes_per_s) for index, row in table.items()}


def test_values_are_written_read_replaced_and_deleted(limits: LoadedLimits) -> None:
    table = limits.limits
    assert table.get(1) is None
    table.set(1, TenantLimit(b"acme", 10, 20))
    table.set(2, TenantLimit(b"other", 30, 40))
    table.set(1, TenantLimit(b"acme", 11, 20))
    assert rows(table) == {1: (b"acme", 11, 20), 2: (b"other", 30, 40)}
    assert table.delete(1)
    assert not table.delete(1)
    assert rows(table) == {2: (b"other", 30, 40)}
    table.clear()
    assert rows(table) == {}


def test_a_walk_yields_each_key_once_though_keys_go_meanwhile(limits: LoadedLimits) -> None:
    for index in range(1, 300):
        limits.pace.set(index, TenantPace(index, 0))
    seen = []
    for index in limits.pace.keys():  # noqa: SIM118  (not a dict)
        seen.append(index)
        limits.pace.delete(index)
    assert sorted(seen) == list(range(1, 300))


def test_keys_may_be_structs() -> None:
    with BpfObject("connections") as loaded:
        sources = HashMap(loaded.map("source_connections"), SourcePrefix, SourcePace)
        key = SourcePrefix((ctypes.c_uint8 * 16)(*range(16)))
        sources.set(key, SourcePace(5))
        ((there, value),) = sources.items()
        assert (bytes(there), value.arrival_ns) == (bytes(range(16)), 5)
        assert sources.delete(there)


def test_values_of_processors_are_summed_or_told_apart(limits: LoadedLimits) -> None:
    table: PerCpuHashMap[int, TenantTraffic] = PerCpuHashMap(
        limits.object.map("tenant_traffic"), ctypes.c_uint32, TenantTraffic
    )
    assert table.get(1) is None
    assert table.get_each(1) is None
    limits.set_limit(1)
    for _ in range(4):
        limits.program("egress_pace").test_run(ipv4(tcp(ACK)), bytes(SkBuff(mark=mark_of(1))))
    each, total = table.get_each(1), table.get(1)
    assert each is not None
    assert total is not None
    assert len(each) == libbpf.possible_cpus()
    assert sum(value.egress_packets for value in each) == total.egress_packets == 4
    table.set(1, TenantTraffic(egress_bytes=3))
    written = table.get(1)
    assert written is not None
    assert (written.egress_bytes, written.egress_packets) == (3, 0)


def test_types_of_another_size_are_refused(limits: LoadedLimits) -> None:
    with pytest.raises(KernelError, match="cannot use map 'tenant_limits': its values have 80 bytes"):
        HashMap(limits.object.map("tenant_limits"), ctypes.c_uint32, TenantPace)
    with pytest.raises(KernelError, match="cannot use map 'tenant_limits': its keys have 4 bytes"):
        HashMap(limits.object.map("tenant_limits"), ctypes.c_uint16, TenantLimit)


def test_pinned_maps_outlive_the_object_and_are_shared(bpffs: Path) -> None:
    with BpfObject("egress", pins=bpffs) as first:
        HashMap(first.map("tenant_limits"), ctypes.c_uint32, TenantLimit).set(9, TenantLimit(b"acme", 1, 2))
    with open_pinned(bpffs / "tenant_limits") as pinned, BpfObject("ingress", pins=bpffs) as second:
        table = HashMap(second.map("tenant_limits"), ctypes.c_uint32, TenantLimit)
        assert rows(table) == {9: (b"acme", 1, 2)}
        assert second.map("tenant_limits").id == pinned.id
    assert sorted(path.name for path in bpffs.iterdir()) == ["tenant_limits", "tenant_pace", "tenant_traffic"]


def test_a_pinned_map_that_does_not_fit_is_refused(bpffs: Path) -> None:
    with BpfObject("egress", entries={"tenant_limits": 10}, pins=bpffs):
        pass
    with pytest.raises(KernelError, match="cannot load 'egress.bpf.o'") as caught:
        BpfObject("egress", pins=bpffs)
    assert caught.value.errno == errno.EINVAL
    assert "tenant_limits" in str(caught.value)


def test_the_size_of_a_map_can_be_set() -> None:
    with BpfObject("connections", entries={"listen_ports": 5}) as loaded:
        assert loaded.map("listen_ports").max_entries == 5


def test_constants_are_set_before_loading() -> None:
    """A horizon of nothing refuses whatever is not to depart at once."""
    with LoadedLimits("egress", egress_horizon_ns=0) as limits:
        limits.set_limit(1, egress=1000)
        for _ in range(2):
            limits.program("egress_pace").test_run(ipv4(tcp(ACK)), bytes(SkBuff(mark=mark_of(1))))
        counted = limits.traffic(1)
        assert (counted["egress_packets"], counted["egress_dropped_packets"]) == (1, 1)
    with pytest.raises(KeyError, match="egress_horizons_ns"):
        BpfObject("egress", rodata={"egress_horizons_ns": 12345})


def test_programs_are_chosen_and_described() -> None:
    with BpfObject("egress", programs=("egress_police",)) as loaded:
        program = loaded.program("egress_police")
        assert program.id > 0
        assert len(bytes.fromhex(program.tag)) == 8
        with pytest.raises(KernelError, match="cannot use program 'egress_pace'"):
            _ = loaded.program("egress_pace").fd


def test_a_link_stays_while_it_is_pinned_and_takes_another_program(bpffs: Path) -> None:
    with observed.new_cgroup() as group, BpfObject("ingress") as first, BpfObject("ingress") as second:
        with group_descriptor(group) as descriptor:
            link = first.program("ingress_police").attach_cgroup(descriptor)
        link.pin(bpffs / "link")
        link.close()
        link.close()
        again = open_link(bpffs / "link")
        again.update(second.program("ingress_police"))
        again.close()
        (bpffs / "link").unlink()
    with pytest.raises(KernelError, match="cannot open the link"):
        open_link(bpffs / "link")


def test_an_object_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"cannot read the BPF object 'nothing.bpf.o' \(`make bpf` builds it"):
        BpfObject("nothing", path=tmp_path)


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nothing.bpf.o").write_bytes(b"no ELF file")
    with pytest.raises(KernelError, match="cannot open 'nothing.bpf.o'"):
        BpfObject("nothing", path=tmp_path)


def test_what_the_verifier_said_is_told() -> None:
    with pytest.raises(BpfLoadError, match="cannot load BPF program 'never_ends'") as caught:
        BpfObject("refused", path=Path(__file__).parent)
    assert "infinite loop" in caught.value.verifier_tail or "too large" in caught.value.verifier_tail


UNPRIVILEGED = """
import ctypes
from seedance.bpf import loader
assert ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER: no capability counts outside of it
print(loader.supported())
"""


def test_without_privilege_the_reason_is_told() -> None:
    done = subprocess.run([sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cannot ")
    assert "Operation not permitted" in done.stdout or "Permission denied" in done.stdout
