/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* The maps of tenants, which the programs for both directions share by pinning them, and how a packet finds its row. */
#ifndef SEEDANCE_TENANT_BPF_H
#define SEEDANCE_TENANT_BPF_H

#include "abi.h"
#include "helpers.bpf.h"

struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_UINT(max_entries, TENANT_INDEX_MAX);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, struct tenant_limit);
} tenant_limits SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_UINT(max_entries, TENANT_INDEX_MAX);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, struct tenant_pace);
} tenant_pace SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_PERCPU_HASH);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_UINT(max_entries, TENANT_INDEX_MAX);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, struct tenant_traffic);
} tenant_traffic SEC(".maps");

/* Types that no program uses are not in the BTF, where the test of abi.py looks for them. */
const volatile enum mark abi_mark = MARK_BASE;

/* A tenant's rows for one packet. */
struct tenant {
	struct tenant_limit *limit;
	struct tenant_pace *pace;
	struct tenant_traffic *traffic;
};

/*
 * Finds the rows of a mark. False for what is not to be touched: a foreign mark, a tenant that user space does not know.
 * User space makes all three rows, the one of limits last: here, making one could fail, and the packet would pass.
 */
static __always_inline int find_tenant(__u32 mark, struct tenant *tenant)
{
	__u32 index = mark & ~MARK_MASK;

	if ((mark & MARK_MASK) != MARK_BASE)
		return 0;
	tenant->limit = bpf_map_lookup_elem(&tenant_limits, &index);
	if (!tenant->limit)
		return 0;
	tenant->pace = bpf_map_lookup_elem(&tenant_pace, &index);
	tenant->traffic = bpf_map_lookup_elem(&tenant_traffic, &index);
	return tenant->pace && tenant->traffic;
}

#endif
