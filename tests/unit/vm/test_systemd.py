"""The runner of the guest with systemd: what it decides, and how it speaks with the agent in the guest."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from vm import agent
from vm.leftovers import left_behind, programs, qdiscs
from vm.systemd_guest import Agent, Ended
from vm.systemd_image import debian_sources
from vm.systemd_install import source_digest
from vm.systemd_run import DEFAULT_TESTS, bad_lines, parse, pytest_command

# --- what it decides -----------------------------------------------------------------------------------------------


def test_sources_keep_the_archive_and_change_the_suite() -> None:
    listing = (
        "http://a.test/debian/|Debian|Debian\n"
        "http://a.test/debian/|Debian|Debian\n"
        "http://a.test/debian-security/|Debian|Debian-Security\n"
        "https://b.test/apt|Somebody|Somebody\n"
    )
    sources = [line.split() for line in debian_sources(listing)]
    assert [line[-3:] for line in sources] == [
        ["http://a.test/debian/", "trixie", "main"],
        ["http://a.test/debian/", "trixie-backports", "main"],
    ]


def test_a_machine_without_a_debian_archive_has_no_sources() -> None:
    assert debian_sources("https://b.test/ubuntu|Ubuntu|Ubuntu\n") == []


@pytest.mark.parametrize(
    ("words", "tests", "arguments"),
    [
        (["tests/bpf"], ["tests/bpf"], []),
        (["--", "-k", "fq"], list(DEFAULT_TESTS), ["-k", "fq"]),
        (["--live", "a.py", "b.py", "--", "--", "-x"], ["a.py", "b.py"], ["--", "-x"]),
    ],
)
def test_what_follows_two_dashes_is_for_pytest(words: list[str], tests: list[str], arguments: list[str]) -> None:
    options = parse(words)
    assert (options.tests, options.arguments) == (tests, arguments)


def test_the_tests_come_last_and_within_the_time() -> None:
    command = pytest_command(["tests/bpf"], ["-k", "fq"], 900.0)
    assert command[0] == "timeout"
    assert "900.0" in command
    assert command[-3:] == ["-k", "fq", "tests/bpf"]


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("WARNING: CPU: 0 PID: 1 at net/core/dev.c:1 f+0x1/0x2", True),
        ("BUG: unable to handle page fault", True),
        ("INFO: rcu_preempt detected stalls on CPUs/tasks", True),
        ("systemd[1]: Started seedanced.service", False),
        ("EXT4-fs (vda): mounted filesystem", False),
    ],
)
def test_which_lines_of_the_kernel_fail_a_run(line: str, bad: bool) -> None:
    assert bad_lines(f"first\n{line}\nlast\n") == ([line] if bad else [])


def test_only_what_is_new_was_left_behind() -> None:
    before = {"device": ["lo"], "pin": []}
    after = {"device": ["lo", "sd0"], "pin": ["/sys/fs/bpf/seedance/limits"], "core dump": ["core.python.1"]}
    assert left_behind(before, after) == [
        "device: sd0",
        "pin: /sys/fs/bpf/seedance/limits",
        "core dump: core.python.1",
    ]
    assert left_behind(after, before) == []


def test_a_device_s_own_queueing_discipline_is_no_leftover() -> None:
    listing: list[dict[str, object]] = [
        {"kind": "noqueue", "handle": "0:", "dev": "lo", "root": True},
        {"kind": "fq_codel", "handle": "0:", "dev": "eth0", "root": True},
        {"kind": "fq", "handle": "8001:", "dev": "eth0", "root": True},
        {"kind": "clsact", "handle": "ffff:", "dev": "lo", "parent": "ffff:fff1"},
    ]
    assert qdiscs(listing) == ["fq on eth0", "clsact on lo"]


def test_programs_of_systemd_s_are_no_leftovers() -> None:
    listing: list[dict[str, object]] = [
        {"id": 1, "type": "cgroup_device", "name": "sd_devices"},
        {"id": 7, "type": "sched_cls", "name": "egress_pace"},
        {"id": 8, "type": "socket_filter"},
    ]
    assert programs(listing) == ["sched_cls egress_pace (id 7)", "socket_filter  (id 8)"]


def test_the_wheel_is_known_by_what_is_in_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "daemon").mkdir()
    module = tmp_path / "daemon" / "app.py"
    module.write_text("a = 1\n")
    first = source_digest(tmp_path, ["daemon"])
    (tmp_path / "daemon" / "__pycache__").mkdir()
    (tmp_path / "daemon" / "__pycache__" / "app.pyc").write_text("x")
    assert source_digest(tmp_path, ["daemon"]) == first
    module.write_text("a = 2\n")
    assert source_digest(tmp_path, ["daemon"]) != first


# --- the wire to the agent -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(path: Path) -> Iterator[None]:
    """Serve on a Unix socket as the agent does on its port: a socket is a port whose host comes and goes, too."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    accepted, _ = listener.accept()
                except OSError:
                    return
                accepted.setblocking(False)
                with accepted, contextlib.suppress(agent.HungUp, ConnectionError):
                    wire = agent.Wire(accepted.fileno())
                    wire.meet()
                    agent.serve(wire)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Agent]:
    path = tmp_path / "agent.sock"
    with serving(path), Agent(path, 10) as found:
        yield found


def run(guest: Agent, script: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
    stdout, stderr = io.BytesIO(), io.BytesIO()
    given = None if stdin is None else io.BytesIO(stdin)
    status = guest.run(["/bin/sh", "-c", script], stdout=stdout, stderr=stderr, stdin=given, cwd="/")
    return status, stdout.getvalue(), stderr.getvalue()


def test_a_command_s_status_and_outputs_come_back(guest: Agent) -> None:
    assert run(guest, "echo out; echo err >&2; exit 3") == (3, b"out\n", b"err\n")
    assert run(guest, "kill -9 $$") == (-9, b"", b"")


def test_input_of_any_size_goes_through(guest: Agent) -> None:
    data = os.urandom(300_000)
    assert run(guest, "cat", data) == (0, data, b"")
    assert run(guest, "wc -c", b"")[1].strip() == b"0"


def test_a_command_that_takes_no_input_ends_well(guest: Agent) -> None:
    assert run(guest, "exec true", os.urandom(300_000)) == (0, b"", b"")


def test_a_child_that_stays_does_not_hold_the_command(guest: Agent) -> None:
    status, output, _ = run(guest, "sleep 100 & echo $!")
    os.kill(int(output), 9)
    assert status == 0


def test_a_command_that_is_not_there_is_said(guest: Agent) -> None:
    stderr = io.BytesIO()
    assert guest.run(["/nothing/here"], stdout=io.BytesIO(), stderr=stderr, cwd="/") == 127
    assert b"cannot run the command" in stderr.getvalue()


def test_check_tells_what_the_command_said(guest: Agent) -> None:
    assert guest.check(["echo", "well"]) == "well\n"
    with pytest.raises(Ended, match="status 1"):
        guest.check(["false"])


def test_what_a_former_host_left_on_the_wire_is_skipped() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(b"\0\0rest of a frame" + agent.GREETING + b"0123456789abcdef")
        agent.Wire(ours.fileno()).meet()
        assert theirs.recv(100) == agent.GREETING + b"0123456789abcdef"


def test_a_host_may_follow_another_before_the_guest_sees_it_leave() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        wire = agent.Wire(ours.fileno())
        theirs.sendall(agent.GREETING + b"0123456789abcdef")
        wire.meet()
        theirs.sendall(agent.GREETING + b"fedcba9876543210")
        with pytest.raises(agent.HungUp):
            agent.serve(wire)
        wire.meet()
        assert theirs.recv(100) == agent.GREETING + b"0123456789abcdef" + agent.GREETING + b"fedcba9876543210"


def test_a_guest_that_ends_is_told_apart_from_a_command_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(Ended, match="in time"):
            Agent(path, 0.0)
        with pytest.raises(Ended, match="the machine ended"):
            Agent(path, 10, alive=lambda: False)
    with pytest.raises(Ended, match="no machine"):
        Agent(path, 10)
