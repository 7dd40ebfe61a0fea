/*
 * Load client of the fan-out comparison: many WebSocket connections, one thread, epoll.
 *
 * It must never be what limits a server, so it does the least that still is honest: every byte is read and every
 * frame header parsed, messages are counted by connection, payloads are skipped. Edge-triggered epoll, because a
 * level-triggered set asks each socket once more after every read; a read shorter than the buffer has emptied the
 * socket, and what arrives later is a new edge.
 *
 * Commands, one a line on standard input; each is answered by one line on standard output:
 *
 *   connect N               open N more connections      connected N elapsed_ns
 *   message TEXT            one masked text message on   sent N
 *                           every connection
 *   expect MESSAGES         count from zero; two lines:  armed, then received … when they have arrived
 *   record STEPS FILE       the same for STEPS messages on each connection, and write the arrival times
 *   batches FILE            load what `feed` and `pace`  loaded COUNT
 *                           write
 *   feed STEPS              write one batch a step, the next one when half of the last has arrived: received …
 *   pace STEPS PERIOD FILE  write one batch every PERIOD ns, and write the arrival times: received …
 *   gaps                    begin to keep the times      watching
 *                           between the messages of
 *                           each connection
 *   gaps FILE               write them and keep no more  gaps COUNT lost
 *   arrivals                begin to keep the times of   watching
 *                           all messages
 *   arrivals FILE           write them and keep no more  arrivals COUNT lost
 *   counters                                             counters …
 *   close                   close all connections        closed N
 *   quit
 *
 * `received` has key=value fields: messages, bytes (on the wire), payload_bytes, reads, segments (TCP data segments:
 * one for each send of the server, unless the kernel merged some), start_ns (first batch written, 0 when the server
 * sets the pace), first_ns, last_ns (arrivals), busy_ns (rounds of the loop that found something), lost (connections that the server closed;
 * the first one ends the run).
 * Times are CLOCK_MONOTONIC. A file of arrival times holds native u64: STEPS start times (0 when unknown), then for
 * each connection STEPS arrival times. One of gaps holds native u32, in µs, one of arrivals
 * native u64, in the order in which they came. A file of batches holds, for each, a native u32 length and the bytes.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "load.h"

#define READ_BYTES (256 << 10)
#define HEAD_BYTES 4096
#define CONNECTING_AT_ONCE 64

/* The key and its answer are the example of RFC 6455, section 1.3. */
#define WS_KEY "dGhlIHNhbXBsZSBub25jZQ=="
#define WS_ACCEPT "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="

enum state { CONNECTING, UPGRADING, OPEN, CLOSED };

struct conn {
	int fd;
	uint8_t state;
	uint8_t header[14];
	uint8_t header_bytes;
	bool ends_message; /* the frame whose payload is under way is the last one of a message */
	uint64_t payload_left;
	uint32_t steps;	   /* messages since the counters were set to zero */
	uint64_t last_ns;  /* of the last message while gaps are kept, 0 before it */
	char *head;	   /* the response so far, while UPGRADING */
	size_t head_bytes;
};

struct counters {
	uint64_t messages, bytes, payload_bytes, reads, segments, first_ns, last_ns, start_ns, busy_ns, lost;
};

struct batch {
	const uint8_t *data;
	uint32_t bytes;
};

static struct {
	const char *target, *path;
	char headers[4096];
	int epoll_fd, feed_fd;
	struct conn *conns;
	size_t conn_count, conn_room;
	size_t wanted, open, connecting;
	uint64_t connect_ns;

	struct counters now;
	uint64_t expected; /* messages; 0 when nothing is awaited */
	uint64_t *times;   /* see the head of this file; NULL when arrival times are not wanted */
	char times_path[512];
	uint64_t steps;
	uint32_t *gaps; /* NULL while none are kept */
	size_t gap_count, gap_room;
	uint64_t *arrivals; /* the same */
	size_t arrival_count, arrival_room;

	uint8_t *batch_bytes;
	struct batch *batches;
	size_t batch_count;
	uint64_t fed, feed_steps;    /* batches begun in this run, and to write */
	const struct batch *writing; /* the batch that the channel has not taken whole yet */
	size_t written;
	uint64_t period_ns, next_ns;
} c;

static uint8_t buffer[READ_BYTES];

static void reply(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	putchar('\n');
	fflush(stdout);
}

/* ---- connections ---------------------------------------------------------------------------------------------- */

static void watch(struct conn *conn, uint32_t events, int how)
{
	struct epoll_event event = {.events = events, .data.u64 = (uint64_t)(conn - c.conns)};

	if (epoll_ctl(c.epoll_fd, how, conn->fd, &event) < 0)
		die("cannot watch a connection: %s", strerror(errno));
}

static void connect_one(struct conn *conn)
{
	conn->fd = connect_nonblocking(c.target);
	conn->state = CONNECTING;
	c.connecting++;
	watch(conn, EPOLLOUT, EPOLL_CTL_ADD);
}

static void connect_more(void)
{
	while (c.conn_count < c.wanted && c.connecting < CONNECTING_AT_ONCE) {
		memset(&c.conns[c.conn_count], 0, sizeof(struct conn));
		connect_one(&c.conns[c.conn_count++]);
	}
}

static void connection_lost(struct conn *conn, const char *how)
{
	if (conn->state != OPEN)
		die("cannot upgrade connection %zd: %s after \"%.*s\"", conn - c.conns, how, (int)conn->head_bytes,
		    conn->head);
	close(conn->fd);
	conn->state = CLOSED;
	c.open--;
	c.now.lost++;
}

static void request_upgrade(struct conn *conn)
{
	char request[8192];
	int error = 0, length;
	socklen_t size = sizeof error;

	getsockopt(conn->fd, SOL_SOCKET, SO_ERROR, &error, &size);
	if (error)
		die("cannot connect to %s: %s", c.target, strerror(error));
	length = snprintf(request, sizeof request,
			  "GET %s HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
			  "Sec-WebSocket-Key: " WS_KEY "\r\nSec-WebSocket-Version: 13\r\n%s\r\n",
			  c.path, c.headers);
	if (length >= (int)sizeof request)
		die("cannot send a request of %d bytes: at most %zu", length, sizeof request);
	send_all(conn->fd, request, (size_t)length);
	conn->state = UPGRADING;
	conn->head = malloc(HEAD_BYTES);
	watch(conn, EPOLLIN | EPOLLRDHUP | EPOLLET, EPOLL_CTL_MOD);
}

/* ---- frames --------------------------------------------------------------------------------------------------- */

static void send_masked(struct conn *conn, uint8_t opcode, const uint8_t *payload, size_t bytes)
{
	uint8_t frame[4096 + 8];
	size_t at = 0;

	if (bytes > 4096)
		die("cannot send a message of %zu bytes: at most 4096", bytes);
	frame[at++] = 0x80 | opcode;
	if (bytes < 126) {
		frame[at++] = 0x80 | (uint8_t)bytes;
	} else {
		frame[at++] = 0x80 | 126;
		frame[at++] = (uint8_t)(bytes >> 8);
		frame[at++] = (uint8_t)bytes;
	}
	/* A masking key of zero is as good as any to a server, and leaves the payload as it is. */
	memset(frame + at, 0, 4);
	memcpy(frame + at + 4, payload, bytes);
	send_all(conn->fd, frame, at + 4 + bytes);
}

static void keep_gap(struct conn *conn, uint64_t now_ns)
{
	if (conn->last_ns) {
		if (c.gap_count == c.gap_room) {
			c.gap_room *= 2;
			c.gaps = realloc(c.gaps, c.gap_room * sizeof *c.gaps);
			if (!c.gaps)
				die("cannot keep %zu gaps", c.gap_room);
		}
		c.gaps[c.gap_count++] = (uint32_t)((now_ns - conn->last_ns) / 1000);
	}
	conn->last_ns = now_ns;
}

static void keep_arrival(uint64_t now_ns)
{
	if (c.arrival_count == c.arrival_room) {
		c.arrival_room *= 2;
		c.arrivals = realloc(c.arrivals, c.arrival_room * sizeof *c.arrivals);
		if (!c.arrivals)
			die("cannot keep %zu arrivals", c.arrival_room);
	}
	c.arrivals[c.arrival_count++] = now_ns;
}

static void message_arrived(struct conn *conn, uint64_t now_ns)
{
	if (c.gaps)
		keep_gap(conn, now_ns);
	if (c.arrivals)
		keep_arrival(now_ns);
	if (c.now.messages++ == 0)
		c.now.first_ns = now_ns;
	c.now.last_ns = now_ns;
	if (c.times && conn->steps < c.steps)
		c.times[c.steps + (uint64_t)(conn - c.conns) * c.steps + conn->steps] = now_ns;
	conn->steps++;
}

/* Bytes of the header that begins with `header`, as far as its first two bytes tell. */
static size_t header_length(const uint8_t *header)
{
	uint8_t length = header[1] & 0x7f;

	return 2 + (length == 126 ? 2 : length == 127 ? 8 : 0);
}

static uint64_t payload_length(const uint8_t *header)
{
	size_t size = header_length(header);
	uint64_t length = 0;

	if (size == 2)
		return header[1] & 0x7f;
	for (size_t i = 2; i < size; i++)
		length = length << 8 | header[i];
	return length;
}

static void frame_began(struct conn *conn, const uint8_t *header, uint64_t now_ns)
{
	uint8_t opcode = header[0] & 0x0f;

	if (header[1] & 0x80 || header[0] & 0x70)
		die("cannot read a frame that begins with %02x%02x", header[0], header[1]);
	conn->payload_left = payload_length(header);
	if (opcode == 9)
		send_masked(conn, 10, (const uint8_t *)"", 0);
	if (opcode < 8)
		c.now.payload_bytes += conn->payload_left;
	conn->ends_message = opcode < 8 && header[0] & 0x80;
	if (conn->ends_message && !conn->payload_left)
		message_arrived(conn, now_ns);
}

static void parse(struct conn *conn, const uint8_t *data, size_t bytes, uint64_t now_ns)
{
	const uint8_t *end = data + bytes;

	c.now.bytes += bytes;
	while (data < end) {
		size_t take;

		if (conn->payload_left) {
			take = (size_t)(end - data);
			if (take > conn->payload_left)
				take = conn->payload_left;
			conn->payload_left -= take;
			data += take;
			if (conn->ends_message && !conn->payload_left)
				message_arrived(conn, now_ns);
			continue;
		}
		if (!conn->header_bytes && end - data >= 2 && (size_t)(end - data) >= header_length(data)) {
			take = header_length(data);
			frame_began(conn, data, now_ns);
			data += take;
			continue;
		}
		/* The header itself is cut: gather it byte by byte. */
		conn->header[conn->header_bytes++] = *data++;
		if (conn->header_bytes >= 2 && conn->header_bytes == header_length(conn->header)) {
			conn->header_bytes = 0;
			frame_began(conn, conn->header, now_ns);
		}
	}
}

static void upgrade_answered(struct conn *conn, const uint8_t *data, size_t bytes)
{
	char *end;
	size_t left;

	if (conn->head_bytes + bytes >= HEAD_BYTES)
		die("cannot take a response head of more than %d bytes", HEAD_BYTES);
	memcpy(conn->head + conn->head_bytes, data, bytes);
	conn->head_bytes += bytes;
	conn->head[conn->head_bytes] = 0;
	end = strstr(conn->head, "\r\n\r\n");
	if (!end)
		return;
	if (strncmp(conn->head, "HTTP/1.1 101", 12) || !strstr(conn->head, WS_ACCEPT))
		die("cannot upgrade connection %zd: the server said \"%.300s\"", conn - c.conns, conn->head);
	left = conn->head_bytes - (size_t)(end + 4 - conn->head);
	conn->state = OPEN;
	c.open++;
	c.connecting--;
	parse(conn, (uint8_t *)end + 4, left, now_ns());
	free(conn->head);
	conn->head = NULL;
	connect_more();
	if (c.open == c.wanted)
		reply("connected %zu %llu", c.open, (unsigned long long)(now_ns() - c.connect_ns));
}

static void readable(struct conn *conn, uint32_t events)
{
	/* An end that came with the last bytes has no edge of its own. */
	bool to_the_end = events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);

	for (;;) {
		ssize_t got = recv(conn->fd, buffer, sizeof buffer, 0);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 && errno == EAGAIN)
			return;
		if (got <= 0) {
			connection_lost(conn, got ? strerror(errno) : "the server closed it");
			return;
		}
		c.now.reads++;
		if (conn->state == UPGRADING)
			upgrade_answered(conn, buffer, (size_t)got);
		else
			parse(conn, buffer, (size_t)got, now_ns());
		if ((size_t)got < sizeof buffer && !to_the_end)
			return;
	}
}

/* ---- runs ----------------------------------------------------------------------------------------------------- */

static uint64_t segments(void)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < c.conn_count; i++) {
		struct tcp_info info;
		socklen_t size = sizeof info;

		if (c.conns[i].state == OPEN && !getsockopt(c.conns[i].fd, IPPROTO_TCP, TCP_INFO, &info, &size))
			sum += info.tcpi_data_segs_in;
	}
	return sum;
}

static void arm(uint64_t steps_or_zero, uint64_t messages, const char *times_path)
{
	c.now = (struct counters){.lost = c.now.lost};
	for (size_t i = 0; i < c.conn_count; i++)
		c.conns[i].steps = 0;
	c.steps = steps_or_zero;
	c.expected = messages;
	if (times_path) {
		snprintf(c.times_path, sizeof c.times_path, "%s", times_path);
		c.times = calloc(c.steps * (c.conn_count + 1), sizeof *c.times);
		if (!c.times)
			die("cannot keep the arrival times of %zu connections", c.conn_count);
	}
	c.now.segments = segments();
}

static void write_times(void)
{
	FILE *file = fopen(c.times_path, "wb");
	size_t count = c.steps * (c.conn_count + 1);

	if (!file || fwrite(c.times, sizeof *c.times, count, file) != count || fclose(file))
		die("cannot write %s: %s", c.times_path, strerror(errno));
	free(c.times);
	c.times = NULL;
}

static void say_counters(const char *word)
{
	reply("%s messages=%llu bytes=%llu payload_bytes=%llu reads=%llu segments=%llu start_ns=%llu first_ns=%llu "
	      "last_ns=%llu busy_ns=%llu lost=%llu",
	      word, (unsigned long long)c.now.messages, (unsigned long long)c.now.bytes,
	      (unsigned long long)c.now.payload_bytes, (unsigned long long)c.now.reads,
	      (unsigned long long)c.now.segments, (unsigned long long)c.now.start_ns,
	      (unsigned long long)c.now.first_ns, (unsigned long long)c.now.last_ns,
	      (unsigned long long)c.now.busy_ns, (unsigned long long)c.now.lost);
}

static void finish_if_complete(void)
{
	if (!c.expected || (c.now.messages < c.expected && !c.now.lost))
		return;
	c.expected = 0;
	c.now.segments = segments() - c.now.segments;
	if (c.times)
		write_times();
	say_counters("received");
}

/* ---- feeding a worker: this process plays the engine's part of the channel ------------------------------------ */

static bool batch_due(void)
{
	if (c.fed >= c.feed_steps)
		return false;
	if (c.period_ns)
		return now_ns() >= c.next_ns;
	/* Half a step outstanding: the worker never starves, and never finds two batches at once. */
	return c.fed * c.conn_count <= c.now.messages + c.conn_count / 2;
}

static void begin_batch(void)
{
	uint64_t now = now_ns();

	if (!c.fed)
		c.now.start_ns = now;
	if (c.times)
		c.times[c.fed] = now;
	c.writing = &c.batches[c.fed++ % c.batch_count];
	c.written = 0;
	c.next_ns += c.period_ns;
}

/* Write as much as is due and as the channel takes; what it does not take waits for the next round of the loop. */
static void feed(void)
{
	while (c.writing || batch_due()) {
		ssize_t put;

		if (!c.writing)
			begin_batch();
		put = send(c.feed_fd, c.writing->data + c.written, c.writing->bytes - c.written,
			   MSG_NOSIGNAL | MSG_DONTWAIT);
		if (put < 0 && errno == EAGAIN)
			return;
		if (put < 0 && errno != EINTR)
			die("cannot write to the channel: %s", strerror(errno));
		c.written += put > 0 ? (size_t)put : 0;
		if (c.written == c.writing->bytes)
			c.writing = NULL;
	}
}

static void start_feeding(uint64_t steps, uint64_t period_ns, const char *times_path)
{
	if (!c.batch_count || c.feed_fd < 0)
		die("cannot feed: give --feed-fd, and load batches first");
	arm(steps, steps * c.conn_count, times_path);
	c.fed = 0;
	c.feed_steps = steps;
	c.period_ns = period_ns;
	c.next_ns = now_ns();
}

static void load_batches(const char *path)
{
	size_t size, at = 0;

	free(c.batch_bytes);
	free(c.batches);
	c.batches = NULL;
	c.batch_count = 0;
	c.batch_bytes = read_file(path, &size);
	while (at + 4 <= size) {
		uint32_t bytes;

		memcpy(&bytes, c.batch_bytes + at, 4);
		at += 4;
		if (!bytes || bytes > size - at)
			die("cannot use %s: a batch of %u bytes at %zu", path, bytes, at);
		c.batches = realloc(c.batches, (c.batch_count + 1) * sizeof *c.batches);
		c.batches[c.batch_count++] = (struct batch){c.batch_bytes + at, bytes};
		at += bytes;
	}
	reply("loaded %zu", c.batch_count);
}

/* ---- commands ------------------------------------------------------------------------------------------------- */

static void open_connections(size_t count)
{
	c.wanted = c.conn_count + count;
	if (c.wanted > c.conn_room)
		die("cannot open %zu connections: start with --room %zu", c.wanted, c.wanted);
	c.connect_ns = now_ns();
	connect_more();
}

static void close_connections(void)
{
	struct linger at_once = {.l_onoff = 1, .l_linger = 0};

	/* A reset leaves no socket in TIME_WAIT, so that many rounds do not use up the ports. */
	for (size_t i = 0; i < c.conn_count; i++) {
		if (c.conns[i].state == CLOSED)
			continue;
		setsockopt(c.conns[i].fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
		close(c.conns[i].fd);
		c.conns[i].state = CLOSED;
	}
	reply("closed %zu", c.open);
	c.conn_count = c.wanted = c.open = 0;
}

static void send_message(const char *text)
{
	size_t sent = 0;

	for (size_t i = 0; i < c.conn_count; i++) {
		if (c.conns[i].state != OPEN)
			continue;
		send_masked(&c.conns[i], 1, (const uint8_t *)text, strlen(text));
		sent++;
	}
	reply("sent %zu", sent);
}

static void begin_gaps(void)
{
	for (size_t i = 0; i < c.conn_count; i++)
		c.conns[i].last_ns = 0;
	c.gap_count = 0;
	c.gap_room = 1 << 16;
	c.gaps = realloc(c.gaps, c.gap_room * sizeof *c.gaps);
	reply("watching");
}

static void write_gaps(const char *path)
{
	FILE *file = fopen(path, "wb");

	if (!file || fwrite(c.gaps, sizeof *c.gaps, c.gap_count, file) != c.gap_count || fclose(file))
		die("cannot write %s: %s", path, strerror(errno));
	free(c.gaps);
	c.gaps = NULL;
	reply("gaps %zu %llu", c.gap_count, (unsigned long long)c.now.lost);
}

static void begin_arrivals(void)
{
	c.arrival_count = 0;
	c.arrival_room = 1 << 16;
	c.arrivals = realloc(c.arrivals, c.arrival_room * sizeof *c.arrivals);
	reply("watching");
}

static void write_arrivals(const char *path)
{
	FILE *file = fopen(path, "wb");

	if (!file || fwrite(c.arrivals, sizeof *c.arrivals, c.arrival_count, file) != c.arrival_count || fclose(file))
		die("cannot write %s: %s", path, strerror(errno));
	free(c.arrivals);
	c.arrivals = NULL;
	reply("arrivals %zu %llu", c.arrival_count, (unsigned long long)c.now.lost);
}

static void obey(char *line)
{
	char path[512];
	unsigned long long a, b;

	if (sscanf(line, "connect %llu", &a) == 1) {
		open_connections(a);
	} else if (!strncmp(line, "message ", 8)) {
		send_message(line + 8);
	} else if (sscanf(line, "expect %llu", &a) == 1) {
		arm(0, a, NULL);
		reply("armed");
	} else if (sscanf(line, "record %llu %511s", &a, path) == 2) {
		arm(a, a * c.conn_count, path);
		reply("armed");
	} else if (sscanf(line, "batches %511s", path) == 1) {
		load_batches(path);
	} else if (sscanf(line, "feed %llu", &a) == 1) {
		start_feeding(a, 0, NULL);
	} else if (sscanf(line, "pace %llu %llu %511s", &a, &b, path) == 3) {
		start_feeding(a, b, path);
	} else if (!strcmp(line, "gaps")) {
		begin_gaps();
	} else if (sscanf(line, "gaps %511s", path) == 1) {
		write_gaps(path);
	} else if (!strcmp(line, "arrivals")) {
		begin_arrivals();
	} else if (sscanf(line, "arrivals %511s", path) == 1) {
		write_arrivals(path);
	} else if (!strcmp(line, "counters")) {
		say_counters("counters");
	} else if (!strcmp(line, "close")) {
		close_connections();
	} else if (!strcmp(line, "quit")) {
		exit(0);
	} else {
		die("cannot obey \"%s\"", line);
	}
}

static void ready(struct conn *conn, uint32_t events)
{
	if (conn->state == CONNECTING)
		request_upgrade(conn);
	else if (conn->state != CLOSED)
		readable(conn, events);
}

static void serve(void)
{
	enum { EVENTS = 512 };
	static struct epoll_event events[EVENTS];

	for (;;) {
		/* During a run this core is ours, and is not let go: waking a sleeping processor costs the sender more than
		 * a send, and the more the slower it sends. */
		struct timespec at_once = {0, 0};
		uint64_t began = c.expected ? now_ns() : 0;
		int count = epoll_pwait2(c.epoll_fd, events, EVENTS, c.expected ? &at_once : NULL, NULL);

		if (count < 0 && errno != EINTR)
			die("cannot wait: %s", strerror(errno));
		for (int i = 0; i < count; i++) {
			if (events[i].data.u64 == COMMANDS)
				read_commands(obey);
			else
				ready(&c.conns[events[i].data.u64], events[i].events);
		}
		feed();
		if (count > 0 && began)
			c.now.busy_ns += now_ns() - began;
		finish_if_complete();
	}
}

static void add_header(const char *line)
{
	size_t used = strlen(c.headers);

	if (used + strlen(line) + 3 > sizeof c.headers)
		die("cannot add header \"%s\": too many", line);
	sprintf(c.headers + used, "%s\r\n", line);
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{"connect", required_argument, 0, 't'}, {"path", required_argument, 0, 'p'},
		{"header", required_argument, 0, 'h'},	{"room", required_argument, 0, 'r'},
		{"feed-fd", required_argument, 0, 'f'}, {0},
	};
	int option;

	c.path = "/";
	c.feed_fd = -1;
	c.conn_room = 10000;
	while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (option) {
		case 't':
			c.target = optarg;
			break;
		case 'p':
			c.path = optarg;
			break;
		case 'h':
			add_header(optarg);
			break;
		case 'r':
			c.conn_room = strtoul(optarg, NULL, 10);
			break;
		case 'f':
			c.feed_fd = atoi(optarg);
			break;
		default:
			die("usage: fanout_client --connect 127.0.0.1:PORT|unix:PATH [--path PATH] [--header LINE]… "
			    "[--room CONNECTIONS] [--feed-fd FD]");
		}
	}
	if (!c.target)
		die("cannot start: --connect is missing");
	c.conns = calloc(c.conn_room, sizeof *c.conns);
	c.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	watch_commands(c.epoll_fd);
	serve();
	return 0;
}
