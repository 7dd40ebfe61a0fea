"""What the programs that keep the limits share with user space: `abi.h`, mirrored.

A test compares names, offsets and sizes of both by BTF. Times are CLOCK_MONOTONIC. Bytes and packets are those on the
wire: headers count, and a segmented packet counts as its segments.
"""

from __future__ import annotations

import ctypes
from typing import Final

MARK_BASE: Final = 0x5EED0000
"""SO_MARK of a tenant's sockets is this | index; a mark of another form belongs to somebody else."""
MARK_MASK: Final = 0xFFFF0000

TENANT_INDEX_MAX: Final = 0xFFFF
"""Indices begin with 1: 0 is "no tenant"."""
TENANT_NAME_SIZE: Final = 64


class TenantLimit(ctypes.Structure):
    """Map `tenant_limits`, by index; written by user space. A rate of 0 is no limit."""

    _fields_ = (
        ("name", ctypes.c_char * TENANT_NAME_SIZE),
        ("egress_bytes_per_s", ctypes.c_uint64),
        ("ingress_bytes_per_s", ctypes.c_uint64),
    )
    name: bytes
    egress_bytes_per_s: int
    ingress_bytes_per_s: int


class TenantPace(ctypes.Structure):
    """Map `tenant_pace`, by index: when all that was let through is paid for at the rate.

    `is_paced` is 1 when the tenant's latest packet went out by egress_pace, which paces senders too.
    """

    _fields_ = (
        ("egress_departure_ns", ctypes.c_uint64),
        ("ingress_arrival_ns", ctypes.c_uint64),
        ("is_paced", ctypes.c_uint64),
    )
    egress_departure_ns: int
    ingress_arrival_ns: int
    is_paced: int


class TenantTraffic(ctypes.Structure):
    """Map `tenant_traffic`, by index and processor. What was dropped is not in the other counts."""

    _fields_ = (
        ("egress_bytes", ctypes.c_uint64),
        ("egress_packets", ctypes.c_uint64),
        ("egress_delayed_packets", ctypes.c_uint64),
        ("egress_dropped_packets", ctypes.c_uint64),
        ("egress_dropped_bytes", ctypes.c_uint64),
        ("ingress_bytes", ctypes.c_uint64),
        ("ingress_packets", ctypes.c_uint64),
        ("ingress_dropped_packets", ctypes.c_uint64),
        ("ingress_dropped_bytes", ctypes.c_uint64),
    )
    egress_bytes: int
    egress_packets: int
    egress_delayed_packets: int
    egress_dropped_packets: int
    egress_dropped_bytes: int
    ingress_bytes: int
    ingress_packets: int
    ingress_dropped_packets: int
    ingress_dropped_bytes: int


class SourcePrefix(ctypes.Structure):
    """Key of map `source_connections`: an IPv4 address as ::ffff:a.b.c.d, or an IPv6 network of 64 bits."""

    _fields_ = (("address", ctypes.c_uint8 * 16),)
    address: ctypes.Array[ctypes.c_uint8]


class SourcePace(ctypes.Structure):
    """Value of map `source_connections`: when all connections that were let through are paid for at the rate."""

    _fields_ = (("arrival_ns", ctypes.c_uint64),)
    arrival_ns: int


class ConnectionCounts(ctypes.Structure):
    """Map `connection_counts`, one entry, by processor: SYNs to our ports, let through and dropped."""

    _fields_ = (("requests", ctypes.c_uint64), ("dropped_requests", ctypes.c_uint64))
    requests: int
    dropped_requests: int


STRUCTS: Final[dict[str, type[ctypes.Structure]]] = {
    "connection_counts": ConnectionCounts,
    "source_pace": SourcePace,
    "source_prefix": SourcePrefix,
    "tenant_limit": TenantLimit,
    "tenant_pace": TenantPace,
    "tenant_traffic": TenantTraffic,
}
"""C name → mirror."""
