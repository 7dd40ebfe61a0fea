/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Reading a packet's headers, from the network header on: so it is the same for devices without a link header, and for
 * programs that never see one. The kernel has checked nothing yet, so every length is the sender's claim.
 *
 * A packet goes through several devices, each with its filters: a VLAN, bridge or bond and the card below. What is
 * counted or limited by one of them is marked as such, so that no other does it again.
 */
#ifndef SEEDANCE_PACKET_BPF_H
#define SEEDANCE_PACKET_BPF_H

#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>

#include "helpers.bpf.h"

#define IPV4_FRAGMENT_OFFSET 0x1FFF
#define IPV6_FRAGMENT_OFFSET 0xFFF8
#define IPV6_PREFIX_BYTES 8
#define IPV6_EXTENSIONS_MAX 6

/* The mark: skb->tc_index stays with a packet from device to device, and nothing else uses it there. */
#define ACCOUNTED 0x5EED

struct packet {
	__u8 source[16]; /* as in struct source_prefix */
	__u32 transport; /* offset of the transport header */
	__u32 end; /* of the packet, as IP says */
	__u8 protocol;
	struct tcphdr tcp; /* where protocol says so */
};

enum read {
	READ_OTHER, /* neither IPv4 nor IPv6, or a later fragment */
	READ_IP,
	READ_SHORT, /* the headers end before they are all read: in the linear part of the skb, or at all */
};

static __always_inline int load(struct __sk_buff *skb, __u32 offset, void *to, __u32 size)
{
	return !bpf_skb_load_bytes_relative(skb, offset, to, size, BPF_HDR_START_NET);
}

static __always_inline enum read read_ipv4(struct __sk_buff *skb, struct packet *packet)
{
	struct iphdr ip;

	if (!load(skb, 0, &ip, sizeof(ip)))
		return READ_SHORT;
	if (ip.ihl < 5 || ip.frag_off & htons(IPV4_FRAGMENT_OFFSET))
		return READ_OTHER;
	packet->source[10] = packet->source[11] = 0xFF;
	__builtin_memcpy(packet->source + 12, &ip.saddr, sizeof(ip.saddr));
	packet->transport = ip.ihl * 4;
	packet->end = ntohs(ip.tot_len);
	packet->protocol = ip.protocol;
	return READ_IP;
}

static __always_inline int is_extension(__u8 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_ROUTING || protocol == IPPROTO_DSTOPTS ||
	       protocol == IPPROTO_FRAGMENT;
}

/* Finds the transport header behind extension headers (RFC 8200, 4): so many of them as nothing that means well has. */
static __always_inline enum read skip_extensions(struct __sk_buff *skb, struct packet *packet)
{
	struct {
		__u8 next;
		__u8 more_bytes_8th;
		__u16 fragment_offset; /* in the fragment header, which has no length */
	} header;

	for (int i = 0; i < IPV6_EXTENSIONS_MAX && is_extension(packet->protocol); i++) {
		if (!load(skb, packet->transport, &header, sizeof(header)))
			return READ_SHORT;
		if (packet->protocol != IPPROTO_FRAGMENT)
			packet->transport += header.more_bytes_8th * 8;
		else if (header.fragment_offset & htons(IPV6_FRAGMENT_OFFSET))
			return READ_OTHER;
		packet->transport += 8;
		packet->protocol = header.next;
	}
	return is_extension(packet->protocol) ? READ_SHORT : READ_IP;
}

static __always_inline enum read read_ipv6(struct __sk_buff *skb, struct packet *packet)
{
	struct ipv6hdr ip;

	if (!load(skb, 0, &ip, sizeof(ip)))
		return READ_SHORT;
	__builtin_memcpy(packet->source, &ip.saddr, IPV6_PREFIX_BYTES);
	packet->transport = sizeof(ip);
	packet->end = sizeof(ip) + ntohs(ip.payload_len);
	packet->protocol = ip.nexthdr;
	return skip_extensions(skb, packet);
}

/* Fills in the packet, which is zero before. */
static __always_inline enum read read_packet(struct __sk_buff *skb, struct packet *packet)
{
	enum read read;
	__u8 version;

	if (!load(skb, 0, &version, sizeof(version)))
		return READ_SHORT;
	if (version >> 4 == 4)
		read = read_ipv4(skb, packet);
	else if (version >> 4 == 6)
		read = read_ipv6(skb, packet);
	else
		return READ_OTHER;
	if (read == READ_IP && packet->protocol == IPPROTO_TCP &&
	    !load(skb, packet->transport, &packet->tcp, sizeof(packet->tcp)))
		return READ_SHORT;
	return read;
}

#endif
