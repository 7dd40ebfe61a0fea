"""What a million idle connections would take, by what was measured of fewer: a part of `docs/performance.md`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from bench.report import rounded

CONNECTIONS: Final = 1_000_000
_ROOM: Final = 1.1
_ADDRESS_PORTS: Final = 64_000
_CONNTRACK_BYTES: Final = 320
"""`struct nf_conn` and its extensions, Linux 6."""

TEXT: Final = """### A million of them, on paper

What one connection takes, times {connections:,}; this was not tried. A worker is one process on one processor: more
tenants divide the pings, and nothing else. `http.ping_interval` twice as long halves them.

| | |
| --- | ---: |
| memory of the workers, GB | {user_gb} |
| memory of the daemon's other processes, GB | {others_gb} |
| memory of the kernel, GB | {kernel_gb} |
| processors busy with pings and pongs | {processors} |
| until all have come, at the rate above, s | {accept_s} |
| client addresses, at {ports:,} ports each | {addresses} |

```sh
# /etc/sysctl.d/60-seedance.conf
fs.nr_open = {files}                     # of one process; with it LimitNOFILE={files} in the unit
fs.file-max = {files}                    # of all; the default is higher on a machine with so much memory
net.core.somaxconn = 65535                   # who waits while the gateway accepts; [listen] asks for no more than this
net.ipv4.tcp_max_syn_backlog = 65535
net.netfilter.nf_conntrack_max = {files}  # where connections are tracked at all: {conntrack_mb} MB more
net.ipv4.tcp_max_tw_buckets = {files}    # they may all leave at once
```

Nothing of it changes what one connection takes: an idle one has no buffers, so `net.ipv4.tcp_rmem` and `tcp_wmem`
bound those that stream. `net.ipv4.tcp_mem` is for these, too; its default goes by the machine's memory.
"""


def on_paper(result: Mapping[str, Any], connections: int = CONNECTIONS) -> str:
    """Return the part of the page in Markdown; "" where a figure is missing."""
    keys = ("user", "others", "kernel")
    figures = [result.get(f"{key}_bytes_per_connection") for key in keys]
    rest, rate = result.get("rest_cpu_us_per_connection_s"), result.get("accepts_per_s")
    if None in (*figures, rest, rate):
        return ""
    gigabytes = {f"{key}_gb": rounded(figure * connections / 1e9) for key, figure in zip(keys, figures, strict=True)}  # type: ignore[operator]
    assert rest is not None
    assert rate is not None
    return TEXT.format(
        connections=connections,
        processors=rounded(rest * connections / 1e6),
        accept_s=math.ceil(connections / rate),
        ports=_ADDRESS_PORTS,
        addresses=math.ceil(connections / _ADDRESS_PORTS),
        files=int(connections * _ROOM),
        conntrack_mb=round(connections * _CONNTRACK_BYTES / 1e6),
        **gigabytes,
    )
