"""Show the times between segments that came on each tenant's TCP connections: mostly acknowledgements of tokens."""

from __future__ import annotations

from typing import Final

from seedance.daemon.trace import _session

TOOL: Final = _session.Tool(
    noun="segments",
    offsets={"socket_mark": ("sock", "sk_mark")},
    text="""
BPF_TABLE("lru_hash", u64, u64, heard, 65536);

RAW_TRACEPOINT_PROBE(tcp_probe)
{
    u64 socket = ctx->args[0], now_ns = bpf_ktime_get_ns(), *last_ns;
    u32 tenant = tenant_of_mark(socket + $socket_mark);

    if (!tenant)
        return 0;
    last_ns = heard.lookup(&socket);
    if (last_ns)
        count(tenant, now_ns - *last_ns);
    heard.update(&socket, &now_ns);
    return 0;
}
""",
)

if __name__ == "__main__":
    _session.main(TOOL, __doc__)
