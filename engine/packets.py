"""Control links between the processes of the daemon: one packet a message, with descriptors where a message needs them.

A Unix SOCK_SEQPACKET socket keeps the borders of messages, tells when the other end is gone, and carries descriptors
(SCM_RIGHTS). Facts about the kernel that shape this file:

* A packet longer than the sender's SO_SNDBUF (212,992 bytes by default) is refused with EMSGSIZE, so packets have a
  limit well below it.
* An end of file reads as an empty packet, so an empty packet is never sent.
* What the peer sent before it closed can still be read after a send has failed with EPIPE: only reading ends a link.
  A peer that closes with packets unread makes one read fail with ECONNRESET, before those packets and the end.
* A receiver that is out of descriptors gets the packet without them, marked MSG_CTRUNC: the link has lost something
  that was promised and is closed.
* Descriptors in flight count against the sender's RLIMIT_NOFILE; over it a send fails with ETOOMANYREFS while the
  socket stays writable, so that case waits for a timer.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from seedance.errors import LocalProtocolError, RemoteProtocolError

MAX_PACKET_BYTES: Final = 128 << 10
MAX_DESCRIPTORS: Final = 32
MAX_QUEUE_BYTES: Final = 8 << 20
MAX_QUEUE_DESCRIPTORS: Final = 512

_PACKETS_PER_WAKE_UP: Final = 32
_RETRY_S: Final = 0.01
_INT_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT_BYTES)
_LOST: Final = socket.MSG_TRUNC | socket.MSG_CTRUNC

M = TypeVar("M")


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new link, non-blocking and close-on-exec."""
    kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    return socket.socketpair(socket.AF_UNIX, kind)


class Codec(Generic[M]):
    """Turn the messages of one link into packets and back; `kind` is a union of tagged msgspec structs."""

    __slots__ = ("_decoder", "_encoder")

    def __init__(self, kind: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)

    def encode(self, message: M) -> bytes:
        """Return a message as one packet."""
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> M:
        """Return the message of a packet. Raises RemoteProtocolError on bytes that are none."""
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError as exc:
            raise RemoteProtocolError(f"cannot read a control packet: {exc}", 1002) from exc


class PacketSocket:
    """One end of a link, on any asyncio loop.

    `received(data, fds)` gets each packet and owns its descriptors (close-on-exec). It may raise RemoteProtocolError,
    and must then not have kept any of them: they are closed and the link is broken. `closed()` is called once, when
    the peer has gone or the link broke; not after `close`. The socket belongs to this object.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        received: Callable[[bytes, list[int]], None],
        closed: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = loop
        self._received = received
        self._closed = closed
        self._queue: deque[tuple[bytes, array.array[int]]] = deque()
        self._queue_bytes = 0
        self._queue_descriptors = 0
        self._retry: asyncio.TimerHandle | None = None
        self._open = True
        self.peer_is_gone = False
        """Set when a send finds that the peer is gone: the packet is lost; `closed` follows when the end is read."""
        loop.add_reader(self._fd, self._readable)

    @property
    def is_open(self) -> bool:
        """Whether this end can still send and receive."""
        return self._open

    @property
    def queue_bytes(self) -> int:
        """Bytes accepted by `send` that the kernel has not taken yet."""
        return self._queue_bytes

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one packet, after all that were sent before; never blocks.

        The caller keeps its descriptors and may close them as soon as this returns. Nothing is sent on a closed link,
        silently. A peer that leaves more than MAX_QUEUE_BYTES or MAX_QUEUE_DESCRIPTORS unread loses the link. Raises
        LocalProtocolError on an empty packet, one over MAX_PACKET_BYTES, or more than MAX_DESCRIPTORS.
        """
        if not 0 < len(data) <= MAX_PACKET_BYTES or len(fds) > MAX_DESCRIPTORS:
            raise LocalProtocolError(
                f"cannot send a packet of {len(data)} bytes and {len(fds)} descriptors: "
                f"it needs 1 to {MAX_PACKET_BYTES} bytes and at most {MAX_DESCRIPTORS} descriptors"
            )
        if not self._open:
            return
        rights = array.array("i", fds)
        if not self._queue and self._try_send(data, rights):
            return
        # The kernel has not taken it: our own copies make the caller free to close its descriptors.
        copies = array.array("i", (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0) for fd in fds))
        self._queue.append((data, copies))
        self._queue_bytes += len(data)
        self._queue_descriptors += len(copies)
        if self._queue_bytes > MAX_QUEUE_BYTES or self._queue_descriptors > MAX_QUEUE_DESCRIPTORS:
            # After the gap nothing more may leave; reading finds the end and tells the owner.
            self._drop_queue()
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; what the kernel has not taken yet is dropped. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._fd)
        self._drop_queue()
        self._sock.close()

    def _break(self) -> None:
        if self._open:
            self.close()
            self._closed()

    def _try_send(self, data: bytes, rights: array.array[int]) -> bool:
        """Return whether the packet needs no further care; when it does, a later `_writable` is arranged."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        try:
            self._sock.sendmsg([data], ancillary)
        except BlockingIOError:
            self._loop.add_writer(self._fd, self._writable)
            return False
        except OSError as exc:
            if exc.errno in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                self._loop.remove_writer(self._fd)
                self._retry = self._loop.call_later(_RETRY_S, self._writable)
                return False
            if exc.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                raise
            self.peer_is_gone = True
        return True

    def _writable(self) -> None:
        self._retry = None
        while self._queue:
            data, rights = self._queue[0]
            if not self._try_send(data, rights):
                return
            self._queue.popleft()
            self._queue_bytes -= len(data)
            self._queue_descriptors -= len(rights)
            _close_all(rights)
        self._loop.remove_writer(self._fd)

    def _drop_queue(self) -> None:
        for _, rights in self._queue:
            _close_all(rights)
        self._queue.clear()
        self._queue_bytes = self._queue_descriptors = 0
        self._loop.remove_writer(self._fd)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _readable(self) -> None:
        for _ in range(_PACKETS_PER_WAKE_UP):
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    MAX_PACKET_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:
                continue
            except OSError:
                self._break()
                return
            fds = _descriptors(ancillary)
            if not data or flags & _LOST:
                _close_all(fds)
                self._break()
                return
            try:
                self._received(data, fds)
            except RemoteProtocolError:
                _close_all(fds)
                self._break()
                return
            if not self._open:
                return


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _INT_BYTES])
    return list(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
