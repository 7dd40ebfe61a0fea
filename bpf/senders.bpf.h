/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * How senders to a tenant are slowed down to its ingress limit: by what we send them. Dropping what is over the rate
 * would do it too, but over a short path TCP cannot go slower than some packets a round trip: it sends much in vain,
 * and some of many connections starve. Under fq there are two better means:
 *
 *  - What came in over the rate is acknowledged only when it is paid for. To the sender this is a queue in front of a
 *    link of that rate, except that its data has arrived already. Data that goes out waits for none of this.
 *  - The longer that queue, the smaller the window that we offer (see window.bpf.h); and without a queue, no more than
 *    the sender's path holds and a little.
 *
 * Windows may shrink by this, which a sender has to live with (RFC 9293, 3.8.6).
 */
#ifndef SEEDANCE_SENDERS_BPF_H
#define SEEDANCE_SENDERS_BPF_H

#include "pace.bpf.h"
#include "packet.bpf.h"
#include "tenant.bpf.h"
#include "window.bpf.h"

#define LINK_HEADER_BYTES_MAX 64

/* The kernel's. */
struct tcp_sock {
	__u32 rcv_wnd; /* what was offered last: by the packet at hand */
	__u16 advmss;
	__u32 snd_cwnd_clamp;
	__u32 srtt_us; /* in eighths of a microsecond; 0: not known yet */
} CORE;

/* True for a TCP segment that carries nothing but an acknowledgement. */
static __always_inline int is_acknowledgement(const struct packet *packet)
{
	const struct tcphdr *tcp = &packet->tcp;

	return tcp->ack && !tcp->syn && !tcp->fin && !tcp->rst && packet->end == packet->transport + tcp->doff * 4;
}

/* Writes another window into the header, and mends its checksum. */
static __always_inline void write_window(struct __sk_buff *skb, const struct packet *packet, __u16 window)
{
	__u32 network = skb->len - packet->end; /* what we send has no trailer, so all else is the link header */
	__u32 header = network + packet->transport;
	__u16 before = packet->tcp.window;

	if (network > LINK_HEADER_BYTES_MAX)
		return;
	if (bpf_l4_csum_replace(skb, header + __builtin_offsetof(struct tcphdr, check), before, window, sizeof(window)))
		return;
	bpf_skb_store_bytes(skb, header + __builtin_offsetof(struct tcphdr, window), &window, sizeof(window), 0);
}

/* Has the packet offer no larger a window than the queue allows. */
static __always_inline void limit_window(struct __sk_buff *skb, const struct packet *packet, __u64 bytes_per_s,
					 __u64 queue_ns)
{
	struct tcp_sock *tcp = skb->sk ? bpf_skc_to_tcp_sock(skb->sk) : 0;
	__u64 window, offered;

	if (!tcp || packet->tcp.syn || packet->tcp.rst)
		return;
	window = min(window_bytes(bytes_per_s, queue_ns, tcp->advmss),
		     path_bytes(bytes_per_s, tcp->srtt_us >> 3, tcp->advmss));
	offered = tcp->rcv_wnd;
	if (offered > window) /* in the units of the header's field, whatever they are on this connection */
		write_window(skb, packet, htons((__u16)(ntohs(packet->tcp.window) * window / offered)));
}

/* Slows the senders down by this packet. Returns when it may depart, 0 for at once. */
static __always_inline __u64 pace_senders(struct __sk_buff *skb, struct tenant *tenant, __u64 now_ns)
{
	__u64 bytes_per_s = tenant->limit->ingress_bytes_per_s;
	__u64 paid_ns = READ_ONCE(tenant->pace->ingress_arrival_ns);
	struct packet packet = {};

	if (!bytes_per_s)
		return 0;
	if (read_packet(skb, &packet) != READ_IP || packet.protocol != IPPROTO_TCP)
		return 0;
	limit_window(skb, &packet, bytes_per_s, pace_ahead_ns(paid_ns, now_ns));
	return is_acknowledgement(&packet) ? paid_ns : 0;
}

#endif
