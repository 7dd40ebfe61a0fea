"""In which cgroups sockets were made, as this kernel tells."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from seedance.qos.cgroup_site import parse_mounts, parse_own_group
from seedance.qos.socket_groups import socket_groups


def own_group() -> int:
    """Return the number of the cgroup v2 group in which this process is."""
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_text())
    own = parse_own_group(Path("/proc/self/cgroup").read_text())
    if mounts.path is None or own is None or mounts.root != "/":
        pytest.skip("this process cannot see its cgroup v2 group")
    return (mounts.path / own.lstrip("/")).stat().st_ino


def test_listening_sockets_of_both_families_among_others() -> None:
    here = own_group()
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as two,
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_UNIX) as three,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as four,
    ):
        found = socket_groups([sock.fileno() for sock in (one, two, three, four)])
        ports = one.getsockname()[1], two.getsockname()[1]
    assert found == {f"127.0.0.1:{ports[0]}": here, f"[::1]:{ports[1]}": here}


def test_a_socket_stays_in_the_group_in_which_it_was_made() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to make a group")
    own_group()
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_text())
    own = parse_own_group(Path("/proc/self/cgroup").read_text())
    assert mounts.path is not None
    assert own is not None
    group = mounts.path / f"seedance-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        with socket.create_server(("127.0.0.1", 0)) as made:
            (mounts.path / own.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
            assert list(socket_groups([made.fileno()]).values()) == [group.stat().st_ino]
    finally:
        (mounts.path / own.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def test_none() -> None:
    assert socket_groups([]) == {}
