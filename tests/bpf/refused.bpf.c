// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/* For tests: a program that no verifier takes. */
#include "helpers.bpf.h"

char LICENSE[] SEC("license") = "GPL";

SEC("tc")
int never_ends(struct __sk_buff *skb)
{
	for (;;)
		asm volatile("");
	return 0;
}
