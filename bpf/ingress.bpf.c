// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * Ingress limits of tenants: cgroup_skb/ingress on the service's group, where a packet has found its socket. The mark
 * is the socket's: what arrived before the socket got it, the handshake among it, is nobody's and passes uncounted.
 */
#include "pace.bpf.h"
#include "packet.bpf.h"
#include "tenant.bpf.h"

char LICENSE[] SEC("license") = "GPL";

/* So much may arrive ahead of the rate where nothing but dropping slows the senders down. */
const volatile __u64 ingress_burst_ns = NS_PER_S / 2;

/* So much where they are paced (senders.bpf.h): more than the queue that they are allowed, so that none need be lost. */
const volatile __u64 ingress_horizon_ns = 2 * NS_PER_S;

/* There, so much of the rate is kept for later when nothing comes: a pause shorter than this costs no throughput. */
const volatile __u64 ingress_credit_ns = NS_PER_S / 5;

#define PASS 1
#define DROP 0

#define LINK_HEADER_BYTES 14 /* Ethernet's; a program of this kind sees packets from the network header on */
#define UDP_HEADER_BYTES 8

/* Size of the headers of a packet, with which each of its segments came. */
static __always_inline __u32 header_bytes(struct __sk_buff *skb)
{
	struct packet packet = {};

	read_packet(skb, &packet);
	if (packet.protocol == IPPROTO_TCP)
		return LINK_HEADER_BYTES + packet.transport + packet.tcp.doff * 4;
	return LINK_HEADER_BYTES + packet.transport + UDP_HEADER_BYTES;
}

/* What the packet was on the wire: the stack may have merged several into it. */
static __always_inline __u64 wire_bytes(struct __sk_buff *skb, __u64 packets)
{
	__u64 bytes = skb->len + LINK_HEADER_BYTES;

	if (packets > 1)
		bytes += (packets - 1) * header_bytes(skb);
	return bytes;
}

SEC("cgroup_skb/ingress")
int ingress_police(struct __sk_buff *skb)
{
	__u64 packets = skb->gso_segs ? skb->gso_segs : 1;
	struct bpf_sock *sk = skb->sk ? bpf_sk_fullsock(skb->sk) : 0;
	struct tenant tenant;
	__u64 bytes, rate, from_ns, ahead_ns;

	if (!sk || !find_tenant(sk->mark, &tenant))
		return PASS;
	bytes = wire_bytes(skb, packets);
	rate = tenant.limit->ingress_bytes_per_s;
	ahead_ns = tenant.pace->is_paced ? ingress_credit_ns + ingress_horizon_ns : ingress_burst_ns;
	from_ns = bpf_ktime_get_ns() - (tenant.pace->is_paced ? ingress_credit_ns : 0);
	if (rate &&
	    pace_take(&tenant.pace->ingress_arrival_ns, from_ns, pace_cost_ns(bytes, rate), ahead_ns) == PACE_REFUSED) {
		tenant.traffic->ingress_dropped_packets += packets;
		tenant.traffic->ingress_dropped_bytes += bytes;
		return DROP;
	}
	tenant.traffic->ingress_bytes += bytes;
	tenant.traffic->ingress_packets += packets;
	return PASS;
}
