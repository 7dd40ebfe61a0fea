"""What a tenant uses, as the kernel counts it."""

from __future__ import annotations

import msgspec


class TenantUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the kernel began to know the tenant, which a restart of the daemon does not end.

    `memory_bytes`, `tasks`, `rtt_us` and `ack_interval_us` are the present values. What this machine does not count
    is 0.
    """

    cpu_s: float = 0.0
    cpu_throttled: int = 0
    cpu_throttled_s: float = 0.0
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    oom_kills: int = 0
    tasks: int = 0
    egress_bytes: int = 0
    egress_packets: int = 0
    egress_delayed_packets: int = 0
    egress_dropped_packets: int = 0
    ingress_bytes: int = 0
    ingress_packets: int = 0
    ingress_dropped_packets: int = 0
    rtt_us: int = 0
    min_rtt_us: int = 0
    ack_interval_us: int = 0
    retransmits: int = 0
    on_cpu_s: float = 0.0
    run_queue_s: float = 0.0
    cuda_launches: int = 0
    cuda_bytes: int = 0
