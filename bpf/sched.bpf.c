/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Time on a processor and on a run queue, of the processes in each tenant's cgroup.
 *
 * These programs run at every switch and wake-up of the machine, so what concerns no tenant leaves early: a switch
 * between two tasks of nobody costs one look into the map of cgroups. What runs on each processor is remembered by
 * processor, when a waiting task became runnable by task.
 *
 * The tracepoint of a switch is called with interrupts off, on the processor that switches; so nobody else writes that
 * processor's entry meanwhile. Since Linux 5.18 its arguments are those used here.
 */
#include "abi.h"
#include "cgroup_tenants.bpf.h"
#include "observe.bpf.h"

#define TASK_RUNNING 0
#define MAX_THREADS 16384

struct {
	MAP_UINT(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, struct running_slice);
} running SEC(".maps");

/* thread id -> since when it has been runnable, 0 while it runs. An entry stays, for making and removing it at each
 * switch would be most of the work; the least recently used goes when room is needed. Nothing can be allocated in the
 * scheduler: this kind of map has all its entries from the start.
 */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_LRU_HASH);
	MAP_UINT(max_entries, MAX_THREADS);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, __u64);
} waiting SEC(".maps");

/* User space makes a tenant's entry before its cgroup is in `cgroup_tenants`. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_UINT(max_entries, TENANT_INDEX_MAX);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, struct tenant_cpu);
} tenant_cpu SEC(".maps");

static __always_inline __u32 tenant_of_task(struct task_struct *task)
{
	return tenant_of(task->cgroups->dfl_cgrp->kn->id);
}

static __always_inline void runnable(struct task_struct *task, __u64 now_ns)
{
	__u32 pid = task->pid;
	__u64 *since_ns = bpf_map_lookup_elem(&waiting, &pid);

	if (since_ns)
		*since_ns = now_ns;
	else
		bpf_map_update_elem(&waiting, &pid, &now_ns, BPF_ANY);
}

static __always_inline void woken(struct task_struct *task)
{
	if (tenant_of_task(task))
		runnable(task, bpf_ktime_get_ns());
}

static __always_inline void left_processor(struct running_slice *slice, __u64 now_ns)
{
	struct tenant_cpu *cpu = bpf_map_lookup_elem(&tenant_cpu, &slice->tenant);

	if (cpu)
		add(&cpu->on_cpu_ns, now_ns - slice->since_ns);
}

static __always_inline void took_processor(struct task_struct *task, __u32 tenant, __u64 now_ns)
{
	struct tenant_cpu *cpu = bpf_map_lookup_elem(&tenant_cpu, &tenant);
	__u32 pid = task->pid;
	__u64 *since_ns, waited_ns;

	if (!cpu)
		return;
	add(&cpu->switches, 1);
	since_ns = bpf_map_lookup_elem(&waiting, &pid);
	if (!since_ns || !*since_ns)
		return;
	waited_ns = now_ns - *since_ns;
	*since_ns = 0;
	add(&cpu->waits, 1);
	add(&cpu->run_queue_ns, waited_ns);
	add(&cpu->run_queue_histogram[histogram_slot(waited_ns / 1000)], 1);
}

SEC("tp_btf/sched_switch")
int observe_switch(__u64 *ctx)
{
	__u64 preempted = ctx[0], prev_state = ctx[3];
	struct task_struct *prev = (void *)ctx[1], *next = (void *)ctx[2];
	__u32 tenant = tenant_of_task(next), processor_key = 0;
	struct running_slice *slice = bpf_map_lookup_elem(&running, &processor_key);
	__u64 now_ns;

	if (!slice || (!tenant && !slice->tenant))
		return 0;
	now_ns = bpf_ktime_get_ns();
	if (slice->tenant) {
		left_processor(slice, now_ns);
		if ((preempted & 1) || (__u32)prev_state == TASK_RUNNING)
			runnable(prev, now_ns);
	}
	if (tenant)
		took_processor(next, tenant, now_ns);
	slice->since_ns = now_ns;
	slice->tenant = tenant;
	return 0;
}

SEC("tp_btf/sched_wakeup")
int observe_wakeup(__u64 *ctx)
{
	woken((struct task_struct *)ctx[0]);
	return 0;
}

SEC("tp_btf/sched_wakeup_new")
int observe_wakeup_new(__u64 *ctx)
{
	woken((struct task_struct *)ctx[0]);
	return 0;
}

char _license[] SEC("license") = "GPL";
