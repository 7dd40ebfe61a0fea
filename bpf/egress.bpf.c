// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * Egress limits of tenants. Two programs for every device (clsact egress, direct action), and one for the sockets:
 *
 *  egress_pace    for devices with fq: gives a packet the time at which it is to depart. fq keeps it until then, and
 *                 the socket that sent it waits, because what is in the queue counts against its send buffer.
 *  egress_police  for devices without: drops what is over the rate. A local TCP takes that drop for a full queue, not
 *                 for loss: it keeps the data and tries again later.
 *  egress_window  for the sockets of our cgroup (sock_ops): bounds the congestion window of a tenant that is paced, so
 *                 that many connections do not fill the queue up to its horizon, which TCP by itself would do: nothing
 *                 is lost there that would tell it to stop, and BBR takes the queue for a long path.
 *
 * Under fq, an ingress limit is kept by what goes out, too: see senders.bpf.h.
 */
#include <linux/pkt_cls.h>

#include "pace.bpf.h"
#include "senders.bpf.h"
#include "tenant.bpf.h"
#include "window.bpf.h"

#define SOL_TCP 6
#define WINDOW_UNBOUND 0x7fffffffU

static long (*const bpf_setsockopt)(void *ctx, int level, int name, void *value, int size) = (void *)BPF_FUNC_setsockopt;
static long (*const bpf_sock_ops_cb_flags_set)(struct bpf_sock_ops *ctx,
					       int flags) = (void *)BPF_FUNC_sock_ops_cb_flags_set;

char LICENSE[] SEC("license") = "GPL";

/*
 * A packet that would depart later than so long from now is dropped. What counts is when its turn begins, not when it
 * ends, so every packet passes some time: under a rate at which one segment of 64 KiB takes longer than this, TCP sends
 * one, finds its next ones dropped here, which is no loss to it, and tries again until the first is paid for. The rate
 * holds over that time, and such a tenant waits for long; no rate is too low.
 */
const volatile __u64 egress_horizon_ns = 2 * NS_PER_S;

/* So much may be sent ahead of the rate by egress_police. */
const volatile __u64 egress_burst_ns = NS_PER_S / 2;

static __always_inline __u64 packets_of(const struct __sk_buff *skb)
{
	return skb->gso_segs ? skb->gso_segs : 1;
}

/* Finds the tenant of a packet that no other device of ours has seen yet. */
static __always_inline int claim(struct __sk_buff *skb, struct tenant *tenant)
{
	if (skb->tc_index == ACCOUNTED || !find_tenant(skb->mark, tenant))
		return 0;
	skb->tc_index = ACCOUNTED;
	return 1;
}

static __always_inline int pass(const struct __sk_buff *skb, struct tenant_traffic *traffic)
{
	traffic->egress_bytes += skb->wire_len;
	traffic->egress_packets += packets_of(skb);
	return TC_ACT_UNSPEC; /* filters of others may follow */
}

static __always_inline int drop(const struct __sk_buff *skb, struct tenant_traffic *traffic)
{
	traffic->egress_dropped_packets += packets_of(skb);
	traffic->egress_dropped_bytes += skb->wire_len;
	return TC_ACT_SHOT;
}

/* Returns when the packet's turn is; see pace_take. */
static __always_inline __u64 take(const struct __sk_buff *skb, struct tenant *tenant, __u64 now_ns, __u64 ahead_ns)
{
	__u64 cost_ns = pace_cost_ns(skb->wire_len, tenant->limit->egress_bytes_per_s);

	return pace_take(&tenant->pace->egress_departure_ns, now_ns, cost_ns, ahead_ns);
}

/* Tells the programs on the cgroup whether the tenant is paced. */
static __always_inline void note_pacing(struct tenant *tenant, __u64 is_paced)
{
	if (tenant->pace->is_paced != is_paced)
		tenant->pace->is_paced = is_paced;
}

/* TCP that paces by itself (bbr) has set a time already: the later one holds. */
static __always_inline void delay(struct __sk_buff *skb, __u64 departure_ns)
{
	if (skb->tstamp_type == BPF_SKB_TSTAMP_DELIVERY_MONO && skb->tstamp >= departure_ns)
		return;
	bpf_skb_set_tstamp(skb, departure_ns, BPF_SKB_TSTAMP_DELIVERY_MONO); /* v5.18 */
}

SEC("tc")
int egress_pace(struct __sk_buff *skb)
{
	__u64 now_ns = bpf_ktime_get_ns();
	__u64 departure_ns = now_ns;
	struct tenant tenant;

	if (!claim(skb, &tenant))
		return TC_ACT_UNSPEC;
	note_pacing(&tenant, 1);
	if (tenant.limit->egress_bytes_per_s)
		departure_ns = take(skb, &tenant, now_ns, egress_horizon_ns);
	if (departure_ns == PACE_REFUSED)
		return drop(skb, tenant.traffic);
	/* Not later than the horizon: fq drops what is too far ahead, and without acknowledgements nothing goes on. */
	departure_ns = min(max(departure_ns, pace_senders(skb, &tenant, now_ns)), now_ns + egress_horizon_ns);
	if (departure_ns > now_ns) {
		delay(skb, departure_ns);
		tenant.traffic->egress_delayed_packets += packets_of(skb);
	}
	return pass(skb, tenant.traffic);
}

SEC("tc")
int egress_police(struct __sk_buff *skb)
{
	struct tenant tenant;

	if (!claim(skb, &tenant))
		return TC_ACT_UNSPEC;
	note_pacing(&tenant, 0);
	if (tenant.limit->egress_bytes_per_s && take(skb, &tenant, bpf_ktime_get_ns(), egress_burst_ns) == PACE_REFUSED)
		return drop(skb, tenant.traffic);
	return pass(skb, tenant.traffic);
}

/* The bound also becomes the slow-start threshold: up to it, the window grows at once. */
static __always_inline void bound_window(struct bpf_sock_ops *ctx, const struct tenant_limit *limit,
					 const struct tenant_pace *pace)
{
	struct tcp_sock *tcp = ctx->sk ? bpf_skc_to_tcp_sock(ctx->sk) : 0;
	__u64 queue_ns = pace_ahead_ns(READ_ONCE(pace->egress_departure_ns), bpf_ktime_get_ns());
	__u32 bytes = ctx->mss_cache;
	__u32 segments = WINDOW_UNBOUND;

	if (!tcp || !bytes)
		return;
	if (limit->egress_bytes_per_s && pace->is_paced)
		segments = min(window_bytes(limit->egress_bytes_per_s, queue_ns, bytes) / bytes, (__u64)WINDOW_UNBOUND);
	else if (tcp->snd_cwnd_clamp >= WINDOW_UNBOUND)
		return; /* never bound, or no longer */
	bpf_setsockopt(ctx, SOL_TCP, TCP_BPF_SNDCWND_CLAMP, &segments, sizeof(segments));
}

SEC("sockops")
int egress_window(struct bpf_sock_ops *ctx)
{
	struct tenant tenant;

	/* The mark is set after accept(2), so whose connection it is says each callback anew. */
	if (ctx->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB)
		bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_RTT_CB_FLAG);
	else if (ctx->op == BPF_SOCK_OPS_RTT_CB && ctx->sk && find_tenant(ctx->sk->mark, &tenant))
		bound_window(ctx, tenant.limit, tenant.pace);
	return 1;
}
