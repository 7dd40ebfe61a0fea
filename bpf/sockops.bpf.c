/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Round trips, ACK intervals and retransmits of each tenant's connections.
 *
 * A sock_ops program on the cgroup of the listeners. A connection that a client opened gets two callbacks switched on
 * when it is established: one in each round trip (Linux calls it whenever it updates the RTT estimate for data sent
 * after the last update), and one for each retransmit. Whose connection it is says its mark, which is set only after
 * accept(2): so each callback reads it anew, and nothing is counted before.
 */
#include "abi.h"
#include "observe.bpf.h"

/* After such a time without a segment the connection was at rest, and the time says nothing about the peer. */
const volatile __u64 rest_ns = 10ULL * 1000 * 1000 * 1000;

struct heard {
	__u64 at_ns;
	__u32 segments;
	__u32 pad;
};

struct {
	MAP_UINT(type, BPF_MAP_TYPE_SK_STORAGE);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, __s32);
	MAP_TYPE(value, struct heard);
} socket_heard SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(map_flags, BPF_F_NO_PREALLOC);
	MAP_UINT(max_entries, TENANT_INDEX_MAX);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, struct tenant_network);
} tenant_network SEC(".maps");

/* Too large for the stack. */
static const struct tenant_network nothing_yet;

static __always_inline struct tenant_network *network_of(struct bpf_sock *sk)
{
	struct tenant_network *network;
	__u32 index = sk->mark & ~MARK_MASK;

	if ((sk->mark & MARK_MASK) != MARK_BASE)
		return NULL;
	network = bpf_map_lookup_elem(&tenant_network, &index);
	if (network)
		return network;
	bpf_map_update_elem(&tenant_network, &index, &nothing_yet, BPF_NOEXIST);
	return bpf_map_lookup_elem(&tenant_network, &index);
}

/* Several processors may write here at once. A minimum that is lost to such a race comes again with the next sample. */
static __always_inline void count_rtt(struct tenant_network *network, __u64 rtt_us, __u64 min_rtt_us)
{
	add(&network->rtt_samples, 1);
	add(&network->rtt_sum_us, rtt_us);
	add(&network->rtt_histogram[histogram_slot(rtt_us)], 1);
	if (!network->min_rtt_us || min_rtt_us < network->min_rtt_us)
		network->min_rtt_us = min_rtt_us;
}

/* Of the segments since the last callback only the mean interval is known: it counts once for each of them. */
static __always_inline void count_acks(struct tenant_network *network, struct bpf_sock *sk, __u32 segments)
{
	struct heard *heard = bpf_sk_storage_get(&socket_heard, sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	__u64 now_ns = bpf_ktime_get_ns();
	__u64 passed_ns, interval_us;
	__u32 came;

	if (!heard)
		return;
	passed_ns = now_ns - heard->at_ns;
	came = segments - heard->segments;
	if (heard->at_ns && came && passed_ns < rest_ns) {
		interval_us = passed_ns / 1000 / came;
		add(&network->acks, came);
		add(&network->ack_interval_sum_us, passed_ns / 1000);
		add(&network->ack_interval_histogram[histogram_slot(interval_us)], came);
	}
	heard->at_ns = now_ns;
	heard->segments = segments;
}

static __always_inline void round_trip(struct bpf_sock_ops *ctx)
{
	struct tenant_network *network;
	struct bpf_sock *sk = ctx->sk;

	if (!sk)
		return;
	network = network_of(sk);
	if (!network)
		return;
	/* The kernel keeps the smoothed RTT in eighths of a microsecond. */
	count_rtt(network, ctx->srtt_us >> 3, ctx->rtt_min);
	count_acks(network, sk, ctx->segs_in);
}

static __always_inline void retransmitted(struct bpf_sock_ops *ctx)
{
	struct tenant_network *network;
	struct bpf_sock *sk = ctx->sk;
	__u32 segments = ctx->args[1];
	__u32 error = ctx->args[2];

	if (!sk || error)
		return;
	network = network_of(sk);
	if (network)
		add(&network->retransmits, segments);
}

SEC("sockops")
int observe_connections(struct bpf_sock_ops *ctx)
{
	switch (ctx->op) {
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_RTT_CB_FLAG |
						       BPF_SOCK_OPS_RETRANS_CB_FLAG);
		break;
	case BPF_SOCK_OPS_RTT_CB:
		round_trip(ctx);
		break;
	case BPF_SOCK_OPS_RETRANS_CB:
		retransmitted(ctx);
		break;
	}
	return 1;
}

char _license[] SEC("license") = "GPL";
