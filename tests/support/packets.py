"""Packets for BPF_PROG_TEST_RUN: bytes from the Ethernet header on, and the context that goes with them."""

from __future__ import annotations

import ctypes
import ipaddress
import struct
from typing import Final

ACK: Final = 0x10
FIN: Final = 0x01
PSH: Final = 0x08
RST: Final = 0x04
SYN: Final = 0x02

_ETH_P_IP: Final = 0x0800
_ETH_P_IPV6: Final = 0x86DD
HOP_BY_HOP: Final = 0
ROUTING: Final = 43
FRAGMENT: Final = 44
DESTINATION: Final = 60
TCP: Final = 6
UDP: Final = 17

_U32: Final = ctypes.c_uint32


class SkBuff(ctypes.Structure):
    """`struct __sk_buff` (linux/bpf.h)."""

    _fields_ = (
        ("len", _U32),
        ("pkt_type", _U32),
        ("mark", _U32),
        ("queue_mapping", _U32),
        ("protocol", _U32),
        ("vlan_present", _U32),
        ("vlan_tci", _U32),
        ("vlan_proto", _U32),
        ("priority", _U32),
        ("ingress_ifindex", _U32),
        ("ifindex", _U32),
        ("tc_index", _U32),
        ("cb", _U32 * 5),
        ("hash", _U32),
        ("tc_classid", _U32),
        ("data", _U32),
        ("data_end", _U32),
        ("napi_id", _U32),
        ("family", _U32),
        ("remote_ip4", _U32),
        ("local_ip4", _U32),
        ("remote_ip6", _U32 * 4),
        ("local_ip6", _U32 * 4),
        ("remote_port", _U32),
        ("local_port", _U32),
        ("data_meta", _U32),
        ("flow_keys", ctypes.c_uint64),
        ("tstamp", ctypes.c_uint64),
        ("wire_len", _U32),
        ("gso_segs", _U32),
        ("sk", ctypes.c_uint64),
        ("gso_size", _U32),
        ("tstamp_type", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 3),
        ("hwtstamp", ctypes.c_uint64),
    )
    tstamp: int


def tcp(flags: int = ACK, payload: bytes = b"", *, port: int = 443, options: bytes = b"") -> bytes:
    """Build a TCP segment; `options` come in fours."""
    assert len(options) % 4 == 0
    words = 5 + len(options) // 4
    return struct.pack("!HHIIBBHHH", 50000, port, 1, 1, words << 4, flags, 65535, 0, 0) + options + payload


def ipv4(
    transport: bytes, *, protocol: int = TCP, source: str = "192.0.2.1", options: bytes = b"", fragment: int = 0
) -> bytes:
    """Build a packet of IPv4 with its Ethernet header; `fragment` is its offset in units of eight bytes."""
    words, size = 5 + len(options) // 4, 20 + len(options) + len(transport)
    addresses = ipaddress.ip_address(source).packed + ipaddress.ip_address("198.51.100.1").packed
    header = struct.pack("!BBHHHBBH", 0x40 | words, 0, size, 0, fragment, 64, protocol, 0) + addresses + options
    return bytes(12) + struct.pack("!H", _ETH_P_IP) + header + transport


def ipv6(transport: bytes, *, protocol: int = TCP, source: str = "2001:db8::1") -> bytes:
    """Build a packet of IPv6 with its Ethernet header."""
    addresses = ipaddress.ip_address(source).packed + ipaddress.ip_address("2001:db8:1::1").packed
    header = struct.pack("!IHBB", 0x60000000, len(transport), protocol, 64) + addresses
    return bytes(12) + struct.pack("!H", _ETH_P_IPV6) + header + transport


def extended(
    transport: bytes, *kinds: int, protocol: int = TCP, units: int = 0, fragment: int = 0
) -> tuple[bytes, int]:
    """Put extension headers of these kinds before a segment; returns the whole and the first kind, for `ipv6`.

    Each has `units` of eight bytes more than the least; one for a fragment has none, and `fragment` as its offset.
    """
    after = [*kinds[1:], protocol]
    headers = b"".join(
        struct.pack("!BBHI", following, 0, fragment << 3, 0)
        if kind == FRAGMENT
        else struct.pack("!BB6x", following, units) + bytes(8 * units)
        for kind, following in zip(kinds, after, strict=True)
    )
    return headers + transport, [*kinds, protocol][0]
