"""How the kernel's limits are set up, as the service's configuration says it."""

from __future__ import annotations

import msgspec


class KernelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`[kernel]`: what the kernel enforces, and where.

    limits             "required": a tenant with a limit that this machine cannot keep is refused, unless its file says
                       best_effort; "best_effort": as if every file said so; "off": nothing in the kernel is touched.
    name               of the folder below `bpffs` and of the group of a daemon that no service manager has started.
    cgroup             folder of a cgroup v2 group that is ours to divide; our own, or a new one, without it.
    bpffs              where the BPF file system is mounted.
    devices            network devices on which egress is limited; all, also those that come later, without it.
    horizon            a packet that egress limits would delay for longer is dropped.
    connections        new connections a second from one IPv4 address or IPv6 /64 network; no limit without it.
    connections_burst  so many of them at once.
    cuda_library       driver library whose calls are counted; none without it.
    observe            counts round-trip times, processor time and run-queue times of tenants.
    """

    limits: str = "required"
    name: str = "seedance"
    cgroup: str = ""
    bpffs: str = "/sys/fs/bpf"
    devices: tuple[str, ...] = ()
    horizon_s: float = 2.0
    connections_per_s: float | None = None
    connections_burst: int = 100
    cuda_library: str = ""
    observe: bool = True
