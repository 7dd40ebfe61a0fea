/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* What the observing programs count, as user space reads it. observe_abi.py mirrors it; a test compares the two by BTF. */
#ifndef SEEDANCE_OBSERVE_H
#define SEEDANCE_OBSERVE_H

#include <linux/types.h>

/* Slot n of a histogram counts values from 2^n up to 2^(n+1), both in microseconds; slot 0 also those below 1, the last
 * one all that are larger (from 36 minutes on).
 */
#define HISTOGRAM_SLOTS 32

/* Of a tenant's TCP connections that clients opened. RTTs are sampled about once in a round trip of each connection. */
struct tenant_network {
	__u64 rtt_samples;
	__u64 rtt_sum_us; /* of smoothed RTTs, as RFC 6298 has them */
	__u64 min_rtt_us; /* the least that any connection had; 0 when there is none yet */
	__u64 acks; /* segments that came while the connection was not at rest */
	__u64 ack_interval_sum_us; /* the time over which these came */
	__u64 retransmits; /* segments sent again */
	__u64 rtt_histogram[HISTOGRAM_SLOTS]; /* of smoothed RTTs */
	__u64 ack_interval_histogram[HISTOGRAM_SLOTS];
};

/* Of the processes in a tenant's cgroup. */
struct tenant_cpu {
	__u64 on_cpu_ns; /* up to the last switch: what runs now is in struct running_slice */
	__u64 run_queue_ns; /* runnable, but waiting for a processor or for cpu.max to let it */
	__u64 switches; /* to one of these processes */
	__u64 waits; /* of which the run-queue time is known */
	__u64 run_queue_histogram[HISTOGRAM_SLOTS];
};

/* What a processor runs now. */
struct running_slice {
	__u64 since_ns; /* CLOCK_MONOTONIC */
	__u32 tenant; /* index; 0: nobody's */
	__u32 pad;
};

/* Calls of the CUDA driver, of a process or of all processes in a tenant's cgroup. */
struct cuda_calls {
	__u64 launches;
	__u64 allocations; /* that succeeded */
	__u64 allocated_bytes; /* by these; what is freed is not taken off */
	__u64 failed_allocations;
};

_Static_assert(sizeof(struct tenant_network) == 560, "layout of tenant_network");
_Static_assert(sizeof(struct tenant_cpu) == 288, "layout of tenant_cpu");
_Static_assert(sizeof(struct running_slice) == 16, "layout of running_slice");
_Static_assert(sizeof(struct cuda_calls) == 32, "layout of cuda_calls");

#endif
