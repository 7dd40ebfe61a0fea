/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Calls of the CUDA driver: kernel launches and device memory, by process and by tenant.
 *
 * User space attaches these to the functions of a driver library. They run in the process that calls, so its cgroup says
 * whose it is; what is nobody's, the engine's own calls for example, counts under tenant 0. Memory counts when the call
 * returns and has succeeded: what was asked for is kept by thread in between.
 */
#include "abi.h"
#include "cgroup_tenants.bpf.h"
#include "observe.bpf.h"

#define CUDA_SUCCESS 0
#define MAX_PROCESSES 4096
#define MAX_THREADS 16384

/* thread id -> bytes that it asks for. Least recently used go first: a thread that died in the call leaves its entry. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_LRU_HASH);
	MAP_UINT(max_entries, MAX_THREADS);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, __u64);
} asked_bytes SEC(".maps");

/* process id -> its calls; those of processes that ended go when room is needed. */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_LRU_HASH);
	MAP_UINT(max_entries, MAX_PROCESSES);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, struct cuda_calls);
} process_cuda SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_UINT(max_entries, TENANT_INDEX_MAX);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, struct cuda_calls);
} tenant_cuda SEC(".maps");

static __always_inline struct cuda_calls *calls_in(void *map, __u32 key)
{
	struct cuda_calls none = {}, *calls = bpf_map_lookup_elem(map, &key);

	if (calls)
		return calls;
	bpf_map_update_elem(map, &key, &none, BPF_NOEXIST);
	return bpf_map_lookup_elem(map, &key);
}

static __always_inline __u64 second_argument(void *registers)
{
	struct pt_regs___x86 *x86 = registers;
	struct pt_regs___arm64 *arm64 = registers;
	unsigned long value = 0;

	if (core_field_exists(x86->si))
		bpf_probe_read_kernel(&value, sizeof(value), &x86->si);
	else if (core_field_exists(arm64->regs))
		bpf_probe_read_kernel(&value, sizeof(value), &arm64->regs[1]);
	return value;
}

static __always_inline __u64 returned(void *registers)
{
	struct pt_regs___x86 *x86 = registers;
	struct pt_regs___arm64 *arm64 = registers;
	unsigned long value = 0;

	if (core_field_exists(x86->ax))
		bpf_probe_read_kernel(&value, sizeof(value), &x86->ax);
	else if (core_field_exists(arm64->regs))
		bpf_probe_read_kernel(&value, sizeof(value), &arm64->regs[0]);
	return value;
}

static __always_inline void count_launch(struct cuda_calls *calls)
{
	if (calls)
		add(&calls->launches, 1);
}

static __always_inline void count_allocation(struct cuda_calls *calls, __u64 bytes, __u32 result)
{
	if (!calls)
		return;
	if (result != CUDA_SUCCESS) {
		add(&calls->failed_allocations, 1);
		return;
	}
	add(&calls->allocations, 1);
	add(&calls->allocated_bytes, bytes);
}

SEC("uprobe")
int observe_launch(void *ctx)
{
	count_launch(calls_in(&process_cuda, bpf_get_current_pid_tgid() >> 32));
	count_launch(calls_in(&tenant_cuda, tenant_of(bpf_get_current_cgroup_id())));
	return 0;
}

SEC("uprobe")
int observe_allocation(void *ctx)
{
	__u32 thread = bpf_get_current_pid_tgid();
	__u64 bytes = second_argument(ctx);

	bpf_map_update_elem(&asked_bytes, &thread, &bytes, BPF_ANY);
	return 0;
}

SEC("uretprobe")
int observe_allocated(void *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 thread = id, result = returned(ctx);
	__u64 *asked = bpf_map_lookup_elem(&asked_bytes, &thread);
	__u64 bytes;

	if (!asked)
		return 0;
	bytes = *asked;
	bpf_map_delete_elem(&asked_bytes, &thread);
	count_allocation(calls_in(&process_cuda, id >> 32), bytes, result);
	count_allocation(calls_in(&tenant_cuda, tenant_of(bpf_get_current_cgroup_id())), bytes, result);
	return 0;
}

char _license[] SEC("license") = "GPL";
