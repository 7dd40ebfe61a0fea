"""What the observing programs share with user space: `observe.h`, mirrored.

A test compares names, offsets and sizes of both by BTF. Slot n of a histogram counts values from 2^n up to 2^(n+1)
microseconds; slot 0 also those below 1, the last slot all that are larger.
"""

from __future__ import annotations

import ctypes
from typing import Final

HISTOGRAM_SLOTS: Final = 32

_U64: Final = ctypes.c_uint64
_HISTOGRAM: Final = ctypes.c_uint64 * HISTOGRAM_SLOTS


class TenantNetwork(ctypes.Structure):
    """Map `tenant_network`, by index: connections that clients opened, sampled about once in each round trip.

    `min_rtt_us` is 0 when there is none yet; of ACKs, those count that came while the connection was not at rest.
    """

    _fields_ = (
        ("rtt_samples", _U64),
        ("rtt_sum_us", _U64),
        ("min_rtt_us", _U64),
        ("acks", _U64),
        ("ack_interval_sum_us", _U64),
        ("retransmits", _U64),
        ("rtt_histogram", _HISTOGRAM),
        ("ack_interval_histogram", _HISTOGRAM),
    )
    rtt_samples: int
    rtt_sum_us: int
    min_rtt_us: int
    acks: int
    ack_interval_sum_us: int
    retransmits: int
    rtt_histogram: ctypes.Array[ctypes.c_uint64]
    ack_interval_histogram: ctypes.Array[ctypes.c_uint64]


class TenantCpu(ctypes.Structure):
    """Map `tenant_cpu`, by index: the processes in a tenant's cgroup, up to their last switch.

    Run-queue time is that of a process that could run but waited, for a processor or for `cpu.max` to let it.
    """

    _fields_ = (
        ("on_cpu_ns", _U64),
        ("run_queue_ns", _U64),
        ("switches", _U64),
        ("waits", _U64),
        ("run_queue_histogram", _HISTOGRAM),
    )
    on_cpu_ns: int
    run_queue_ns: int
    switches: int
    waits: int
    run_queue_histogram: ctypes.Array[ctypes.c_uint64]


class RunningSlice(ctypes.Structure):
    """Map `running`, one entry, by processor: since when it runs what it runs now, and whose that is (0: nobody's)."""

    _fields_ = (("since_ns", _U64), ("tenant", ctypes.c_uint32), ("pad", ctypes.c_uint32))
    since_ns: int
    tenant: int


class CudaCalls(ctypes.Structure):
    """Maps `process_cuda`, by process id, and `tenant_cuda`, by index: calls of the CUDA driver.

    Allocations and their bytes count when they have succeeded; what is freed is not taken off.
    """

    _fields_ = (
        ("launches", _U64),
        ("allocations", _U64),
        ("allocated_bytes", _U64),
        ("failed_allocations", _U64),
    )
    launches: int
    allocations: int
    allocated_bytes: int
    failed_allocations: int


STRUCTS: Final[dict[str, type[ctypes.Structure]]] = {
    "cuda_calls": CudaCalls,
    "running_slice": RunningSlice,
    "tenant_cpu": TenantCpu,
    "tenant_network": TenantNetwork,
}
"""C name → mirror."""
