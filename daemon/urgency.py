"""How urgent a request is: what its client says of it, and what the kernel knows of the client's connection."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from typing import Final

from seedance.daemon.doors.errors import invalid
from seedance.daemon.doors.parameters import MOST_DEADLINE_MS
from seedance.daemon.ring.flow import borrowed
from seedance.engine.request import Urgency

DEADLINE_HEADER: Final = "x-deadline-ms"
_DIGITS: Final = 8

# struct tcp_info (linux/tcp.h): 8 bytes, then 32-bit words; tcpi_rtt and tcpi_rttvar are the 16th and 17th, in µs.
_TCP_INFO: Final = struct.Struct("=68xII")


def round_trip(fd: int) -> tuple[float, float]:
    """Return the smoothed round-trip time of a connection and its mean deviation, in seconds; 0, 0 where there is none.

    Asked of the kernel, which has measured it; no packet is sent.
    """
    if fd < 0:
        return 0.0, 0.0
    try:
        with borrowed(fd) as handle:
            info = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # a Unix socket, or the relay of another transport
        return 0.0, 0.0
    if len(info) < _TCP_INFO.size:
        return 0.0, 0.0
    rtt_us, deviation_us = _TCP_INFO.unpack(info)
    return rtt_us / 1e6, deviation_us / 1e6


def urgency(fd: int, deadline_ms: int | None, now_s: float) -> Urgency:
    """Return the urgency of a request that has just come on a connection; `now_s` is CLOCK_MONOTONIC."""
    rtt_s, deviation_s = round_trip(fd)
    return Urgency(None if deadline_ms is None else now_s + deadline_ms / 1000, rtt_s, deviation_s)


def deadline_of(headers: Iterable[tuple[str, str]]) -> int | None:
    """Return what the header says, in milliseconds; None without one. Raises ApiError."""
    given = [value for name, value in headers if name == DEADLINE_HEADER]
    if not given:
        return None
    text = given[0].strip()
    if len(given) > 1 or not _is_deadline(text):
        raise invalid(
            f"cannot use the header 'X-Deadline-Ms': '{text[:40]}' is not a number of milliseconds from 1 to"
            f" {MOST_DEADLINE_MS}, once",
            DEADLINE_HEADER,
        )
    return int(text)


def _is_deadline(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS and 0 < int(text) <= MOST_DEADLINE_MS
