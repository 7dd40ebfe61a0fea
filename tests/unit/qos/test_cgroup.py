"""Our part of the cgroup tree, on a tree in memory that has the kernel's rules."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
from support.fake_cgroup import MOUNT, FakeFolders, site

from seedance.errors import KernelError
from seedance.qos.cgroup import CgroupTree, GroupFolders, group_name
from seedance.qos.plan import FILES

TOP = MOUNT / "seedance"


def made(folders: FakeFolders | None = None) -> tuple[CgroupTree, FakeFolders]:
    folders = folders or FakeFolders()
    return CgroupTree(site(), folders), folders


def unit(folders: FakeFolders, *others: int) -> CgroupTree:
    folders.add(TOP, os.getpid(), *others)
    folders.write(MOUNT / "cgroup.subtree_control", "+cpu")
    return CgroupTree(site(made=False), folders)


class TestSetUp:
    def test_every_controller_reaches_the_tenants(self) -> None:
        tree, folders = made()
        assert tree.off == {}
        assert tree.files == FILES.keys()
        assert folders.processes[os.getpid()] == TOP / "supervisor"
        tree.make_group("acme")
        assert tree.read_group("acme") == FILES

    def test_a_unit_brings_all_its_processes(self) -> None:
        folders = FakeFolders()
        tree = unit(folders, 71, 72)
        assert set(folders.processes.values()) == {TOP / "supervisor"}
        assert tree.files == {"cpu.max", "cpu.max.burst"}
        assert tree.off["memory"] == f"the group '{TOP}' has no memory controller: its unit needs Delegate=memory"

    def test_what_cgroup_v1_has(self) -> None:
        folders = FakeFolders(controllers=["memory"])
        tree = CgroupTree(msgspec.structs.replace(site(), v1=frozenset(["cpu"])), folders)
        assert tree.off["cpu"] == "this machine's cgroup v2 has no cpu controller (it is in cgroup v1)"
        assert tree.off["pids"] == "this machine's cgroup v2 has no pids controller (this kernel has none)"
        assert "memory" not in tree.off
        assert tree.files == {file for file in FILES if file.startswith("memory.")}

    def test_a_controller_that_the_kernel_does_not_hand_on(self) -> None:
        folders = FakeFolders()

        def refuse(path: Path, text: str) -> None:
            if text == "+cpu":
                raise KernelError(f"write '{text}' to '{path}'", errno.EINVAL)

        folders.refuse = refuse
        tree, _ = made(folders)
        assert tree.off == {
            "cpu": f"cannot write '+cpu' to '{MOUNT}/cgroup.subtree_control': Invalid argument (errno 22)"
        }

    def test_a_group_of_the_same_name_with_processes_of_others_is_left_alone(self) -> None:
        folders = FakeFolders()
        folders.add(TOP, 77)
        with pytest.raises(KernelError, match=f"cannot divide the group '{TOP}', in which processes 77 run: end them"):
            made(folders)
        assert folders.processes[77] == TOP

    def test_a_former_run_is_taken_over(self) -> None:
        tree, folders = made()
        tree.make_group("acme")
        tree.write_file("acme", "pids.max", "5")
        folders.processes[99] = TOP / "tenants/acme"
        folders.processes[os.getpid()] = MOUNT
        again, _ = made(folders)
        assert again.tenants() == ["acme"]
        assert again.read_group("acme")["pids.max"] == "5"
        assert again.is_populated("acme")


class TestTenants:
    def test_names_that_the_kernel_has_taken(self) -> None:
        assert group_name("acme.com") == "acme.com"
        assert group_name("memory.max") == "_memory.max"
        tree, _ = made()
        tree.make_group("cpu.max")
        assert tree.tenants() == ["cpu.max"]
        assert tree.read_group("cpu.max") == FILES

    def test_a_group_with_a_process_stays(self) -> None:
        tree, folders = made()
        tree.make_group("acme")
        folders.processes[99] = MOUNT
        tree.place(99, "tenants/acme")
        assert tree.is_populated("acme")
        with pytest.raises(KernelError) as caught:
            tree.remove_group("acme")
        assert caught.value.errno == errno.EBUSY
        folders.end(99)
        assert not tree.is_populated("acme")
        tree.remove_group("acme")
        assert tree.tenants() == []
        assert tree.read_group("acme") == {}
        assert tree.group_id("acme") == 0

    def test_a_process_that_has_ended_cannot_be_placed(self) -> None:
        tree, _ = made()
        with pytest.raises(KernelError):
            tree.place(99, "engine")

    def test_usage(self) -> None:
        tree, folders = made()
        tree.make_group("acme")
        folders.texts[TOP / "tenants/acme"] |= {
            "cpu.stat": "usage_usec 2500000\nuser_usec 1\nnr_throttled 7\nthrottled_usec 1500000",
            "memory.current": "4096",
            "memory.peak": "8192",
            "memory.events": "low 0\noom 2\noom_kill 3",
            "pids.current": "12",
        }
        usage = tree.usage("acme")
        assert (usage.cpu_s, usage.cpu_throttled, usage.cpu_throttled_s) == (2.5, 7, 1.5)
        assert (usage.memory_bytes, usage.memory_peak_bytes, usage.oom_kills, usage.tasks) == (4096, 8192, 3, 12)

    def test_usage_of_a_machine_that_counts_nothing(self) -> None:
        tree, _ = made(FakeFolders(controllers=[]))
        tree.make_group("acme")
        assert tree.usage("acme").cpu_s == 0

    def test_how_often_memory_ran_out(self) -> None:
        tree, folders = made()
        tree.make_group("acme")
        folders.texts[TOP / "tenants/acme"]["memory.events"] = "low 0\noom 2\noom_kill 3"
        assert tree.oom_kills("acme") == 3
        assert tree.oom_kills("nobody") == 0

    def test_groups_of_sockets(self) -> None:
        tree, folders = made()
        tree.make_group("acme")
        ids = tree.socket_group_ids()
        assert folders.number(TOP) in ids
        assert tree.group_id("acme") in ids
        assert folders.number(MOUNT) not in ids


class TestRemoval:
    def test_nothing_is_left(self) -> None:
        tree, folders = made()
        tree.make_group("acme")
        removed = tree.remove()
        assert folders.texts.keys() == {MOUNT}
        assert folders.processes == {os.getpid(): MOUNT}
        assert folders.texts[MOUNT]["cgroup.subtree_control"] == ""
        assert removed[0] == str(TOP / "tenants/acme")
        assert removed[-1] == str(TOP)

    def test_controllers_that_were_handed_on_before_still_are(self) -> None:
        folders = FakeFolders()
        folders.write(MOUNT / "cgroup.subtree_control", "+memory")
        tree, _ = made(folders)
        tree.remove()
        assert folders.texts[MOUNT]["cgroup.subtree_control"] == "memory"

    def test_a_unit_keeps_its_group(self) -> None:
        folders = FakeFolders()
        unit(folders).remove()
        assert folders.texts.keys() == {MOUNT, TOP}
        assert folders.processes == {os.getpid(): TOP}

    def test_where_we_came_from_is_gone(self) -> None:
        folders = FakeFolders()
        folders.add(MOUNT / "session", os.getpid())
        tree = CgroupTree(msgspec.structs.replace(site(), origin=MOUNT / "session"), folders)
        folders.remove(MOUNT / "session")
        tree.remove()
        assert folders.processes == {os.getpid(): MOUNT}

    def test_a_tenant_with_a_process_stops_it(self) -> None:
        tree, folders = made()
        tree.make_group("acme")
        folders.processes[99] = TOP / "tenants/acme"
        with pytest.raises(KernelError):
            tree.remove()
        folders.end(99)
        tree.remove()
        assert folders.texts.keys() == {MOUNT}


class TestFolders:
    """Those of the machine, where a folder does for a group."""

    def test_a_file_is_read_whole(self, tmp_path: Path) -> None:
        pids = " ".join(map(str, range(10_000)))
        (tmp_path / "cgroup.procs").write_text(f"{pids}\n")
        assert GroupFolders().read(tmp_path / "cgroup.procs") == pids
        assert GroupFolders().read(tmp_path / "nothing") == ""
        assert GroupFolders().read(tmp_path) == ""

    def test_a_write_does_not_wait(self, tmp_path: Path) -> None:
        # A pipe without a reader: to open it for writing waits for one, unless nothing may wait.
        os.mkfifo(tmp_path / "memory.max")
        with pytest.raises(KernelError) as caught:
            GroupFolders().write(tmp_path / "memory.max", "4096")
        assert caught.value.errno == errno.ENXIO
