/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * What the programs that keep the limits share with user space: the values of their maps. abi.py mirrors each struct,
 * and tests/bpf/test_abi.py compares the two by BTF. Times are CLOCK_MONOTONIC. Bytes and packets are those on the
 * wire: headers count, and a segmented packet counts as its segments.
 */
#ifndef SEEDANCE_ABI_H
#define SEEDANCE_ABI_H

#include <linux/types.h>

#define ABI_SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), "abi.py has another size of " #type)

/* SO_MARK of a tenant's sockets: MARK_BASE | index. A mark that is not of this form belongs to somebody else. */
enum mark {
	MARK_BASE = 0x5EED0000,
	MARK_MASK = 0xFFFF0000,
};

enum {
	TENANT_INDEX_MAX = 0xFFFF, /* indices begin with 1: 0 is "no tenant" */
	TENANT_NAME_SIZE = 64,
};

/* Map tenant_limits, by index; written by user space. A rate of 0 is no limit. */
struct tenant_limit {
	char name[TENANT_NAME_SIZE]; /* filled up with NULs */
	__u64 egress_bytes_per_s;
	__u64 ingress_bytes_per_s;
};
ABI_SIZE(tenant_limit, 80);

/* Map tenant_pace, by index; written by the programs: when all that was let through is paid for at the rate. */
struct tenant_pace {
	__u64 egress_departure_ns;
	__u64 ingress_arrival_ns;
	__u64 is_paced; /* 1 when the tenant's latest packet went out by egress_pace, which paces senders too */
};
ABI_SIZE(tenant_pace, 24);

/* Map tenant_traffic, by index and processor; written by the programs. What was dropped is not in the other counts. */
struct tenant_traffic {
	__u64 egress_bytes;
	__u64 egress_packets;
	__u64 egress_delayed_packets;
	__u64 egress_dropped_packets;
	__u64 egress_dropped_bytes;
	__u64 ingress_bytes;
	__u64 ingress_packets;
	__u64 ingress_dropped_packets;
	__u64 ingress_dropped_bytes;
};
ABI_SIZE(tenant_traffic, 72);

/* Key of map source_connections: an IPv4 address as ::ffff:a.b.c.d, or an IPv6 network of 64 bits. */
struct source_prefix {
	__u8 address[16];
};
ABI_SIZE(source_prefix, 16);

/* Value of map source_connections; written by the programs: as in tenant_pace. */
struct source_pace {
	__u64 arrival_ns;
};
ABI_SIZE(source_pace, 8);

/* Map connection_counts, one entry, by processor; written by the programs. */
struct connection_counts {
	__u64 requests; /* SYNs to our ports that were let through */
	__u64 dropped_requests;
};
ABI_SIZE(connection_counts, 16);

#endif
