/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The one rule behind every limit here. A rate's state is a single time: when all that was let through will be paid
 * for. Something that costs c starts at the later of that time and now, and moves the time c further. How far the time
 * may be ahead of now is the caller's: the horizon of a packet that is delayed, the burst of one that is not. (This is
 * the generic cell rate algorithm, ITU-T I.371, in its form of virtual scheduling.)
 */
#ifndef SEEDANCE_PACE_BPF_H
#define SEEDANCE_PACE_BPF_H

#include "helpers.bpf.h"

#define NS_PER_S 1000000000ULL
#define PACE_REFUSED (~0ULL)
#define PACE_RETRIES 8

/* A rate of at least a byte per second, and packets of at most 512 KiB (BIG TCP): this does not overflow. */
static __always_inline __u64 pace_cost_ns(__u64 bytes, __u64 bytes_per_s)
{
	return bytes * NS_PER_S / bytes_per_s;
}

/* How far what was let through is ahead of what is paid for. */
static __always_inline __u64 pace_ahead_ns(__u64 paid_ns, __u64 now_ns)
{
	return paid_ns > now_ns ? paid_ns - now_ns : 0;
}

/* Takes cost_ns of the rate behind *paid_ns. Returns when that starts, now at the earliest, or PACE_REFUSED. */
static __always_inline __u64 pace_take(__u64 *paid_ns, __u64 now_ns, __u64 cost_ns, __u64 ahead_ns)
{
	__u64 seen, start;

	for (int i = 0; i < PACE_RETRIES; i++) {
		seen = READ_ONCE(*paid_ns);
		start = max(seen, now_ns);
		if (start - now_ns > ahead_ns)
			return PACE_REFUSED;
		if (__sync_val_compare_and_swap(paid_ns, seen, start + cost_ns) == seen)
			return start;
	}
	/* Other processors were faster each time, so the rate is in use and the time is not behind by much: add to it. */
	seen = __sync_fetch_and_add(paid_ns, cost_ns);
	return max(seen, now_ns);
}

#endif
