// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/* For tests: a filter behind the one under test, which writes down when a packet is to depart. */
#include <linux/pkt_cls.h>

#include "helpers.bpf.h"

char LICENSE[] SEC("license") = "GPL";

struct {
	MAP_UINT(type, BPF_MAP_TYPE_ARRAY);
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, __u64);
} departures SEC(".maps");

SEC("tc")
int departure(struct __sk_buff *skb)
{
	__u32 zero = 0;
	__u64 when_ns = skb->tstamp_type ? skb->tstamp : 0;

	bpf_map_update_elem(&departures, &zero, &when_ns, BPF_ANY);
	return TC_ACT_UNSPEC;
}
