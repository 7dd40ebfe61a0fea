/* What load clients and the servers of the bounds share: sockets, sending, the clock, commands on standard input. */

#pragma once

#include <stddef.h>
#include <stdint.h>

/* The epoll data of standard input. */
#define COMMANDS UINT64_MAX

/* Say why on standard error and exit with status 1. */
void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* CLOCK_MONOTONIC, the clock that Python calls time.monotonic_ns. */
uint64_t now_ns(void);

/* A non-blocking socket that is connecting to "127.0.0.1:PORT" or "unix:PATH". */
int connect_nonblocking(const char *target);

/* The same of TCP alone; `flags` are socket()'s, without SOCK_NONBLOCK it waits until it is connected. */
int connect_tcp(const char *target, int flags);

/* Listen at "127.0.0.1" on a port that the kernel chooses, and print "listening PORT". */
int listen_at(const char *host);

/* Accept one connection, with TCP_NODELAY as the listener has it. */
int accept_from(int listener);

/* Send a few bytes whole, waiting where the socket is full. */
void send_all(int fd, const void *data, size_t bytes);

/* A file whole; the caller frees it. */
uint8_t *read_file(const char *path, size_t *size);

/* Let `epoll_fd` report commands, with COMMANDS as its data. */
void watch_commands(int epoll_fd);

/* Call `obey` for each whole line that has arrived; ends the process at the end of the input. */
void read_commands(void (*obey)(char *line));
