/*
 * Load client of the front-end comparison: many HTTP requests at once whose answers are server-sent events.
 *
 *   sse_client --connect 127.0.0.1:PORT|unix:PATH --request FILE
 *
 * FILE holds one whole HTTP/1.1 request. Commands on standard input:
 *
 *   round N     send the request on each of N connections at once, and read until every answer has ended:
 *               finished streams=… done=… events=… bytes=… start_ns=… first_ns=… end_ns=… cpu_ns=…
 *
 * Connections are kept alive between rounds. `done` counts the answers that ended with "data: [DONE]", `events` the
 * "data:" lines without those, `bytes` what was received, heads and chunk sizes included; `first_ns` is when the last
 * stream had its first event. Times are CLOCK_MONOTONIC. An answer with another status than 200, or that is cut, ends
 * the program with a message. Bodies are chunked or end with the connection.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "load.h"

#define MAX_STREAMS 10000
#define HEAD_BYTES 8192
#define DONE "data: [DONE]"

/* Where the next byte of an answer belongs. */
enum part { CLOSED, CONNECTING, HEAD, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER, UNTIL_EOF, IDLE };

struct stream {
	int fd;
	uint8_t part;
	bool started;	 /* has had an event in this round */
	bool trailing;	 /* the current line of the trailer is not empty */
	uint8_t matched; /* bytes of DONE that the current line begins with; 255: not any more */
	uint64_t chunk_left;
	size_t head_bytes;
	char head[HEAD_BYTES];
};

static struct {
	const char *target;
	const uint8_t *request;
	size_t request_bytes;
	int epoll_fd;
	struct stream *streams;
	size_t running, started, round_streams;
	uint64_t done, events, bytes, start_ns, first_ns, cpu_ns;
} c;

static uint8_t buffer[256 << 10];

static uint64_t cpu_ns(void)
{
	struct timespec spent;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
	return (uint64_t)spent.tv_sec * 1000000000ull + (uint64_t)spent.tv_nsec;
}

static void watch(struct stream *stream, uint32_t events, int how)
{
	struct epoll_event event = {.events = events, .data.u64 = (uint64_t)(stream - c.streams)};

	if (epoll_ctl(c.epoll_fd, how, stream->fd, &event) < 0)
		die("cannot watch a connection: %s", strerror(errno));
}

static void open_stream(struct stream *stream)
{
	stream->fd = connect_nonblocking(c.target);
	stream->part = CONNECTING;
	watch(stream, EPOLLOUT, EPOLL_CTL_ADD);
}

static void send_request(struct stream *stream)
{
	stream->part = HEAD;
	stream->head_bytes = 0;
	stream->started = false;
	send_all(stream->fd, c.request, c.request_bytes);
}

static void connected(struct stream *stream)
{
	int error = 0;
	socklen_t size = sizeof error;

	getsockopt(stream->fd, SOL_SOCKET, SO_ERROR, &error, &size);
	if (error)
		die("cannot connect to %s: %s", c.target, strerror(error));
	watch(stream, EPOLLIN, EPOLL_CTL_MOD);
	send_request(stream);
}

static void answer_ended(struct stream *stream)
{
	stream->part = IDLE;
	if (--c.running)
		return;
	printf("finished streams=%zu done=%llu events=%llu bytes=%llu start_ns=%llu first_ns=%llu end_ns=%llu "
	       "cpu_ns=%llu\n",
	       c.round_streams, (unsigned long long)c.done, (unsigned long long)c.events, (unsigned long long)c.bytes,
	       (unsigned long long)c.start_ns, (unsigned long long)c.first_ns, (unsigned long long)now_ns(),
	       (unsigned long long)(cpu_ns() - c.cpu_ns));
	fflush(stdout);
}

/* ---- answers -------------------------------------------------------------------------------------------------- */

static void event_began(struct stream *stream)
{
	c.events++;
	if (stream->started)
		return;
	stream->started = true;
	if (++c.started == c.round_streams)
		c.first_ns = now_ns();
}

static void read_body(struct stream *stream, const uint8_t *data, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++) {
		if (data[i] == '\n') {
			stream->matched = 0;
		} else if (stream->matched != 255) {
			stream->matched = data[i] == (uint8_t)DONE[stream->matched] ? stream->matched + 1 : 255;
			if (stream->matched == 5)
				event_began(stream);
			if (stream->matched == sizeof DONE - 1) {
				c.done++;
				c.events--;
				stream->matched = 255;
			}
		}
	}
}

static size_t read_head(struct stream *stream, const uint8_t *data, size_t bytes)
{
	size_t before = stream->head_bytes, take = bytes;
	char *end;

	if (take > HEAD_BYTES - 1 - before)
		take = HEAD_BYTES - 1 - before;
	memcpy(stream->head + before, data, take);
	stream->head_bytes += take;
	stream->head[stream->head_bytes] = 0;
	end = strstr(stream->head, "\r\n\r\n");
	if (!end) {
		if (stream->head_bytes == HEAD_BYTES - 1)
			die("cannot take a response head of %d bytes", HEAD_BYTES);
		return take;
	}
	if (strncmp(stream->head, "HTTP/1.1 200", 12))
		die("cannot go on: the server answered \"%.2000s\"", stream->head);
	end += 4;
	take = (size_t)(end - stream->head) - before;
	*end = 0;
	stream->matched = 0;
	stream->part = strcasestr(stream->head, "\r\ntransfer-encoding: chunked") ? CHUNK_SIZE : UNTIL_EOF;
	stream->chunk_left = 0;
	return take;
}

static size_t read_chunk_size(struct stream *stream, const uint8_t *data, size_t bytes)
{
	size_t i;

	for (i = 0; i < bytes && data[i] != '\n'; i++) {
		uint8_t digit = data[i] | 0x20;

		if (digit >= '0' && digit <= '9')
			stream->chunk_left = stream->chunk_left << 4 | (digit - '0');
		else if (digit >= 'a' && digit <= 'f')
			stream->chunk_left = stream->chunk_left << 4 | (digit - 'a' + 10);
		else if (data[i] != '\r')
			die("cannot read a chunk size: byte %02x", data[i]);
	}
	if (i == bytes)
		return i;
	stream->part = stream->chunk_left ? CHUNK : TRAILER;
	stream->trailing = false;
	return i + 1;
}

static size_t read_chunk(struct stream *stream, const uint8_t *data, size_t bytes)
{
	size_t take = bytes < stream->chunk_left ? bytes : stream->chunk_left;

	read_body(stream, data, take);
	stream->chunk_left -= take;
	if (!stream->chunk_left)
		stream->part = CHUNK_END;
	return take;
}

/* One byte of what follows the last chunk: lines, the empty one being the last. */
static void read_trailer(struct stream *stream, uint8_t byte)
{
	if (byte == '\n' && !stream->trailing)
		answer_ended(stream);
	else if (byte != '\r')
		stream->trailing = byte != '\n';
}

static void parse(struct stream *stream, const uint8_t *data, size_t bytes)
{
	size_t at = 0;

	c.bytes += bytes;
	while (at < bytes) {
		switch (stream->part) {
		case HEAD:
			at += read_head(stream, data + at, bytes - at);
			break;
		case CHUNK_SIZE:
			at += read_chunk_size(stream, data + at, bytes - at);
			break;
		case CHUNK:
			at += read_chunk(stream, data + at, bytes - at);
			break;
		case CHUNK_END:
			if (data[at++] == '\n')
				stream->part = CHUNK_SIZE;
			break;
		case TRAILER:
			read_trailer(stream, data[at++]);
			break;
		case UNTIL_EOF:
			read_body(stream, data + at, bytes - at);
			at = bytes;
			break;
		default:
			die("cannot go on: %zu bytes came after the end of an answer", bytes - at);
		}
	}
}

static void connection_ended(struct stream *stream)
{
	uint8_t part = stream->part;

	close(stream->fd);
	stream->part = CLOSED;
	if (part == UNTIL_EOF) {
		answer_ended(stream);
		stream->part = CLOSED;
	} else if (part != IDLE) {
		die("cannot go on: an answer was cut");
	}
}

static void readable(struct stream *stream)
{
	ssize_t got = recv(stream->fd, buffer, sizeof buffer, 0);

	if (got > 0)
		parse(stream, buffer, (size_t)got);
	else if (got == 0 || (errno != EAGAIN && errno != EINTR))
		connection_ended(stream);
}

/* ---- commands ------------------------------------------------------------------------------------------------- */

static void start_round(size_t streams)
{
	if (!streams || streams > MAX_STREAMS || c.running)
		die("cannot start a round of %zu streams: 1 to %d, one round at a time", streams, MAX_STREAMS);
	c.running = c.round_streams = streams;
	c.done = c.events = c.bytes = c.first_ns = 0;
	c.started = 0;
	c.start_ns = now_ns();
	c.cpu_ns = cpu_ns();
	for (size_t i = 0; i < streams; i++) {
		if (c.streams[i].part == IDLE)
			send_request(&c.streams[i]);
		else
			open_stream(&c.streams[i]);
	}
}

static void obey(char *line)
{
	unsigned long long streams;

	if (sscanf(line, "round %llu", &streams) != 1)
		die("cannot obey \"%s\"", line);
	start_round(streams);
}

static void serve(void)
{
	enum { EVENTS = 256 };
	static struct epoll_event events[EVENTS];

	for (;;) {
		int count = epoll_wait(c.epoll_fd, events, EVENTS, -1);

		if (count < 0 && errno != EINTR)
			die("cannot wait: %s", strerror(errno));
		for (int i = 0; i < count; i++) {
			if (events[i].data.u64 == COMMANDS)
				read_commands(obey);
			else if (c.streams[events[i].data.u64].part == CONNECTING)
				connected(&c.streams[events[i].data.u64]);
			else
				readable(&c.streams[events[i].data.u64]);
		}
	}
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{"connect", required_argument, 0, 't'}, {"request", required_argument, 0, 'r'}, {0}};
	int option;

	while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (option == 't')
			c.target = optarg;
		else if (option == 'r')
			c.request = read_file(optarg, &c.request_bytes);
		else
			die("usage: sse_client --connect 127.0.0.1:PORT|unix:PATH --request FILE");
	}
	if (!c.target || !c.request)
		die("usage: sse_client --connect 127.0.0.1:PORT|unix:PATH --request FILE");
	c.streams = calloc(MAX_STREAMS, sizeof *c.streams);
	c.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	watch_commands(c.epoll_fd);
	serve();
	return 0;
}
