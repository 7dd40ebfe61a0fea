/* What both load clients need: connecting, sending, the clock, and commands on standard input. */

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

/* Send a few bytes whole, waiting where the socket is full. */
void send_all(int fd, const void *data, size_t bytes);

/* A file whole; the caller frees it. */
uint8_t *read_file(const char *path, size_t *size);

/* Let `epoll_fd` report commands, with COMMANDS as its data. */
void watch_commands(int epoll_fd);

/* Call `obey` for each whole line that has arrived; ends the process at the end of the input. */
void read_commands(void (*obey)(char *line));
