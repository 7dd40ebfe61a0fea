// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * New connections a second from one source, an IPv4 address or an IPv6 network of 64 bits: clsact ingress, before the
 * kernel has made a socket or anybody has computed a handshake. Only SYNs to ports that we listen on are looked at, and
 * what does not let itself be looked at: the first fragment of a segment that ends before the flags, or a chain of
 * headers with no end. Without the first fragment, later ones are never put together.
 */
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>

#include "abi.h"
#include "pace.bpf.h"
#include "packet.bpf.h"

char LICENSE[] SEC("license") = "GPL";

/* Time between two connections of a source at its rate; 0 is no limit. */
const volatile __u64 connections_interval_ns;

/* So much time may a source be ahead of its rate: the burst, less the one that always passes, in intervals. */
const volatile __u64 connections_ahead_ns;

struct {
	MAP_UINT(type, BPF_MAP_TYPE_HASH);
	MAP_UINT(max_entries, 1024);
	MAP_TYPE(key, __u16); /* in the host's byte order */
	MAP_TYPE(value, __u8);
} listen_ports SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_LRU_HASH);
	MAP_UINT(max_entries, 65536);
	MAP_TYPE(key, struct source_prefix);
	MAP_TYPE(value, struct source_pace);
} source_connections SEC(".maps");

struct {
	MAP_UINT(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, struct connection_counts);
} connection_counts SEC(".maps");

#define HEADER_BYTES_MAX 256

/* Finds out whether a packet asks for a connection to one of our ports, and from where. */
static __always_inline int is_request(struct __sk_buff *skb, struct packet *packet)
{
	enum read read = read_packet(skb, packet);
	__u16 port;

	/* Some drivers deliver a packet whose headers are still in its pages. */
	if (read == READ_SHORT && !bpf_skb_pull_data(skb, min(skb->len, HEADER_BYTES_MAX)))
		read = read_packet(skb, packet);
	if (read == READ_SHORT)
		return 1;
	if (read != READ_IP || packet->protocol != IPPROTO_TCP || !packet->tcp.syn || packet->tcp.ack)
		return 0;
	port = ntohs(packet->tcp.dest);
	return bpf_map_lookup_elem(&listen_ports, &port) != 0;
}

/* True while the source is within its rate. */
static __always_inline int within_rate(const struct source_prefix *source)
{
	__u64 now_ns = bpf_ktime_get_ns();
	struct source_pace first = {.arrival_ns = now_ns + connections_interval_ns};
	struct source_pace *pace = bpf_map_lookup_elem(&source_connections, source);

	if (!pace) {
		if (!bpf_map_update_elem(&source_connections, source, &first, BPF_NOEXIST))
			return 1;
		pace = bpf_map_lookup_elem(&source_connections, source); /* another processor was faster */
		if (!pace)
			return 1;
	}
	return pace_take(&pace->arrival_ns, now_ns, connections_interval_ns, connections_ahead_ns) != PACE_REFUSED;
}

SEC("tc")
int connections_police(struct __sk_buff *skb)
{
	struct packet packet = {};
	struct source_prefix source;
	struct connection_counts *counts;
	__u32 zero = 0;

	if (skb->protocol != htons(ETH_P_IP) && skb->protocol != htons(ETH_P_IPV6))
		return TC_ACT_UNSPEC;
	if (skb->tc_index == ACCOUNTED || !is_request(skb, &packet))
		return TC_ACT_UNSPEC;
	skb->tc_index = ACCOUNTED;
	counts = bpf_map_lookup_elem(&connection_counts, &zero);
	if (!counts)
		return TC_ACT_UNSPEC;
	__builtin_memcpy(source.address, packet.source, sizeof(source.address));
	if (connections_interval_ns && !within_rate(&source)) {
		counts->dropped_requests++;
		return TC_ACT_SHOT;
	}
	counts->requests++;
	return TC_ACT_UNSPEC; /* filters of others may follow */
}
