/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
#ifndef SEEDANCE_CGROUP_TENANTS_BPF_H
#define SEEDANCE_CGROUP_TENANTS_BPF_H

#include "abi.h"
#include "helpers.bpf.h"

/* id of a cgroup (the inode number of its folder) -> index of the tenant whose processes are in it. One map for all
 * objects that have it: they share it by its pin.
 */
struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_UINT(max_entries, TENANT_INDEX_MAX);
	MAP_TYPE(key, __u64);
	MAP_TYPE(value, __u32);
} cgroup_tenants SEC(".maps");

/* Return 0 for a cgroup that is no tenant's. */
static __always_inline __u32 tenant_of(__u64 cgroup_id)
{
	__u32 *index = bpf_map_lookup_elem(&cgroup_tenants, &cgroup_id);

	return index ? *index : 0;
}

#endif
