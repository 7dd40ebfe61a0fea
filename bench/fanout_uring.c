/*
 * The bound of the fan-out comparison: what C and liburing reach with the same sends and nothing around them.
 *
 * Every step sends each connection a different binary frame, header and payload copied into a buffer as a server
 * must, in chunks of 256 sends per io_uring_enter. The sends are MSG_WAITALL | MSG_DONTWAIT with
 * IOSQE_CQE_SKIP_SUCCESS: a whole send posts no completion, a partial or refused one does (Linux 6.1), and the rest
 * of such a frame is sent before the next step, so that no stream ever lacks a byte. A step begins with a byte on
 * the socket --steps-fd, which stands for the engine's message; without that socket, as soon as the sends of the last
 * are done. Nothing is received once the connections are upgraded.
 *
 * With --epoll it is a server on epoll instead: each frame is sent by a send() of its own, and what it waits for, the
 * engine or a connection that becomes writable again, by epoll_wait().
 *
 *   fanout_uring --payloads FILE --connections N [--steps-fd FD] [--epoll]
 *                                                     listening PORT, then ready once N connections are upgraded
 *
 * Commands on standard input, each answered by one line:
 *
 *   steps K               stepped START_NS END_NS PARTIAL_SENDS
 *   pace K PERIOD FILE    the same, one step every PERIOD ns; FILE gets the start times as native u64
 *
 * The file of payloads holds, for each, a length byte and the bytes; step s sends connection i payload i + 7919 s.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <liburing.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "load.h"

#define CHUNK 256
#define STRIDE 7919
#define FRAME_ROOM 128
#define USAGE "usage: fanout_uring --payloads FILE --connections N [--steps-fd FD] [--epoll]"

/* The answer to the example key of RFC 6455, section 1.3, the only key that the load client sends. */
static const char upgraded[] = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
			       "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

static struct io_uring ring;
static int *fds;
static size_t connections;
static int steps_fd = -1;
static int with_epoll, epoll_fd;
static const uint8_t **payloads; /* each begins with its length */
static size_t payload_count;
static uint8_t frames[CHUNK][FRAME_ROOM];
static uint64_t partial_sends;

static void load_payloads(const char *path)
{
	size_t size;
	uint8_t *data = read_file(path, &size);

	for (size_t at = 0; at < size; at += 1 + data[at]) {
		if (data[at] > 125 || at + 1 + data[at] > size)
			die("cannot use '%s': a payload of %u bytes at %zu", path, data[at], at);
		payloads = realloc(payloads, (payload_count + 1) * sizeof *payloads);
		payloads[payload_count++] = data + at;
	}
	if (!payload_count)
		die("cannot use '%s': it is empty", path);
}

static void upgrade(int fd)
{
	char head[8192];
	size_t used = 0;

	do {
		ssize_t got = recv(fd, head + used, sizeof head - 1 - used, 0);

		if (got <= 0)
			die("cannot read a request: %s", got ? strerror(errno) : "it is cut");
		used += (size_t)got;
		head[used] = 0;
	} while (!strstr(head, "\r\n\r\n"));
	send_all(fd, upgraded, sizeof upgraded - 1);
}

static void accept_all(void)
{
	int listener = listen_at("127.0.0.1");

	for (size_t i = 0; i < connections; i++) {
		fds[i] = accept_from(listener);
		upgrade(fds[i]);
	}
	close(listener);
	puts("ready");
	fflush(stdout);
}

static void reap(const size_t *lengths)
{
	struct io_uring_cqe *cqe;
	unsigned head, count = 0;

	io_uring_for_each_cqe(&ring, head, cqe) {
		size_t slot = cqe->user_data % CHUNK, i = cqe->user_data;
		size_t sent = cqe->res > 0 ? (size_t)cqe->res : 0;

		if (cqe->res < 0 && cqe->res != -EAGAIN)
			die("cannot send to connection %zu: %s", i, strerror(-cqe->res));
		partial_sends++;
		send_all(fds[i], frames[slot] + sent, lengths[slot] - sent);
		count++;
	}
	io_uring_cq_advance(&ring, count);
}

static size_t make_frame(uint8_t *frame, size_t i, uint64_t number)
{
	const uint8_t *payload = payloads[(i + number * STRIDE) % payload_count];

	frame[0] = 0x82;
	memcpy(frame + 1, payload, 1 + payload[0]);
	return 2 + payload[0];
}

static void epoll_watch(int fd, uint32_t events, uint64_t data)
{
	struct epoll_event event = {.events = events, .data.u64 = data};

	if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0)
		die("cannot watch a descriptor: %s", strerror(errno));
}

/* As a server would: it hears of a connection's input, end, and of room for output, at each change. */
static void epoll_watch_all(void)
{
	epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	for (size_t i = 0; i < connections; i++)
		epoll_watch(fds[i], EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, i);
	if (steps_fd >= 0)
		epoll_watch(steps_fd, EPOLLIN, connections);
}

static void epoll_await_engine(void)
{
	struct epoll_event events[CHUNK];

	for (;;) {
		int count = epoll_wait(epoll_fd, events, CHUNK, -1);

		for (int i = 0; i < count; i++)
			if (events[i].data.u64 == connections)
				return;
	}
}

static void epoll_step(uint64_t number)
{
	for (size_t i = 0; i < connections; i++) {
		size_t length = make_frame(frames[0], i, number);
		ssize_t sent = send(fds[i], frames[0], length, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (sent < 0 && errno != EAGAIN)
			die("cannot send to connection %zu: %s", i, strerror(errno));
		if (sent == (ssize_t)length)
			continue;
		partial_sends++;
		sent = sent > 0 ? sent : 0;
		send_all(fds[i], frames[0] + sent, length - (size_t)sent);
	}
}

static void step(uint64_t number)
{
	size_t lengths[CHUNK];

	for (size_t i = 0; i < connections; i++) {
		size_t slot = i % CHUNK;
		struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);

		lengths[slot] = make_frame(frames[slot], i, number);
		io_uring_prep_send(sqe, fds[i], frames[slot], lengths[slot],
				   MSG_NOSIGNAL | MSG_WAITALL | MSG_DONTWAIT);
		sqe->flags |= IOSQE_CQE_SKIP_SUCCESS;
		sqe->user_data = i;
		if (slot == CHUNK - 1 || i == connections - 1) {
			int done = io_uring_submit_and_get_events(&ring);

			if (done < 0)
				die("cannot submit: %s", strerror(-done));
			reap(lengths);
		}
	}
}

/* A step begins when the load client, in the engine's place, says so. */
static void await_engine(void)
{
	char signal;

	if (with_epoll && steps_fd >= 0)
		epoll_await_engine();
	if (steps_fd >= 0 && read(steps_fd, &signal, 1) != 1)
		die("cannot read the engine's signal: %s", strerror(errno));
}

static void sleep_until(uint64_t at_ns)
{
	struct timespec at = {(time_t)(at_ns / 1000000000), (long)(at_ns % 1000000000)};

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL))
		;
}

static void run(uint64_t steps, uint64_t period_ns, const char *starts_path)
{
	static uint64_t number;
	uint64_t *starts = calloc(steps, sizeof *starts), begin = now_ns();
	FILE *file;

	partial_sends = 0;
	for (uint64_t k = 0; k < steps; k++) {
		if (period_ns)
			sleep_until(begin + k * period_ns);
		else
			await_engine();
		starts[k] = now_ns();
		if (with_epoll)
			epoll_step(number++);
		else
			step(number++);
	}
	if (starts_path) {
		file = fopen(starts_path, "wb");
		if (!file || fwrite(starts, sizeof *starts, steps, file) != steps || fclose(file))
			die("cannot write '%s': %s", starts_path, strerror(errno));
	}
	printf("stepped %llu %llu %llu\n", (unsigned long long)starts[0], (unsigned long long)now_ns(),
	       (unsigned long long)partial_sends);
	fflush(stdout);
	free(starts);
}

static void obey_all(void)
{
	char line[1024], path[512];
	unsigned long long steps, period;

	while (fgets(line, sizeof line, stdin)) {
		if (sscanf(line, "steps %llu", &steps) == 1 && steps)
			run(steps, 0, NULL);
		else if (sscanf(line, "pace %llu %llu %511s", &steps, &period, path) == 3 && steps)
			run(steps, period, path);
		else
			die("cannot obey \"%s\"", line);
	}
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{"payloads", required_argument, 0, 'p'}, {"connections", required_argument, 0, 'c'},
		{"steps-fd", required_argument, 0, 's'}, {"epoll", no_argument, &with_epoll, 1}, {0}};
	int option, error;

	while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (option == 'p')
			load_payloads(optarg);
		else if (option == 'c')
			connections = strtoul(optarg, NULL, 10);
		else if (option == 's')
			steps_fd = atoi(optarg);
		else if (option)
			die(USAGE);
	}
	if (!payload_count || !connections)
		die(USAGE);
	fds = calloc(connections, sizeof *fds);
	error = io_uring_queue_init(2 * CHUNK, &ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
	if (error)
		die("cannot set up io_uring: %s", strerror(-error));
	accept_all();
	if (with_epoll)
		epoll_watch_all();
	obey_all();
	return 0;
}
