#define _GNU_SOURCE
#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

void die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static int connect_unix(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (strlen(path) >= sizeof address.sun_path)
		die("cannot connect to '%s': at most %zu characters", path, sizeof address.sun_path - 1);
	strcpy(address.sun_path, path);
	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
		die("cannot connect to '%s': %s", path, strerror(errno));
	return fd;
}

/* Of "127.0.0.1:PORT", or "127.0.0.1" for port 0. */
static struct sockaddr_in address_of(const char *text)
{
	struct sockaddr_in address = {.sin_family = AF_INET};
	char host[64];
	unsigned port = 0;

	if (sscanf(text, "%63[^:]:%u", host, &port) < 1 || inet_pton(AF_INET, host, &address.sin_addr) != 1)
		die("cannot use '%s': want ADDRESS or ADDRESS:PORT, the address IPv4", text);
	address.sin_port = htons((uint16_t)port);
	return address;
}

static int open_tcp(int flags)
{
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0), one = 1;

	if (fd < 0)
		die("cannot open a socket: %s", strerror(errno));
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	return fd;
}

int connect_tcp(const char *target, int flags)
{
	struct sockaddr_in address = address_of(target);
	int fd = open_tcp(flags);

	if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS)
		die("cannot connect to '%s': %s", target, strerror(errno));
	return fd;
}

int connect_nonblocking(const char *target)
{
	return strncmp(target, "unix:", 5) ? connect_tcp(target, SOCK_NONBLOCK) : connect_unix(target + 5);
}

int listen_at(const char *host)
{
	struct sockaddr_in address = address_of(host);
	socklen_t size = sizeof address;
	int fd = open_tcp(0);

	if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 4096) < 0)
		die("cannot listen at '%s': %s", host, strerror(errno));
	getsockname(fd, (struct sockaddr *)&address, &size);
	printf("listening %u\n", ntohs(address.sin_port));
	fflush(stdout);
	return fd;
}

int accept_from(int listener)
{
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

	if (fd < 0)
		die("cannot accept: %s", strerror(errno));
	return fd;
}

void send_all(int fd, const void *data, size_t bytes)
{
	const char *at = data;

	while (bytes) {
		struct pollfd room = {.fd = fd, .events = POLLOUT};
		ssize_t put = send(fd, at, bytes, MSG_NOSIGNAL);

		if (put > 0) {
			at += put;
			bytes -= (size_t)put;
		} else if (errno == EAGAIN) {
			poll(&room, 1, -1);
		} else if (errno != EINTR) {
			die("cannot send: %s", strerror(errno));
		}
	}
}

uint8_t *read_file(const char *path, size_t *size)
{
	FILE *file = fopen(path, "rb");
	uint8_t *data;
	long bytes;

	if (!file || fseek(file, 0, SEEK_END) || (bytes = ftell(file)) < 0)
		die("cannot open '%s': %s", path, strerror(errno));
	rewind(file);
	data = malloc((size_t)bytes + 1);
	if (!data || fread(data, 1, (size_t)bytes, file) != (size_t)bytes)
		die("cannot read '%s': %s", path, strerror(errno));
	fclose(file);
	*size = (size_t)bytes;
	return data;
}

void watch_commands(int epoll_fd)
{
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = COMMANDS};

	if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, STDIN_FILENO, &event) < 0)
		die("cannot take commands: standard input must be a pipe: %s", strerror(errno));
}

void read_commands(void (*obey)(char *line))
{
	static char pending[16 << 10];
	static size_t used;
	char *end;
	ssize_t got = read(STDIN_FILENO, pending + used, sizeof pending - 1 - used);

	if (got == 0)
		exit(0);
	if (got < 0)
		die("cannot read commands: %s", strerror(errno));
	used += (size_t)got;
	pending[used] = 0;
	while ((end = strchr(pending, '\n'))) {
		*end++ = 0;
		obey(pending);
		used -= (size_t)(end - pending);
		memmove(pending, end, used + 1);
	}
	if (used == sizeof pending - 1)
		die("cannot take a command of more than %zu bytes", sizeof pending - 1);
}
