/*
 * Load client of the front-end comparison for the FM door: many streams at once, in as many sessions as wanted.
 *
 *   fm_client --connect 127.0.0.1:PORT --header LINE --hello FILE --infer FILE [--streams-per-session K]
 *
 * The file of --hello holds a whole HELLO frame. That of --infer holds what an INFER says but for its stream: one byte
 * with the number of entries of its msgpack map, the stream's included, and the encoded entries. Commands on standard
 * input:
 *
 *   round N     begin N streams at once, K in each session, and read until all have ended:
 *               finished streams=… done=… events=… bytes=… start_ns=… first_ns=… end_ns=… cpu_ns=… messages=… sent=…
 *
 * The fields are those of sse_client.c: `done` counts END frames, `events` TOKENS frames, `bytes` what was received.
 * `messages` are the WebSocket messages that brought them, `sent` the bytes that this client sent. Sessions are kept
 * between rounds. Frames are ACKed as our own client does it: 64 of them together, or what the WELCOME allows.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "load.h"

#define MAX_SESSIONS 10000
#define MAX_STREAMS_PER_SESSION 256
#define ACK_FRAMES 64
#define ACK_DELAY_NS 100000000ull
#define TICK_MS 20
#define WINDOW 128
#define FM_HEADER 11

/* The key and its answer are the example of RFC 6455, section 1.3. */
#define WS_KEY "dGhlIHNhbXBsZSBub25jZQ=="
#define WS_ACCEPT "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="

enum state { CLOSED, CONNECTING, UPGRADING, HELLO_SENT, READY };
enum kind { WELCOME = 2, INFER = 3, ACCEPT = 5, TOKENS = 6, END = 7, ERROR = 8, NOTE = 9, ACK = 11, PING = 13, PONG = 14 };

struct session {
	int fd;
	uint8_t state;
	uint32_t next_seq;    /* of our next numbered frame */
	uint32_t last_stream; /* the number of the stream begun last */
	uint32_t seen_seq;    /* the last numbered frame that came */
	uint32_t unacked;
	uint64_t ack_due_ns;
	uint64_t tokens_ack_delay_ns;
	size_t streams; /* wanted in this round */
	uint8_t started[MAX_STREAMS_PER_SESSION];
	uint32_t first_stream; /* of this round */
	uint8_t *data;	       /* received and not parsed yet */
	size_t used, room;
};

static struct {
	const char *target, *header;
	const uint8_t *hello, *infer;
	size_t hello_bytes, infer_bytes, per_session;
	int epoll_fd;
	struct session *sessions;
	size_t running, started, round_streams;
	uint64_t done, events, bytes, messages, sent, start_ns, first_ns, cpu_ns;
} c;

static uint64_t cpu_ns(void)
{
	struct timespec spent;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
	return (uint64_t)spent.tv_sec * 1000000000ull + (uint64_t)spent.tv_nsec;
}

static void watch(struct session *session, uint32_t events, int how)
{
	struct epoll_event event = {.events = events, .data.u64 = (uint64_t)(session - c.sessions)};

	if (epoll_ctl(c.epoll_fd, how, session->fd, &event) < 0)
		die("cannot watch a connection: %s", strerror(errno));
}

/* ---- sending -------------------------------------------------------------------------------------------------- */

static uint8_t *put_u32(uint8_t *at, uint32_t value)
{
	for (int shift = 24; shift >= 0; shift -= 8)
		*at++ = (uint8_t)(value >> shift);
	return at;
}

static void send_frame(struct session *session, uint8_t opcode, const uint8_t *payload, size_t bytes)
{
	uint8_t frame[16384 + 8], *at = frame;

	if (bytes > 16384)
		die("cannot send a message of %zu bytes: at most 16384", bytes);
	*at++ = 0x80 | opcode;
	if (bytes < 126) {
		*at++ = 0x80 | (uint8_t)bytes;
	} else {
		*at++ = 0x80 | 126;
		*at++ = (uint8_t)(bytes >> 8);
		*at++ = (uint8_t)bytes;
	}
	/* A masking key of zero is as good as any to a server, and leaves the payload as it is. */
	memset(at, 0, 4);
	memcpy(at + 4, payload, bytes);
	send_all(session->fd, frame, (size_t)(at + 4 - frame) + bytes);
	c.sent += (size_t)(at + 4 - frame) + bytes;
}

static uint8_t *begin_fm(uint8_t *at, uint32_t seq, uint32_t payload_bytes)
{
	memcpy(at, "FM\1", 3);
	return put_u32(put_u32(at + 3, seq), payload_bytes);
}

static void send_infer(struct session *session)
{
	uint8_t message[16384], *at;
	uint32_t payload = 1 + 1 + 7 + 5 + (uint32_t)c.infer_bytes - 1;

	if (FM_HEADER + payload > sizeof message)
		die("cannot send an INFER of %u bytes", payload);
	at = begin_fm(message, session->next_seq++, payload);
	*at++ = INFER;
	*at++ = 0x80 | c.infer[0];
	memcpy(at, "\xa6stream\xce", 8);
	at = put_u32(at + 8, ++session->last_stream);
	memcpy(at, c.infer + 1, c.infer_bytes - 1);
	send_frame(session, 2, message, FM_HEADER + payload);
}

static void send_ack(struct session *session)
{
	static const uint8_t head[] = {ACK, 0x82, 0xa3, 's', 'e', 'q', 0xce};
	static const uint8_t tail[] = {0xa6, 'c', 'r', 'e', 'd', 'i', 't', 0xcc, WINDOW};
	uint8_t message[64], *at = begin_fm(message, 0, sizeof head + 4 + sizeof tail);

	memcpy(at, head, sizeof head);
	at = put_u32(at + sizeof head, session->seen_seq);
	memcpy(at, tail, sizeof tail);
	send_frame(session, 2, message, (size_t)(at - message) + sizeof tail);
	session->unacked = 0;
}

static void begin_streams(struct session *session)
{
	session->first_stream = session->last_stream + 1;
	memset(session->started, 0, sizeof session->started);
	for (size_t i = 0; i < session->streams; i++)
		send_infer(session);
}

/* ---- what arrives --------------------------------------------------------------------------------------------- */

static uint32_t u32(const uint8_t *at)
{
	return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void tokens_arrived(struct session *session, const uint8_t *body, size_t bytes)
{
	uint32_t stream = 0;

	for (size_t i = 0; i < bytes && i < 5; i++) {
		stream |= (uint32_t)(body[i] & 0x7f) << (7 * i);
		if (!(body[i] & 0x80))
			break;
	}
	c.events++;
	stream -= session->first_stream;
	if (stream >= session->streams)
		die("cannot go on: tokens came for a stream that does not run");
	if (session->started[stream])
		return;
	session->started[stream] = 1;
	if (++c.started == c.round_streams)
		c.first_ns = now_ns();
}

static void stream_ended(void)
{
	c.done++;
	if (--c.running)
		return;
	printf("finished streams=%zu done=%llu events=%llu bytes=%llu start_ns=%llu first_ns=%llu end_ns=%llu "
	       "cpu_ns=%llu messages=%llu sent=%llu\n",
	       c.round_streams, (unsigned long long)c.done, (unsigned long long)c.events, (unsigned long long)c.bytes,
	       (unsigned long long)c.start_ns, (unsigned long long)c.first_ns, (unsigned long long)now_ns(),
	       (unsigned long long)(cpu_ns() - c.cpu_ns), (unsigned long long)c.messages, (unsigned long long)c.sent);
	fflush(stdout);
}

/* How long the ACK of TOKENS may wait, in what a WELCOME says. */
static uint64_t tokens_ack_delay_ns(const uint8_t *payload, size_t bytes)
{
	static const char key[] = "\xac" "ack_delay_ms";
	const uint8_t *at = memmem(payload, bytes, key, sizeof key - 1);

	if (!at || payload + bytes - at < (ptrdiff_t)sizeof key + 2)
		return ACK_DELAY_NS;
	at += sizeof key - 1;
	if (at[0] != 0xcd) /* any other than 256 to 65535 */
		die("cannot read the delay of ACKs in the WELCOME");
	return ((uint64_t)at[1] << 8 | at[2]) * 1000000;
}

static void numbered(struct session *session, uint32_t seq, uint64_t ack_delay_ns)
{
	if (session->seen_seq && seq != session->seen_seq + 1)
		die("cannot go on: frame %u came after %u", seq, session->seen_seq);
	session->seen_seq = seq;
	uint64_t due_ns = now_ns() + ack_delay_ns;

	if (!session->unacked++ || due_ns < session->ack_due_ns)
		session->ack_due_ns = due_ns;
}

static void fm_frame(struct session *session, uint32_t seq, const uint8_t *payload, size_t bytes)
{
	uint8_t pong[FM_HEADER + 32];

	switch (payload[0]) {
	case WELCOME:
		session->state = READY;
		session->tokens_ack_delay_ns = tokens_ack_delay_ns(payload, bytes);
		begin_streams(session);
		return;
	case ERROR:
		die("cannot go on: the server sent the error \"%.*s\"", (int)bytes - 1, (const char *)payload + 1);
	case PING:
		if (bytes > 32)
			die("cannot answer a ping of %zu bytes", bytes);
		memcpy(begin_fm(pong, 0, (uint32_t)bytes), payload, bytes);
		pong[FM_HEADER] = PONG; /* its body is the ping's */
		send_frame(session, 2, pong, FM_HEADER + bytes);
		send_ack(session);
		return;
	case ACK:
	case PONG:
		return;
	}
	numbered(session, seq, payload[0] == TOKENS ? session->tokens_ack_delay_ns : ACK_DELAY_NS);
	if (payload[0] == TOKENS)
		tokens_arrived(session, payload + 1, bytes - 1);
	else if (payload[0] == END)
		stream_ended();
	else if (payload[0] != ACCEPT && payload[0] != NOTE)
		die("cannot read a frame of kind %u", payload[0]);
}

static void message_arrived(struct session *session, const uint8_t *data, size_t bytes)
{
	const uint8_t *end = data + bytes;

	c.messages++;
	while (data < end) {
		size_t payload = (size_t)(end - data) > FM_HEADER ? u32(data + 7) : 0;

		if (!payload || memcmp(data, "FM\1", 3) || payload > (size_t)(end - data) - FM_HEADER)
			die("cannot read a message of %zu bytes: it holds no whole frames", bytes);
		fm_frame(session, u32(data + 3), data + FM_HEADER, payload);
		data += FM_HEADER + payload;
	}
	if (session->unacked >= ACK_FRAMES)
		send_ack(session);
}

/* One WebSocket frame at `data`; returns its length, 0 when it is not there whole. */
static size_t web_socket_frame(struct session *session, const uint8_t *data, size_t bytes)
{
	size_t head = 2, payload;

	if (bytes < 2)
		return 0;
	payload = data[1];
	if (payload == 126)
		head = 4;
	else if (payload == 127)
		head = 10;
	if (bytes < head)
		return 0;
	for (size_t i = 2, value = 0; i < head; i++)
		payload = value = value << 8 | data[i];
	if (bytes < head + payload)
		return 0;
	switch (data[0]) {
	case 0x82:
		message_arrived(session, data + head, payload);
		break;
	case 0x89:
		send_frame(session, 10, data + head, payload);
		break;
	case 0x8a:
		break;
	default:
		die("cannot read a WebSocket frame that begins with %02x: \"%.*s\"", data[0], (int)payload,
		    (const char *)data + head);
	}
	return head + payload;
}

static size_t upgrade_answered(struct session *session)
{
	uint8_t *end = memmem(session->data, session->used, "\r\n\r\n", 4);

	if (!end)
		return 0;
	if (memcmp(session->data, "HTTP/1.1 101", 12) || !memmem(session->data, session->used, WS_ACCEPT, 28))
		die("cannot upgrade: the server said \"%.*s\"", (int)session->used, (const char *)session->data);
	session->state = HELLO_SENT;
	send_frame(session, 2, c.hello, c.hello_bytes);
	return (size_t)(end + 4 - session->data);
}

static void parse(struct session *session)
{
	size_t at = session->state == UPGRADING ? upgrade_answered(session) : 0, taken;

	if (session->state == UPGRADING)
		return;
	while ((taken = web_socket_frame(session, session->data + at, session->used - at)))
		at += taken;
	session->used -= at;
	memmove(session->data, session->data + at, session->used);
}

static void readable(struct session *session)
{
	ssize_t got;

	if (session->room - session->used < 65536) {
		session->room += 65536;
		session->data = realloc(session->data, session->room);
	}
	got = recv(session->fd, session->data + session->used, session->room - session->used, 0);
	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (got <= 0)
		die("cannot go on: the server ended a connection");
	session->used += (size_t)got;
	c.bytes += (size_t)got;
	parse(session);
}

static void connected(struct session *session)
{
	char request[4096];
	int error = 0, length;
	socklen_t size = sizeof error;

	getsockopt(session->fd, SOL_SOCKET, SO_ERROR, &error, &size);
	if (error)
		die("cannot connect to %s: %s", c.target, strerror(error));
	length = snprintf(request, sizeof request,
			  "GET /v2/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
			  "Sec-WebSocket-Key: " WS_KEY "\r\nSec-WebSocket-Version: 13\r\n"
			  "Sec-WebSocket-Protocol: seedance.fm.v1\r\n%s\r\n\r\n",
			  c.header);
	if (length >= (int)sizeof request)
		die("cannot send a request of %d bytes: at most %zu", length, sizeof request);
	send_all(session->fd, request, (size_t)length);
	session->state = UPGRADING;
	watch(session, EPOLLIN, EPOLL_CTL_MOD);
}

/* ---- commands ------------------------------------------------------------------------------------------------- */

static void start_round(size_t streams)
{
	if (!streams || streams > MAX_SESSIONS * c.per_session || c.running)
		die("cannot start a round of %zu streams: 1 to %zu, one round at a time", streams,
		    MAX_SESSIONS * c.per_session);
	c.running = c.round_streams = streams;
	c.done = c.events = c.bytes = c.messages = c.sent = c.first_ns = 0;
	c.started = 0;
	c.start_ns = now_ns();
	c.cpu_ns = cpu_ns();
	for (struct session *session = c.sessions; streams; session++) {
		session->streams = streams < c.per_session ? streams : c.per_session;
		streams -= session->streams;
		if (session->state == READY) {
			begin_streams(session);
			continue;
		}
		session->fd = connect_nonblocking(c.target);
		session->state = CONNECTING;
		session->next_seq = 1;
		watch(session, EPOLLOUT, EPOLL_CTL_ADD);
	}
}

static void obey(char *line)
{
	unsigned long long streams;

	if (sscanf(line, "round %llu", &streams) != 1)
		die("cannot obey \"%s\"", line);
	start_round(streams);
}

static void ack_what_is_due(void)
{
	uint64_t now = now_ns();

	for (struct session *session = c.sessions; session < c.sessions + MAX_SESSIONS && session->state; session++) {
		if (session->unacked && now >= session->ack_due_ns)
			send_ack(session);
	}
}

static void serve(void)
{
	enum { EVENTS = 256 };
	static struct epoll_event events[EVENTS];
	uint64_t ticked_ns = 0;

	for (;;) {
		int count = epoll_wait(c.epoll_fd, events, EVENTS, TICK_MS);

		if (count < 0 && errno != EINTR)
			die("cannot wait: %s", strerror(errno));
		for (int i = 0; i < count; i++) {
			if (events[i].data.u64 == COMMANDS)
				read_commands(obey);
			else if (c.sessions[events[i].data.u64].state == CONNECTING)
				connected(&c.sessions[events[i].data.u64]);
			else
				readable(&c.sessions[events[i].data.u64]);
		}
		if (now_ns() - ticked_ns >= TICK_MS * 1000000ull) {
			ticked_ns = now_ns();
			ack_what_is_due();
		}
	}
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{"connect", required_argument, 0, 't'}, {"header", required_argument, 0, 'h'},
		{"hello", required_argument, 0, 'o'},	{"infer", required_argument, 0, 'i'},
		{"streams-per-session", required_argument, 0, 'k'}, {0}};
	int option;

	c.header = "X-Bench: 1";
	c.per_session = 1;
	while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (option == 't')
			c.target = optarg;
		else if (option == 'h')
			c.header = optarg;
		else if (option == 'o')
			c.hello = read_file(optarg, &c.hello_bytes);
		else if (option == 'i')
			c.infer = read_file(optarg, &c.infer_bytes);
		else if (option == 'k')
			c.per_session = strtoul(optarg, NULL, 10);
		else
			c.target = NULL;
	}
	if (!c.target || !c.hello || !c.infer_bytes || !c.per_session || c.per_session > MAX_STREAMS_PER_SESSION)
		die("usage: fm_client --connect 127.0.0.1:PORT --header LINE --hello FILE --infer FILE "
		    "[--streams-per-session 1-%d]", MAX_STREAMS_PER_SESSION);
	c.sessions = calloc(MAX_SESSIONS, sizeof *c.sessions);
	c.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	watch_commands(c.epoll_fd);
	serve();
	return 0;
}
