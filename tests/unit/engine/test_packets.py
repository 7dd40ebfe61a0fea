"""Control links: order, descriptors, queueing, and every way in which a link ends."""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest

from seedance.engine.packets import (
    MAX_DESCRIPTORS,
    MAX_PACKET_BYTES,
    MAX_QUEUE_BYTES,
    MAX_QUEUE_DESCRIPTORS,
    Codec,
    PacketSocket,
    pair,
)
from seedance.errors import LocalProtocolError, RemoteProtocolError


class End:
    """A link's end that keeps what it receives."""

    def __init__(self, sock: socket.socket, *, refuses: bool = False) -> None:
        self.packets: list[tuple[bytes, list[int]]] = []
        self.closed = 0
        self._refuses = refuses
        self._changed = asyncio.Event()
        self.socket = PacketSocket(sock, asyncio.get_running_loop(), self._received, self._gone)

    @property
    def data(self) -> list[bytes]:
        return [data for data, _ in self.packets]

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _received(self, data: bytes, fds: list[int]) -> None:
        self._changed.set()
        if self._refuses:
            raise RemoteProtocolError("cannot take anything", 1002)
        self.packets.append((data, fds))

    def _gone(self) -> None:
        self.closed += 1
        self._changed.set()


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def sync() -> None:
        asyncio.run(test())

    return sync


def ends(**right: Any) -> tuple[End, End]:
    a, b = pair()
    return End(a), End(b, **right)


def same_file(a: int, b: int) -> bool:
    return os.path.samestat(os.fstat(a), os.fstat(b))


def test_pair_is_what_a_link_needs() -> None:
    for sock in pair():
        assert sock.type == socket.SOCK_SEQPACKET
        assert not sock.getblocking()
        assert not sock.get_inheritable()
        sock.close()


@run
async def test_packets_keep_their_order_and_borders() -> None:
    left, right = ends()
    packets = [bytes([i]) * (1 + i * 97) for i in range(200)]
    for packet in packets:
        left.socket.send(packet)
    right.socket.send(b"answer")
    await right.wait_for(lambda: len(right.packets) == 200)
    await left.wait_for(lambda: len(left.packets) == 1)
    assert right.data == packets
    left.socket.close()
    await right.wait_for(lambda: right.closed == 1)
    assert left.closed == 0


@run
async def test_descriptors_travel_and_the_caller_may_close_its_own_at_once() -> None:
    left, right = ends()
    keep, give = os.pipe()
    left.socket.send(b"take it", [keep, give])
    os.close(give)
    await right.wait_for(lambda: bool(right.packets))
    (data, (got_keep, got_give)) = right.packets[0]
    assert data == b"take it"
    assert same_file(got_keep, keep)
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in (got_keep, got_give))
    os.write(got_give, b"through")
    assert os.read(keep, 10) == b"through"
    for fd in (keep, got_keep, got_give):
        os.close(fd)
    left.socket.close()
    right.socket.close()


@run
async def test_full_socket_queues_packets_and_their_descriptors() -> None:
    a, b = pair()
    left = End(a)
    packets = [bytes([i]) * 10_000 for i in range(100)]
    for i, packet in enumerate(packets):
        fd = os.open("/dev/null", os.O_RDONLY)
        left.socket.send(packet, [fd] if i % 2 else [])
        os.close(fd)
    assert left.socket.queue_bytes > 500_000
    right = End(b)
    await right.wait_for(lambda: len(right.packets) == 100)
    assert right.data == packets
    assert [len(fds) for _, fds in right.packets] == [0, 1] * 50
    for _, fds in right.packets:
        for fd in fds:
            assert os.fstat(fd).st_rdev == os.stat("/dev/null").st_rdev
            os.close(fd)
    assert left.socket.queue_bytes == 0
    left.socket.send(b"and on")
    await right.wait_for(lambda: len(right.packets) == 101)
    left.socket.close()
    right.socket.close()


@run
async def test_peer_that_never_reads_loses_the_link_without_a_gap() -> None:
    a, b = pair()
    left = End(a)
    sent = 0
    while sent < 2 * MAX_QUEUE_BYTES:
        left.socket.send(sent.to_bytes(8, "little") * 1_000)
        sent += 8_000
    assert left.socket.queue_bytes == 0
    await left.wait_for(lambda: left.closed == 1)
    right = End(b)
    await right.wait_for(lambda: right.closed == 1)
    numbers = [int.from_bytes(data[:8], "little") for data in right.data]
    assert numbers == list(range(0, len(numbers) * 8_000, 8_000))
    assert 0 < len(numbers) * 8_000 < MAX_QUEUE_BYTES


@run
async def test_queue_of_descriptors_is_bounded_too() -> None:
    a, b = pair()
    left = End(a)
    fd = os.open("/dev/null", os.O_RDONLY)
    with b:
        while left.socket.queue_bytes == 0:
            left.socket.send(b"x" * 50_000)
        for _ in range(MAX_QUEUE_DESCRIPTORS // MAX_DESCRIPTORS):
            left.socket.send(b"x", [fd] * MAX_DESCRIPTORS)
            assert left.socket.queue_bytes > 0
        left.socket.send(b"x", [fd])
        assert left.socket.queue_bytes == 0
        await left.wait_for(lambda: left.closed == 1)
    os.close(fd)


@run
async def test_what_was_sent_before_the_close_still_arrives() -> None:
    left, right = ends()
    for i in range(50):
        left.socket.send(bytes([i]))
    left.socket.close()
    # The failed send must not end the link before it is read out.
    right.socket.send(b"too late")
    await right.wait_for(lambda: right.closed == 1)
    assert right.data == [bytes([i]) for i in range(50)]


@run
async def test_a_packet_that_nobody_can_read_any_more_is_known_to_be_lost() -> None:
    ours, theirs = pair()
    end = End(ours)
    end.socket.send(b"read by nobody, but nobody knew")
    assert not end.socket.peer_is_gone
    theirs.close()
    end.socket.send(b"lost")
    assert end.socket.peer_is_gone
    assert end.closed == 0
    await end.wait_for(lambda: end.closed == 1)


@run
async def test_closing_is_final_and_silent() -> None:
    left, right = ends()
    right.socket.send(b"not read")
    left.socket.close()
    left.socket.close()
    left.socket.send(b"ignored")
    assert not left.socket.is_open
    await right.wait_for(lambda: right.closed == 1)
    assert not right.socket.is_open
    assert (left.closed, left.packets, right.packets) == (0, [], [])


@run
async def test_link_can_be_closed_by_what_it_receives() -> None:
    a, b = pair()
    received: list[bytes] = []

    def take(data: bytes, fds: list[int]) -> None:
        received.append(data)
        link.close()

    link = PacketSocket(a, asyncio.get_running_loop(), take, lambda: received.append(b"closed"))
    peer = End(b)
    peer.socket.send(b"first")
    peer.socket.send(b"second")
    await peer.wait_for(lambda: peer.closed == 1)
    assert received == [b"first"]


@run
async def test_refused_packet_breaks_the_link_and_closes_its_descriptors() -> None:
    left, right = ends(refuses=True)
    fd = os.open("/dev/null", os.O_RDONLY)
    left.socket.send(b"bad", [fd, fd])
    os.close(fd)
    await left.wait_for(lambda: left.closed == 1)
    assert right.closed == 1


@pytest.mark.parametrize(
    ("size", "descriptors"),
    [(MAX_PACKET_BYTES + 1, 0), (10, MAX_DESCRIPTORS + 9), (0, 1)],
    ids=["long", "many", "empty"],
)
def test_packet_that_no_end_of_ours_sends_breaks_the_link(size: int, descriptors: int) -> None:
    async def main() -> None:
        a, b = pair()
        right = End(b)
        fd = os.open("/dev/null", os.O_RDONLY)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * descriptors))
        with a:
            a.sendmsg([b"x" * size], [rights] if descriptors else [])
            os.close(fd)
            await right.wait_for(lambda: right.closed == 1)
        assert right.packets == []

    asyncio.run(main())


@pytest.mark.parametrize(("size", "descriptors"), [(0, 0), (MAX_PACKET_BYTES + 1, 0), (1, MAX_DESCRIPTORS + 1)])
def test_packet_that_cannot_be_sent_is_our_mistake(size: int, descriptors: int) -> None:
    async def main() -> None:
        left, right = ends()
        with pytest.raises(LocalProtocolError, match="cannot send a packet"):
            left.socket.send(b"x" * size, [0] * descriptors)
        left.socket.send(b"x" * MAX_PACKET_BYTES)
        await right.wait_for(lambda: len(right.packets) == 1)
        left.socket.close()
        right.socket.close()

    asyncio.run(main())


class Overcommitted(socket.socket):
    """A socket whose process has too many descriptors in flight for a while."""

    failures = 3

    def sendmsg(self, *args: Any) -> int:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        return super().sendmsg(*args)


@run
async def test_too_many_descriptors_in_flight_is_tried_again() -> None:
    a, b = pair()
    left = End(Overcommitted(fileno=a.detach()))
    right = End(b)
    fd = os.open("/dev/null", os.O_RDONLY)
    left.socket.send(b"one", [fd])
    left.socket.send(b"two")
    os.close(fd)
    await right.wait_for(lambda: len(right.packets) == 2)
    assert right.data == [b"one", b"two"]
    os.close(right.packets[0][1][0])
    left.socket.close()
    right.socket.close()


class Ping(msgspec.Struct, tag=1, array_like=True):
    number: int


class Text(msgspec.Struct, tag=2, array_like=True):
    text: str


def test_codec_keeps_messages_apart() -> None:
    codec: Codec[Ping | Text] = Codec(Ping | Text)
    for message in (Ping(3), Text("three")):
        assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("data", [b"", b"junk", b"\x92\x03\x01", b"\x92\x01\xa1x", b"\x92\x01\x01\x01"])
def test_codec_refuses_what_is_no_message(data: bytes) -> None:
    codec: Codec[Ping | Text] = Codec(Ping | Text)
    with pytest.raises(RemoteProtocolError, match="cannot read a control packet"):
        codec.decode(data)
