/*
 * Options of io_uring under one load each: a server on a ring, and a client on epoll that keeps it busy.
 *
 *   uring_options server ADDRESS LOAD CONNECTIONS BYTES OPTION   listening PORT, then at the end of the load:
 *                                                                served cpu_ns=… bytes=… enters=…
 *   uring_options client ADDRESS:PORT LOAD CONNECTIONS BYTES SECONDS
 *                                                                done operations=… ns=… p50_ns=… p99_ns=…
 *
 * Loads. `fan`: at a byte of the client a message of BYTES goes to each connection, and the next byte comes when all
 * have arrived; an operation is a message. `echo`: each connection asks with BYTES and is answered with as many, one
 * request at a time; an operation is an answer. `take`: the client sends what the connections take, in pieces of
 * BYTES; an operation is a piece.
 *
 * Options. `default`: SINGLE_ISSUER | DEFER_TASKRUN, multishot receives from one buffer ring, sends that post nothing
 * when they are complete. Each other one is that but for one thing: `taskrun` without DEFER_TASKRUN; `coop` with
 * COOP_TASKRUN in its place; `zc` sends by SEND_ZC; `bundle` receives as many buffers at once as there is data for
 * (Linux 6.10); `min-wait` waits for 50 µs more once something has come (Linux 6.12); `busy-poll` has SO_BUSY_POLL on
 * the sockets, `napi` the ring's own busy polling (Linux 6.9). An option that the kernel refuses ends the server with
 * "refused WHY".
 *
 * What is sent is always the same, so no buffer of a SEND_ZC is written to while the kernel may still read it.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <liburing.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "load.h"

#define ENTRIES 1024
#define BUFFERS 1024
#define BUFFER_BYTES 2048
#define MOST_BYTES (64 << 10)
#define MIN_WAIT_US 50
#define BUSY_POLL_US 50
#define WAIT_NS 200000000

/* Linux has these; the headers of older liburing do not. */
#define REGISTER_NAPI 27
#define RECVSEND_BUNDLE (1U << 4)
#define NOTIFICATION (1U << 3)

struct napi {
	uint32_t busy_poll_us;
	uint8_t prefer_busy_poll, pad[3];
	uint64_t reserved;
};

/* struct io_uring_getevents_arg with the field that was padding before 6.12. */
struct wait {
	uint64_t sigmask;
	uint32_t sigmask_size, min_wait_us;
	uint64_t timeout;
};

enum kind { RECEIVE = 1, SEND };

static uint8_t data[MOST_BYTES];
static size_t connections, bytes;
static char load; /* its first letter */

static void refuse(const char *why)
{
	printf("refused %s\n", why);
	exit(0);
}

static uint64_t cpu_ns(void)
{
	struct timespec spent;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
	return (uint64_t)spent.tv_sec * 1000000000ull + (uint64_t)spent.tv_nsec;
}

/* ---- the server ------------------------------------------------------------------------------------------------ */

static struct io_uring ring;
static struct {
	int *fds;
	size_t *owed; /* bytes of a request that have come */
	struct io_uring_buf_ring *buffers;
	uint8_t *memory;
	unsigned tail;
	bool zc, bundle, min_wait;
	uint64_t received, enters;
} s;

static void recycle(unsigned index)
{
	struct io_uring_buf *buffer = &s.buffers->bufs[s.tail++ & (BUFFERS - 1)];

	buffer->addr = (uint64_t)(uintptr_t)(s.memory + (size_t)index * BUFFER_BYTES);
	buffer->len = BUFFER_BYTES;
	buffer->bid = (uint16_t)index;
	__atomic_store_n(&s.buffers->tail, (uint16_t)s.tail, __ATOMIC_RELEASE);
}

static void make_ring(const char *option)
{
	unsigned flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
	struct io_uring_buf_reg registration = {.ring_entries = BUFFERS};
	int error;

	if (!strcmp(option, "taskrun"))
		flags = IORING_SETUP_SINGLE_ISSUER;
	if (!strcmp(option, "coop"))
		flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN;
	if ((error = io_uring_queue_init(ENTRIES, &ring, flags)))
		refuse(strerror(-error));
	s.zc = !strcmp(option, "zc");
	s.bundle = !strcmp(option, "bundle");
	s.min_wait = !strcmp(option, "min-wait");
	if (!strcmp(option, "napi")) {
		struct napi napi = {.busy_poll_us = BUSY_POLL_US};

		if (syscall(__NR_io_uring_register, ring.ring_fd, REGISTER_NAPI, &napi, 1) < 0)
			refuse(strerror(errno));
	}
	s.memory = calloc(BUFFERS, BUFFER_BYTES);
	s.buffers = aligned_alloc(4096, BUFFERS * sizeof(struct io_uring_buf));
	memset(s.buffers, 0, BUFFERS * sizeof(struct io_uring_buf));
	registration.ring_addr = (uint64_t)(uintptr_t)s.buffers;
	if ((error = io_uring_register_buf_ring(&ring, &registration, 0)))
		refuse(strerror(-error));
	for (unsigned i = 0; i < BUFFERS; i++)
		recycle(i);
}

static void accept_all(const char *host, bool busy_poll)
{
	int listener = listen_at(host), busy_us = BUSY_POLL_US;

	for (size_t i = 0; i < connections; i++) {
		s.fds[i] = accept_from(listener);
		if (busy_poll && setsockopt(s.fds[i], SOL_SOCKET, SO_BUSY_POLL, &busy_us, sizeof busy_us) < 0)
			refuse(strerror(errno));
	}
	close(listener);
}

static struct io_uring_sqe *new_sqe(void)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);

	if (!sqe) {
		io_uring_submit(&ring);
		s.enters++;
		sqe = io_uring_get_sqe(&ring);
	}
	return sqe;
}

static void arm(size_t i)
{
	struct io_uring_sqe *sqe = new_sqe();

	io_uring_prep_recv_multishot(sqe, s.fds[i], NULL, 0, 0);
	sqe->flags |= IOSQE_BUFFER_SELECT;
	if (s.bundle)
		sqe->ioprio |= RECVSEND_BUNDLE;
	sqe->user_data = (uint64_t)RECEIVE << 32 | i;
}

static void answer(size_t i)
{
	struct io_uring_sqe *sqe = new_sqe();

	if (s.zc) {
		io_uring_prep_send_zc(sqe, s.fds[i], data, bytes, MSG_NOSIGNAL | MSG_WAITALL, 0);
	} else {
		io_uring_prep_send(sqe, s.fds[i], data, bytes, MSG_NOSIGNAL | MSG_WAITALL | MSG_DONTWAIT);
		sqe->flags |= IOSQE_CQE_SKIP_SUCCESS;
	}
	sqe->user_data = (uint64_t)SEND << 32 | i;
}

static void sent(size_t i, int result, unsigned flags)
{
	size_t done = result > 0 ? (size_t)result : 0;

	if (flags & NOTIFICATION || done == bytes)
		return;
	if (result < 0 && result != -EAGAIN)
		die("cannot send: %s", strerror(-result));
	send_all(s.fds[i], data + done, bytes - done);
}

static void arrived(size_t i, size_t count)
{
	s.received += count;
	if (load == 'f') {
		for (size_t each = 0; each < connections; each++)
			answer(each);
	} else if (load == 'e') {
		for (s.owed[i] += count; s.owed[i] >= bytes; s.owed[i] -= bytes)
			answer(i);
	}
}

/* Returns false at the end of the load. */
static bool received(size_t i, int result, unsigned flags)
{
	if (flags & IORING_CQE_F_BUFFER) {
		unsigned first = flags >> IORING_CQE_BUFFER_SHIFT;

		/* A bundle took buffers as they lie in the ring, and that is always in the order of their numbers. */
		for (int left = result, at = 0; left > 0; left -= BUFFER_BYTES, at++)
			recycle((first + (unsigned)at) & (BUFFERS - 1));
	}
	if (result == 0 || result == -ECONNRESET)
		return false;
	if (result < 0 && result != -ENOBUFS)
		die("cannot receive: %s", strerror(-result));
	if (result > 0)
		arrived(i, (size_t)result);
	if (!(flags & IORING_CQE_F_MORE))
		arm(i);
	return true;
}

static void await(void)
{
	struct __kernel_timespec timeout = {.tv_nsec = WAIT_NS};
	struct wait wait = {.min_wait_us = MIN_WAIT_US, .timeout = (uint64_t)(uintptr_t)&timeout};
	unsigned flags = IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG;
	long done;

	s.enters++;
	if (!s.min_wait) {
		io_uring_submit_and_wait(&ring, 1);
		return;
	}
	io_uring_submit(&ring);
	done = syscall(__NR_io_uring_enter, ring.ring_fd, 0, connections, flags, &wait, sizeof wait);
	if (done < 0 && errno != ETIME && errno != EINTR)
		refuse(strerror(errno));
}

static void serve(const char *host, const char *option)
{
	struct io_uring_cqe *cqe;
	unsigned head;
	bool goes_on = true;
	uint64_t before;

	s.fds = calloc(connections, sizeof *s.fds);
	s.owed = calloc(connections, sizeof *s.owed);
	make_ring(option);
	accept_all(host, !strcmp(option, "busy-poll"));
	for (size_t i = 0; i < connections; i++)
		arm(i);
	before = cpu_ns();
	while (goes_on) {
		unsigned count = 0;

		await();
		io_uring_for_each_cqe(&ring, head, cqe) {
			size_t i = (uint32_t)cqe->user_data;

			count++;
			if (cqe->user_data >> 32 == SEND)
				sent(i, cqe->res, cqe->flags);
			else
				goes_on &= received(i, cqe->res, cqe->flags);
		}
		io_uring_cq_advance(&ring, count);
	}
	printf("served cpu_ns=%llu bytes=%llu enters=%llu\n", (unsigned long long)(cpu_ns() - before),
	       (unsigned long long)s.received, (unsigned long long)s.enters);
}

/* ---- the client ------------------------------------------------------------------------------------------------ */

static struct {
	int epoll_fd, *fds;
	size_t *left; /* bytes of an answer that are to come */
	uint64_t *asked_ns, *times_ns, operations, awaited;
	size_t times, room;
} c;

static void ask(size_t i)
{
	c.asked_ns[i] = now_ns();
	c.left[i] = bytes;
	if (load == 'e')
		send_all(c.fds[i], data, bytes);
}

static void ask_all(void)
{
	c.awaited = connections;
	for (size_t i = 0; i < connections; i++)
		ask(i);
	if (load == 'f')
		send_all(c.fds[0], data, 1);
}

static void answered(size_t i)
{
	if (c.times == c.room) {
		c.room = c.room ? 2 * c.room : 1 << 16;
		c.times_ns = realloc(c.times_ns, c.room * sizeof *c.times_ns);
	}
	c.times_ns[c.times++] = now_ns() - c.asked_ns[i];
	c.operations++;
	if (load == 'e')
		ask(i);
	else if (!--c.awaited)
		ask_all();
}

static void readable(size_t i)
{
	static uint8_t into[MOST_BYTES];
	ssize_t got = recv(c.fds[i], into, c.left[i] < sizeof into ? c.left[i] : sizeof into, MSG_DONTWAIT);

	if (got < 0 && errno == EAGAIN)
		return;
	if (got <= 0)
		die("cannot go on: the server ended a connection");
	c.left[i] -= (size_t)got;
	if (!c.left[i])
		answered(i);
}

static void writable(size_t i)
{
	if (send(c.fds[i], data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN)
		die("cannot send: %s", strerror(errno));
}

static void connect_all(const char *target)
{
	for (size_t i = 0; i < connections; i++) {
		struct epoll_event event = {.events = load == 't' ? EPOLLOUT : EPOLLIN, .data.u64 = i};

		c.fds[i] = connect_tcp(target, 0);
		epoll_ctl(c.epoll_fd, EPOLL_CTL_ADD, c.fds[i], &event);
	}
}

static int by_size(const void *one, const void *other)
{
	uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;

	return (a > b) - (a < b);
}

static void drive(const char *target, double seconds)
{
	struct epoll_event events[256];
	uint64_t begin, end;

	c.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	c.fds = calloc(connections, sizeof *c.fds);
	c.left = calloc(connections, sizeof *c.left);
	c.asked_ns = calloc(connections, sizeof *c.asked_ns);
	connect_all(target);
	begin = now_ns();
	end = begin + (uint64_t)(seconds * 1e9);
	if (load != 't')
		ask_all();
	while (now_ns() < end) {
		int count = epoll_wait(c.epoll_fd, events, 256, 100);

		for (int i = 0; i < count; i++) {
			if (load == 't')
				writable(events[i].data.u64);
			else
				readable(events[i].data.u64);
		}
	}
	end = now_ns();
	qsort(c.times_ns, c.times, sizeof *c.times_ns, by_size);
	printf("done operations=%llu ns=%llu p50_ns=%llu p99_ns=%llu\n", (unsigned long long)c.operations,
	       (unsigned long long)(end - begin), (unsigned long long)(c.times ? c.times_ns[c.times / 2] : 0),
	       (unsigned long long)(c.times ? c.times_ns[c.times * 99 / 100] : 0));
}

int main(int argc, char **argv)
{
	if (argc != 7)
		die("usage: uring_options server|client ADDRESS LOAD CONNECTIONS BYTES OPTION|SECONDS");
	load = argv[3][0];
	connections = strtoul(argv[4], NULL, 10);
	bytes = strtoul(argv[5], NULL, 10);
	if (!strchr("fet", load) || !connections || !bytes || bytes > MOST_BYTES)
		die("cannot run the load '%s' of %zu connections and %zu bytes", argv[3], connections, bytes);
	memset(data, 'x', sizeof data);
	if (!strcmp(argv[1], "server"))
		serve(argv[2], argv[6]);
	else
		drive(argv[2], strtod(argv[6], NULL));
	return 0;
}
