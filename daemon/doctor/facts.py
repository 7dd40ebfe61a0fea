"""What `seedancectl doctor` knows of a machine and a configuration, before any judgement."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from seedance.qos.gpu import GpuPart


class DaemonFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A running seedanced."""

    pid: int
    listeners: tuple[str, ...] = ()
    limits_off: tuple[str, ...] = ()


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A machine and a configuration, before any judgement. Where a text is an error, "" means that it works.

    `wanted` are the limits that tenant files set and insist on: cpu, cpuset, memory, egress, ingress. `missing`
    capabilities are those of NEEDED_ and USEFUL_CAPABILITIES that this process lacks. `ports` maps each address to
    listen on to the error of doing so; `memlock_bytes` is None for no limit. `mig` says whether any GPU could be
    divided, `gpu_part` is what the configuration gives to the engine.
    """

    config_path: str
    config_error: str = ""
    bad_files: tuple[str, ...] = ()
    tenant_files: int = 0
    policy: str = "required"
    wanted: frozenset[str] = frozenset()
    daemon: DaemonFacts | None = None
    daemon_error: str = ""

    kernel_release: str = ""
    kernel_options: Mapping[str, str] | None = None
    cgroup_mount: str = ""
    cgroup_controllers: tuple[str, ...] = ()
    cgroup_v1_controllers: tuple[str, ...] = ()
    cgroup_error: str = ""
    bpf_error: str = ""
    btf: bool = False
    bpffs: str = "/sys/fs/bpf"
    bpffs_mounted: bool = False
    libbpf: str = ""
    kprobes: bool = False
    uprobes: bool = False
    traffic_control: Mapping[str, str] | None = None
    bbr_error: str = ""
    io: str = "auto"
    io_uring_error: str = ""

    systemd_version: str = ""
    systemd_runs: bool = False
    unit_path: str = ""
    unit_state: str = ""

    engine: str = "synthetic"
    vllm: str = ""
    gpu_driver: str = ""
    gpu_error: str = ""
    gpus: tuple[str, ...] = ()
    mps_error: str = ""
    mig: bool = False
    mig_instances: tuple[str, ...] = ()
    gpu_part: GpuPart = GpuPart()
    model: str = ""
    model_error: str = ""
    model_is_remote: bool = False
    model_tokens: int = 0

    ports: Mapping[str, str] = {}
    nofile: int = 0
    memlock_bytes: int | None = None
    limits_of: str = "this shell"
    user: str = ""
    is_root: bool = False
    missing: tuple[str, ...] = ()
    service_user: str = ""
    service_user_exists: bool = True
    headers: str = ""
    bcc: bool = False
