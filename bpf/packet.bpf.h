/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Reading a packet's headers, from the network header on: so it is the same for devices without a link header, and for
 * programs that never see one. The kernel has checked nothing yet, so every length is the sender's claim.
 */
#ifndef SEEDANCE_PACKET_BPF_H
#define SEEDANCE_PACKET_BPF_H

#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>

#include "helpers.bpf.h"

#define IPV4_FRAGMENT_OFFSET 0x1FFF
#define IPV6_PREFIX_BYTES 8

struct packet {
	__u8 source[16]; /* as in struct source_prefix */
	__u32 transport; /* offset of the transport header */
	__u32 end; /* of the packet, as IP says */
	__u8 protocol;
	struct tcphdr tcp; /* where protocol says so */
};

enum read {
	READ_OTHER, /* neither IPv4 nor IPv6, or a later fragment, or cut off */
	READ_IP,
	READ_AGAIN, /* the headers are not in the linear part of the skb */
};

static __always_inline int load(struct __sk_buff *skb, __u32 offset, void *to, __u32 size)
{
	return !bpf_skb_load_bytes_relative(skb, offset, to, size, BPF_HDR_START_NET);
}

static __always_inline enum read read_ipv4(struct __sk_buff *skb, struct packet *packet)
{
	struct iphdr ip;

	if (!load(skb, 0, &ip, sizeof(ip)))
		return READ_AGAIN;
	if (ip.ihl < 5 || ip.frag_off & htons(IPV4_FRAGMENT_OFFSET))
		return READ_OTHER;
	packet->source[10] = packet->source[11] = 0xFF;
	__builtin_memcpy(packet->source + 12, &ip.saddr, sizeof(ip.saddr));
	packet->transport = ip.ihl * 4;
	packet->end = ntohs(ip.tot_len);
	packet->protocol = ip.protocol;
	return READ_IP;
}

/* Extension headers are not followed: nothing that means well sends TCP behind one. (BIG TCP's stays in the host.) */
static __always_inline enum read read_ipv6(struct __sk_buff *skb, struct packet *packet)
{
	struct ipv6hdr ip;

	if (!load(skb, 0, &ip, sizeof(ip)))
		return READ_AGAIN;
	__builtin_memcpy(packet->source, &ip.saddr, IPV6_PREFIX_BYTES);
	packet->transport = sizeof(ip);
	packet->end = sizeof(ip) + ntohs(ip.payload_len);
	packet->protocol = ip.nexthdr;
	return READ_IP;
}

/* Fills in the packet, which is zero before. */
static __always_inline enum read read_packet(struct __sk_buff *skb, struct packet *packet)
{
	enum read read;
	__u8 version;

	if (!load(skb, 0, &version, sizeof(version)))
		return READ_AGAIN;
	if (version >> 4 == 4)
		read = read_ipv4(skb, packet);
	else if (version >> 4 == 6)
		read = read_ipv6(skb, packet);
	else
		return READ_OTHER;
	if (read == READ_IP && packet->protocol == IPPROTO_TCP &&
	    !load(skb, packet->transport, &packet->tcp, sizeof(packet->tcp)))
		return READ_AGAIN;
	return read;
}

#endif
