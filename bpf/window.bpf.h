/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * How much a TCP sender may have under way when what all its tenant's senders have under way waits in one queue that
 * leaves at the tenant's rate: what leaves in w seconds, with w = (50 ms)^1.5 / sqrt(queue), but two segments at least.
 * n connections with that window make a queue of 50 ms * n^(2/3): 0.23 s for 10, 0.68 s for 50. It stays there, and
 * nothing has to be lost. The exponent is what makes it settle: a window that shrank as fast as the queue grew, or
 * faster, would swing.
 */
#ifndef SEEDANCE_WINDOW_BPF_H
#define SEEDANCE_WINDOW_BPF_H

#include "helpers.bpf.h"

#define NS_PER_US 1000ULL
#define US_PER_S 1000000ULL
#define WINDOW_SCALE 11180340ULL /* 50,000 us to the power of 1.5 */
#define QUEUE_US_MIN 100 /* even without a queue, no window is of more than 1.1 s: one sender alone cannot overrun it */
#define BURST_US 100000	 /* what a sender may have under way beyond what its path holds */

/* Square root, rounded, of a number that is not 0. */
static __always_inline __u64 root(__u64 number)
{
	__u64 guess = 1;

	/* From the power of two above it, Newton's method needs three steps. */
	for (int bits = 0; bits < 32 && guess * guess < number; bits++)
		guess *= 2;
	for (int step = 0; step < 3; step++)
		guess = (guess + number / guess) / 2;
	return guess;
}

static __always_inline __u64 window_bytes(__u64 bytes_per_s, __u64 queue_ns, __u64 segment_bytes)
{
	__u64 window_us = WINDOW_SCALE / root(queue_ns / NS_PER_US + QUEUE_US_MIN);

	return max(window_us * bytes_per_s / US_PER_S, 2 * segment_bytes);
}

/* What fills a path of that round trip, and a burst: a larger window would only let a sender that finds the queue empty
 * fill it at once, and stand still until it has left.
 */
static __always_inline __u64 path_bytes(__u64 bytes_per_s, __u64 round_trip_us, __u64 segment_bytes)
{
	return max((round_trip_us + BURST_US) * bytes_per_s / US_PER_S, 2 * segment_bytes);
}

#endif
