"""Show how long each tenant's packets waited in the queue of a network device: what pacing to a limit costs.

A packet that is split after it was queued, for a device that cannot do it itself, is counted by its first part or not
at all.
"""

from __future__ import annotations

from typing import Final

from seedance.daemon.trace import _session

TOOL: Final = _session.Tool(
    noun="packets",
    offsets={"packet_mark": ("sk_buff", "mark")},
    text="""
BPF_TABLE("lru_hash", u64, u64, queued, 65536);

RAW_TRACEPOINT_PROBE(net_dev_queue)
{
    u64 packet = ctx->args[0], now_ns = bpf_ktime_get_ns();

    if (tenant_of_mark(packet + $packet_mark))
        queued.update(&packet, &now_ns);
    return 0;
}

RAW_TRACEPOINT_PROBE(net_dev_start_xmit)
{
    u64 packet = ctx->args[0], *since_ns;
    u32 tenant = tenant_of_mark(packet + $packet_mark);

    if (!tenant)
        return 0;
    since_ns = queued.lookup(&packet);
    if (!since_ns)
        return 0;
    count(tenant, bpf_ktime_get_ns() - *since_ns);
    queued.delete(&packet);
    return 0;
}
""",
)

if __name__ == "__main__":
    _session.main(TOOL, __doc__)
