"""Sockets and event loop on io_uring, with an epoll twin behind the same interface."""
