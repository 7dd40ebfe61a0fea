"""Show how long each tenant's threads waited for a processor, or for cpu.max to let them, once they could run."""

from __future__ import annotations

from typing import Final

from seedance.daemon.trace import _session

TOOL: Final = _session.Tool(
    noun="waits",
    maps=("cgroup_tenants",),
    offsets={
        "task_pid": ("task_struct", "pid"),
        "task_cgroups": ("task_struct", "cgroups"),
        "css_set_cgroup": ("css_set", "dfl_cgrp"),
        "cgroup_node": ("cgroup", "kn"),
        "node_id": ("kernfs_node", "id"),
    },
    text="""
BPF_TABLE_PINNED("hash", u64, u32, cgroup_tenants, 65535, "$pins/cgroup_tenants");
BPF_TABLE("lru_hash", u32, u64, waiting, 16384);

static __always_inline u32 tenant_of_task(u64 task)
{
    u64 cgroup = read_pointer(read_pointer(task + $task_cgroups) + $css_set_cgroup);
    u64 id = read_pointer(read_pointer(cgroup + $cgroup_node) + $node_id);
    u32 *index = cgroup_tenants.lookup(&id);

    return index ? *index : 0;
}

static __always_inline void runnable(u64 task)
{
    u32 pid = read_pointer(task + $task_pid);
    u64 now_ns = bpf_ktime_get_ns();

    if (tenant_of_task(task))
        waiting.update(&pid, &now_ns);
}

RAW_TRACEPOINT_PROBE(sched_wakeup)
{
    runnable(ctx->args[0]);
    return 0;
}

RAW_TRACEPOINT_PROBE(sched_wakeup_new)
{
    runnable(ctx->args[0]);
    return 0;
}

/* Arguments since Linux 5.18: preempted, previous task, next task, state of the previous one (0: it could go on). */
RAW_TRACEPOINT_PROBE(sched_switch)
{
    u64 next = ctx->args[2];
    u32 tenant = tenant_of_task(next), pid = read_pointer(next + $task_pid);
    u64 *since_ns;

    if ((ctx->args[0] & 1) || !(u32)ctx->args[3])
        runnable(ctx->args[1]);
    if (!tenant)
        return 0;
    since_ns = waiting.lookup(&pid);
    if (!since_ns)
        return 0;
    count(tenant, bpf_ktime_get_ns() - *since_ns);
    waiting.delete(&pid);
    return 0;
}
""",
)

if __name__ == "__main__":
    _session.main(TOOL, __doc__)
