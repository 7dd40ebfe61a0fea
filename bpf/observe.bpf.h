/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* What several observing programs use: helpers of the kernel, fields of its structs, histograms. */
#ifndef SEEDANCE_OBSERVE_BPF_H
#define SEEDANCE_OBSERVE_BPF_H

#include "helpers.bpf.h"
#include "observe.h"

static __u64 (*const bpf_get_current_cgroup_id)(void) = (void *)BPF_FUNC_get_current_cgroup_id;
static __u64 (*const bpf_get_current_pid_tgid)(void) = (void *)BPF_FUNC_get_current_pid_tgid;
static long (*const bpf_probe_read_kernel)(void *to, __u32 size,
					   const void *from) = (void *)BPF_FUNC_probe_read_kernel;
static void *(*const bpf_sk_storage_get)(void *map, void *sk, void *value,
					 __u64 flags) = (void *)BPF_FUNC_sk_storage_get;
static long (*const bpf_sock_ops_cb_flags_set)(struct bpf_sock_ops *ctx,
					       int flags) = (void *)BPF_FUNC_sock_ops_cb_flags_set;

#ifndef NULL
#define NULL ((void *)0)
#endif

/* Whether the kernel that runs has a field; 2 is BPF_CORE_FIELD_EXISTS in libbpf. */
#define core_field_exists(field) __builtin_preserve_field_info(field, 2)

struct kernfs_node {
	__u64 id;
} CORE;

struct cgroup {
	struct kernfs_node *kn;
} CORE;

struct css_set {
	struct cgroup *dfl_cgrp; /* the one in the cgroup v2 hierarchy */
} CORE;

struct task_struct {
	int pid;
	struct css_set *cgroups;
} CORE;

/* Registers of a probed function; for libbpf, what follows ___ is no part of the name. */
struct pt_regs___x86 {
	unsigned long si;
	unsigned long ax;
} CORE;

struct pt_regs___arm64 {
	__u64 regs[31];
} CORE;

/* On counters that several processors may write at once. */
static __always_inline void add(__u64 *counter, __u64 value)
{
	__atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
}

static __always_inline __u32 histogram_slot(__u64 value_us)
{
	__u32 slot = 63 - __builtin_clzll(value_us | 1);

	/* Where the compiler can tell that no value is too large it leaves the limit out, and the verifier cannot tell. */
	asm volatile("" : "+r"(slot));
	return min(slot, HISTOGRAM_SLOTS - 1);
}

#endif
