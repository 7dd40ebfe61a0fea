/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * What a BPF program needs of its compiler and of the kernel's helpers. The numbers are those of <linux/bpf.h>; writing
 * down the few that are used makes the build need no libbpf headers, so it is the same on every machine.
 */
#ifndef SEEDANCE_HELPERS_BPF_H
#define SEEDANCE_HELPERS_BPF_H

#include <linux/bpf.h>
#include <linux/types.h>

#define SEC(name) __attribute__((section(name), used))

#undef __always_inline /* the one of <linux/stddef.h> is only a wish */
#define __always_inline inline __attribute__((always_inline))

/* A map is described by the types of a struct's members. */
#define MAP_UINT(name, value) int (*name)[value]
#define MAP_TYPE(name, value) value *name

/* Fields of kernel structs: the loader puts in the offsets of the kernel that runs. */
#define CORE __attribute__((preserve_access_index))

#define READ_ONCE(lvalue) (*(volatile typeof(lvalue) *)&(lvalue))

/* Each argument is computed once. */
#define min(a, b)                                                                                                      \
	({                                                                                                             \
		typeof(a) _a = (a);                                                                                    \
		typeof(b) _b = (b);                                                                                    \
		_a < _b ? _a : _b;                                                                                     \
	})
#define max(a, b)                                                                                                      \
	({                                                                                                             \
		typeof(a) _a = (a);                                                                                    \
		typeof(b) _b = (b);                                                                                    \
		_a > _b ? _a : _b;                                                                                     \
	})

#define htons(value) __builtin_bswap16(value)
#define ntohs(value) __builtin_bswap16(value)

static void *(*const bpf_map_lookup_elem)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static long (*const bpf_map_update_elem)(void *map, const void *key, const void *value,
					 __u64 flags) = (void *)BPF_FUNC_map_update_elem;
static long (*const bpf_map_delete_elem)(void *map, const void *key) = (void *)BPF_FUNC_map_delete_elem;
static __u64 (*const bpf_ktime_get_ns)(void) = (void *)BPF_FUNC_ktime_get_ns;
static long (*const bpf_skb_load_bytes)(const void *ctx, __u32 offset, void *to,
					__u32 size) = (void *)BPF_FUNC_skb_load_bytes;
static long (*const bpf_skb_load_bytes_relative)(const void *ctx, __u32 offset, void *to, __u32 size,
						 __u32 start) = (void *)BPF_FUNC_skb_load_bytes_relative;
static long (*const bpf_skb_store_bytes)(struct __sk_buff *ctx, __u32 offset, const void *from, __u32 size,
					 __u64 flags) = (void *)BPF_FUNC_skb_store_bytes;
static long (*const bpf_l4_csum_replace)(struct __sk_buff *ctx, __u32 offset, __u64 from, __u64 to,
					 __u64 flags) = (void *)BPF_FUNC_l4_csum_replace;
static long (*const bpf_skb_pull_data)(struct __sk_buff *ctx, __u32 size) = (void *)BPF_FUNC_skb_pull_data;
static long (*const bpf_skb_set_tstamp)(struct __sk_buff *ctx, __u64 tstamp,
					__u32 type) = (void *)BPF_FUNC_skb_set_tstamp;
static void *(*const bpf_skc_to_tcp_sock)(void *sk) = (void *)BPF_FUNC_skc_to_tcp_sock;
static struct bpf_sock *(*const bpf_sk_fullsock)(struct bpf_sock *sk) = (void *)BPF_FUNC_sk_fullsock;

#endif
