"""The first and only program of the guest: mounts, runs pytest, reports on a serial port, switches off.

ttyS0 is the kernel's console, ttyS1 takes pytest's output, ttyS2 one JSON line: pytest's exit status and what in the
kernel's log must not be there. The arguments for pytest are in /pytest.json.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

# What a kernel prints when something of its own went wrong; the list that liburing's tests go by.
BAD_LOG: Final = ("BUG:", "WARNING:", "Oops", "INFO: rcu", "INFO: task", "possible recursive locking", "KASAN", "UBSAN")
MOUNTS: Final = (
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/tmp"),
    ("tmpfs", "/run"),
    ("cgroup2", "/sys/fs/cgroup"),
)
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_DESCRIPTORS: Final = 65_536
_RB_AUTOBOOT: Final = 0x01234567
_libc: Final = ctypes.CDLL(None, use_errno=True)


def mount_all() -> None:
    for kind, where in MOUNTS:
        Path(where).mkdir(parents=True, exist_ok=True)
        if _libc.mount(b"none", where.encode(), kind.encode(), 0, None) != 0:
            raise OSError(ctypes.get_errno(), f"cannot mount {kind}", where)


def bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        name = b"lo".ljust(16, b"\0")
        reply = fcntl.ioctl(sock, _SIOCGIFFLAGS, name + bytes(24))
        flags = struct.unpack_from("H", reply, 16)[0] | _IFF_UP
        fcntl.ioctl(sock, _SIOCSIFFLAGS, name + struct.pack("H", flags) + bytes(22))


def raise_limits() -> None:
    """Allow as many descriptors as a login on the supported systems may take."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))


def run_tests() -> int:
    plan = json.loads(Path("/pytest.json").read_text())
    environment = {**plan["environment"], "HOME": "/tmp", "PATH": "/bin:/usr/bin", "LANG": "C.UTF-8"}
    with open("/dev/ttyS1", "wb", buffering=0) as screen:
        command = [sys.executable, "-m", "pytest", *plan["arguments"]]
        done = subprocess.run(
            command,
            cwd=plan["cwd"],
            env=environment,
            stdout=screen,
            stderr=screen,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    return done.returncode


def bad_log_lines() -> list[str]:
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    lines = []
    try:
        while True:
            lines.append(os.read(log, 8192).decode(errors="replace").partition(";")[2].rstrip())
    except BlockingIOError:
        pass
    finally:
        os.close(log)
    return [line for line in lines if any(mark in line for mark in BAD_LOG)]


def switch_off() -> None:
    os.sync()
    _libc.reboot(_RB_AUTOBOOT)


def main() -> None:
    """Do it all; whatever fails, the machine is switched off, and the host sees that there was no report."""
    try:
        mount_all()
        bring_loopback_up()
        raise_limits()
        started_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        status = run_tests()
        report = {"status": status, "kernel": os.uname().release, "bad_log": bad_log_lines(), "seconds": started_s}
        with open("/dev/ttyS2", "wb", buffering=0) as port:
            port.write(json.dumps(report).encode() + b"\n")
    finally:
        switch_off()


if __name__ == "__main__":
    main()
