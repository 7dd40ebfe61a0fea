"""Becoming another user, tried in processes of their own: it is for good."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys

import msgspec
import pytest

from seedance.daemon.privileges import Account, Capability, find_account, find_group
from seedance.errors import ConfigError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

NOBODY = pwd.getpwnam("nobody")
# What is imported later must be readable by that user, which a Python in root's home is not.
SHOW = """
import ctypes, json, os, signal
from seedance.daemon.privileges import *
from seedance.errors import KernelError
def show(**more):
    with open("/proc/self/status") as file:
        status = dict(line.strip("\\n").split(":\\t", 1) for line in file)
    libc = ctypes.CDLL(None)
    death = ctypes.c_int()
    libc.prctl(2, ctypes.byref(death), 0, 0, 0)
    print(json.dumps({
        "ids": [os.getresuid(), os.getresgid()], "groups": os.getgroups(), "no_new_privs": status["NoNewPrivs"],
        "dumpable": libc.prctl(3, 0, 0, 0, 0), "death": death.value,
        **{name: int(status["Cap" + name], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")}, **more,
    }))
nobody = find_account("nobody", "")
"""
RAW = 1 << Capability.NET_RAW


class Shown(msgspec.Struct, rename={"inh": "Inh", "prm": "Prm", "eff": "Eff", "bnd": "Bnd", "amb": "Amb"}):
    """What the process has become."""

    ids: list[list[int]]
    groups: list[int]
    no_new_privs: str
    dumpable: int
    death: int
    inh: int
    prm: int
    eff: int
    bnd: int
    amb: int
    more: object = None


def _run(code: str) -> Shown:
    done = subprocess.run([sys.executable, "-c", SHOW + code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=Shown)


@needs_root
def test_nothing_is_left_of_root() -> None:
    shown = _run("become(nobody)\nshow()")
    assert shown.ids == [[NOBODY.pw_uid] * 3, [NOBODY.pw_gid] * 3]
    assert shown.groups == []
    assert (shown.inh, shown.prm, shown.eff, shown.bnd, shown.amb) == (0, 0, 0, 0, 0)
    assert shown.no_new_privs == "1"
    assert shown.dumpable == 0


@needs_root
def test_what_is_kept_is_usable_and_outlives_no_execve() -> None:
    code = """
import socket, subprocess
kept = become(nobody, [Capability.NET_RAW])
socket.socket().setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 7)
child = subprocess.run(["grep", "CapEff", "/proc/self/status"], capture_output=True, text=True).stdout.split()
show(more=[sorted(kept), int(child[1], 16)])
"""
    shown = _run(code)
    assert (shown.prm, shown.eff, shown.bnd) == (RAW, RAW, RAW)
    assert (shown.inh, shown.amb) == (0, 0)
    assert shown.more == [[Capability.NET_RAW], 0]


@needs_root
def test_there_is_no_way_back() -> None:
    code = """
become(nobody, [Capability.NET_RAW])
refused = 0
for way in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0])):
    try:
        way()
    except PermissionError:
        refused += 1
show(more=refused)
"""
    assert _run(code).more == 3


@needs_root
def test_what_was_not_there_is_not_kept() -> None:
    code = """
become(Account("root", 0, 0, (), "/"), [Capability.NET_ADMIN])
kept = become(nobody, [Capability.NET_RAW, Capability.NET_ADMIN])
show(more=sorted(kept))
"""
    # setresuid without CAP_SETUID: the first step has given it up.
    done = subprocess.run([sys.executable, "-c", SHOW + code], capture_output=True, text=True, timeout=30, check=False)
    assert "KernelError: cannot become user 'nobody': Operation not permitted" in done.stderr
    code = """
become(nobody, [Capability.NET_RAW])
kept = become(nobody, [Capability.NET_RAW, Capability.NET_ADMIN])
show(more=sorted(kept))
"""
    shown = _run(code)
    assert shown.more == [Capability.NET_RAW]
    assert (shown.prm, shown.eff) == (RAW, RAW)


@needs_root
def test_the_groups_of_the_account_come_when_asked_for() -> None:
    code = """
me = Account("nobody", nobody.uid, nobody.gid, (nobody.gid, 44), "/")
become(me, with_groups=True)
show()
"""
    assert _run(code).groups == sorted([NOBODY.pw_gid, 44])


@needs_root
def test_death_with_the_parent_is_to_be_asked_for_afterwards() -> None:
    wrong = "from seedance.daemon.process import die_with_parent\ndie_with_parent()\nbecome(nobody)\nshow()"
    right = "from seedance.daemon.process import die_with_parent\nbecome(nobody)\ndie_with_parent()\nshow()"
    assert _run(wrong).death == 0
    assert _run(right).death == 9


@needs_root
def test_a_process_with_threads_is_refused() -> None:
    code = """
import threading
stop = threading.Event()
thread = threading.Thread(target=stop.wait, daemon=True)
thread.start()
try:
    become(nobody)
except AssertionError as exc:
    show(more=str(exc))
stop.set()
"""
    shown = _run(code)
    assert "several" in str(shown.more)
    assert shown.ids[0] == [0, 0, 0]


def test_accounts_are_found_by_name_and_by_number() -> None:
    root = find_account("root", "")
    assert (root.name, root.uid, root.gid, root.home) == ("root", 0, 0, pwd.getpwuid(0).pw_dir)
    assert 0 in root.groups
    assert find_account("0", "") == find_account(0, "") == root
    assert isinstance(root, Account)


@pytest.mark.parametrize("user", ["no such user", "4294967294", 4294967294, str(1 << 70)])
def test_an_unknown_user_is_the_files_fault(user: str | int) -> None:
    with pytest.raises(ConfigError) as raised:
        find_account(user, "/etc/x.toml")
    assert (raised.value.path, raised.value.key) == ("/etc/x.toml", "daemon.user")
    assert f"cannot find the user '{user}'; make it" in str(raised.value)


def test_groups_are_found_by_name_and_by_number() -> None:
    assert find_group("root", "") == find_group("0", "") == find_group(0, "") == 0
    with pytest.raises(ConfigError) as raised:
        find_group("no such group", "/etc/x.toml")
    assert (raised.value.path, raised.value.key) == ("/etc/x.toml", "daemon.group")
    assert "cannot find the group 'no such group'; make it" in str(raised.value)
