"""A connection whose tenant is not known yet: read just far enough to see one request's head.

It is read by plain `recv` calls of bounded size and not through a flow of the driver: nothing of a connection may be
read that does not fit into the packet that hands it over, while a flow takes what comes.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from seedance.daemon.protocol.head import Limits, Request, parse_head
from seedance.errors import RemoteProtocolError


class Host(Protocol):
    """Who decides about a connection once its head is there."""

    def head_received(self, greeting: Greeting, request: Request) -> None:
        """Answer, give away or refuse: `greeting` holds the request in `data`, its head complete."""

    def head_failed(self, greeting: Greeting, error: RemoteProtocolError) -> None:
        """Refuse: what came is no head; `error.code` is the status."""

    def left(self, greeting: Greeting) -> None:
        """Forget it: the peer has gone, and the socket is closed."""


class Greeting:
    """One such connection; owns its socket until `take`.

    `data` is what was read and not yet answered; never more than the limit on a head, unless it came with the
    connection. `returned_by` is the tenant whose worker has handed it back.
    """

    __slots__ = ("_host", "_limits", "_loop", "_scanned", "_sock", "_watched", "data", "deadline_s", "listener", "peer", "returned_by")  # fmt: skip  # noqa: E501

    def __init__(
        self,
        host: Host,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        sock: socket.socket,
        peer: str,
        listener: str,
        data: bytes = b"",
        returned_by: str = "",
    ) -> None:
        self._host = host
        self._loop = loop
        self._limits = limits
        self._sock: socket.socket | None = sock
        self._scanned = 0
        self._watched = False
        self.peer = peer
        self.listener = listener
        self.data = bytearray(data)
        self.deadline_s = 0.0
        self.returned_by = returned_by

    def begin(self) -> None:
        """Look at what came with the connection, then at what the socket has: often the head is already there."""
        if self.data:
            self.proceed()
        else:
            self._readable()

    def proceed(self) -> None:
        """Go on with what has been read: after the start, and after an answer that left the connection open."""
        try:
            request = parse_head(self.data, self._limits, self._scanned)
        except RemoteProtocolError as exc:
            self._watch(False)
            self._host.head_failed(self, exc)
            return
        if request is None:
            self._scanned = len(self.data)
            self._watch(True)
            return
        self._scanned = 0
        self._watch(False)
        self._host.head_received(self, request)

    def answer(self, response: bytes, request: Request) -> None:
        """Answer a request that has no body, and go on with the next one on this connection."""
        assert self._sock is not None
        del self.data[: request.head_bytes]
        try:
            sent = self._sock.send(response, socket.MSG_NOSIGNAL)
        except OSError:
            sent = -1
        if sent != len(response):  # a peer that takes not even this is no loss
            self.close()
        elif self.data:
            # Not at once: a peer that sends many requests in one piece shall not keep the loop to itself.
            self._loop.call_soon(self._proceed_if_open)
        else:
            self._watch(True)

    @property
    def sock(self) -> socket.socket:
        """The socket, which stays this object's."""
        assert self._sock is not None
        return self._sock

    def take(self) -> socket.socket:
        """Give the socket away; nothing of ours waits on it any more."""
        assert self._sock is not None
        self._watch(False)
        sock, self._sock = self._sock, None
        return sock

    def close(self) -> None:
        """Close the connection; its host is told. Idempotent."""
        if self._sock is not None:
            self.take().close()
            self._host.left(self)

    def _proceed_if_open(self) -> None:
        if self._sock is not None:
            self.proceed()

    def _watch(self, wanted: bool) -> None:
        if wanted != self._watched:
            assert self._sock is not None
            self._watched = wanted
            if wanted:
                self._loop.add_reader(self._sock.fileno(), self._readable)
            else:
                self._loop.remove_reader(self._sock.fileno())

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(self._limits.head_bytes - len(self.data))
        except BlockingIOError:
            self._watch(True)
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self.data += data
        self.proceed()
