"""The network settings of a listener as the configuration file has them: their words, their bounds, their defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from seedance.qos import units
from seedance.qos.toml import Field, Reader, flag, whole

AUTO: Final = "auto"
KEEPALIVE_PROBES: Final = 3
"""So many probes without an answer, a third of the keepalive time apart, and the connection is dead."""

# TCP_CA_NAME_MAX is 16 with the closing zero.
_CONGESTION: Final = re.compile(r"[a-z0-9_-]{1,15}", re.ASCII)
_BUSY_POLL_MOST_S: Final = 0.01
_KEEPALIVE_MOST_S: Final = 32_767  # MAX_TCP_KEEPIDLE
_USER_TIMEOUT_MOST_S: Final = 86_400
_BUFFER_LEAST: Final = 4 << 10
_BUFFER_MOST: Final = 1 << 30
_LOWAT_LEAST: Final = 1 << 10


class NetworkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a TCP listener, which its connections inherit. The keys of `[listen]` and `[listen.at."ADDRESS"]`.

    congestion      congestion control, by the kernel's name for it; "auto" leaves the system's. BBR sends at a
                    measured rate and keeps queues short, where cubic fills them: a token waits behind less.
    nodelay         false lets the kernel wait for an acknowledgement before it sends little (Nagle's algorithm).
    busy_poll       so long a read polls the network device instead of sleeping, at the cost of a processor.
    notsent_lowat   bytes that wait in the kernel to be sent for the first time, above which it takes no more: the rest
                    stays where the tenant's quota sees it. "auto" leaves the system's.
    send_buffer     bytes that the kernel holds for a connection, sent or not, until they are acknowledged. Small: for a
                    client that reads slowly it holds stale tokens, in memory that no quota sees. Not smaller: a segment
                    of loopback has 64 KiB, and a smaller buffer waits for a delayed acknowledgement at each.
    receive_buffer  bytes that the kernel takes from a client before they are read. "auto" begins with about 64 KiB and
                    grows while they are read: a client whose tenant is not known yet does not get further.
    keepalive       after so long a silence a client is asked whether it is there, three times; "0s" never asks.
    user_timeout    a client that has acknowledged nothing for so long, or has taken nothing, is cut off; "0s" leaves it
                    to the kernel, which tries for a quarter of an hour.
    backlog         connections that wait to be accepted.
    """

    congestion: str = "bbr"
    nodelay: bool = True
    busy_poll_us: int = 0
    notsent_lowat_bytes: int = 16 << 10  # 0 is "auto", here and in the next two
    send_buffer_bytes: int = 64 << 10
    receive_buffer_bytes: int = 0
    keepalive_s: int = 30
    user_timeout_ms: int = 60_000
    backlog: int = 4096


def _read_congestion(value: object) -> str:
    if not isinstance(value, str) or not _CONGESTION.fullmatch(value):
        raise ValueError(f'cannot take {units.shown(value)}; write e.g. "bbr", "cubic" or "auto"')
    return value


def _duration(least_s: float, most_s: float, per_s: int) -> Reader:
    """Return a reader of a duration that is zero or between the two, into whole units of which a second has `per_s`."""

    def read(value: object) -> int:
        seconds = units.parse_duration(value)
        if seconds and not least_s <= seconds <= most_s:
            raise ValueError(
                f'cannot take {units.shown(value)}; write "0s" for none, or something from {_shown(least_s)} to'
                f" {_shown(most_s)}"
            )
        return round(seconds * per_s)

    return read


def _shown(seconds: float) -> str:
    return f'"{seconds:g}s"' if seconds >= 1 else f'"{seconds * 1e6:g}us"'


def _buffer(least: int) -> Reader:
    """Return a reader of a size of at least that, or of "auto", as 0."""

    def read(value: object) -> int:
        if value == AUTO:
            return 0
        size = units.parse_size(value)
        if not least <= size <= _BUFFER_MOST:
            raise ValueError(f'cannot take {units.shown(value)}; write "auto", or from "{least >> 10}KiB" to "1GiB"')
        return size

    return read


SCHEMA: Final[Mapping[str, Field]] = {
    "congestion": Field("congestion", _read_congestion),
    "nodelay": Field("nodelay", flag),
    "busy_poll": Field("busy_poll_us", _duration(1e-6, _BUSY_POLL_MOST_S, 1_000_000)),
    "notsent_lowat": Field("notsent_lowat_bytes", _buffer(_LOWAT_LEAST)),
    "send_buffer": Field("send_buffer_bytes", _buffer(_BUFFER_LEAST)),
    "receive_buffer": Field("receive_buffer_bytes", _buffer(_BUFFER_LEAST)),
    "keepalive": Field("keepalive_s", _duration(KEEPALIVE_PROBES, _KEEPALIVE_MOST_S, 1)),
    "user_timeout": Field("user_timeout_ms", _duration(1, _USER_TIMEOUT_MOST_S, 1000)),
    "backlog": Field("backlog", whole(1, 1 << 20)),
}
