"""The guest is what the other tests here take it for: a systemd that is well, and a kernel that has everything."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.namespaces import Namespace
from support.system_service import command, systemctl

import seedance


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    found = Namespace()
    yield found
    found.close()


def test_the_machine_has_booted_and_nothing_failed() -> None:
    assert systemctl("is-system-running", check=False).strip() == "running", systemctl("list-units", "--failed")
    assert Path("/proc/1/comm").read_text() == "systemd\n"
    assert systemctl("is-active", "multi-user.target").strip() == "active"


def test_the_kernel_is_a_new_one_with_types_for_bpf() -> None:
    assert int(platform.release().split(".")[0]) >= 7
    assert Path("/sys/kernel/btf/vmlinux").stat().st_size > 1_000_000


def test_control_groups_are_the_second_version_with_every_controller() -> None:
    controllers = set(Path("/sys/fs/cgroup/cgroup.controllers").read_text().split())
    assert {"cpu", "cpuset", "io", "memory", "pids"} <= controllers


def test_the_kernel_has_the_queueing_disciplines(namespace: Namespace) -> None:
    for kind in ("fq", "netem", "clsact"):
        where = () if kind == "clsact" else ("root",)
        namespace.run("tc", "qdisc", "replace", "dev", "lo", *where, kind)
    listing = namespace.run("tc", "qdisc", "show", "dev", "lo")
    assert "netem" in listing and "clsact" in listing, listing


def test_the_kernel_has_bbr_and_tls() -> None:
    command("modprobe", "--all", "tcp_bbr", "tls")
    assert "bbr" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    assert "tls" in Path("/proc/sys/net/ipv4/tcp_available_ulp").read_text().split()


def test_bpf_programs_can_be_pinned_and_listed() -> None:
    assert "/sys/fs/bpf bpf" in Path("/proc/mounts").read_text()
    assert command("bpftool", "--json", "prog", "show").startswith("[")


def test_a_crash_leaves_a_core_dump() -> None:
    """So that the run's end can tell: of a sandboxed process that has become another user, too."""
    sandbox = ("-p", "ProtectSystem=strict", "-p", "User=nobody", "-p", "LimitCORE=0", "--wait", "--collect")
    command("systemd-run", *sandbox, "sh", "-c", "kill -SEGV $$$$", check=False)
    (core,) = Path("/var/crash").glob("core.sh.*")
    core.unlink()


def test_what_runs_here_is_what_was_installed() -> None:
    """Not the checkout that lies beside it."""
    assert Path(seedance.__file__).is_relative_to("/usr/local/lib/seedance")
    assert sys.prefix == "/usr/local/lib/seedance"
    assert seedance.__version__ in command("seedanced", "--version")
