"""The ring itself: queues that wrap, queues that are full, and what the kernel is relied on for."""

from __future__ import annotations

import ctypes
import socket
import time

import pytest

from seedance.daemon.ring import abi
from seedance.daemon.ring.uring import Uring
from seedance.errors import KernelError

OP_NOP = 0


@pytest.fixture
def ring() -> Uring:
    try:
        return Uring(8, 16)
    except KernelError as exc:
        pytest.skip(str(exc))


def test_completions_come_in_order_across_the_wrap(ring: Uring) -> None:
    seen: list[int] = []
    for number in range(100):
        ring.push(OP_NOP, -1, number)
        if number % 7 == 6:
            ring.submit()
            seen += [user_data for user_data, _, _ in ring.completions()]
    ring.submit()
    seen += [user_data for user_data, _, _ in ring.completions()]
    assert seen == list(range(100))
    ring.close()
    ring.close()


def test_packed_entries_wrap_too(ring: Uring) -> None:
    seen: list[int] = []
    for first in range(0, 60, 3):
        ring.push_packed(
            b"".join(abi.SQE.pack(OP_NOP, 0, 0, -1, 0, 0, 0, 0, first + n, 0, 0, 0, 0, 0) for n in range(3))
        )
        ring.submit()
        seen += [user_data for user_data, _, _ in ring.completions()]
    assert seen == list(range(60))
    ring.close()


def test_a_full_submission_queue_is_submitted(ring: Uring) -> None:
    for number in range(12):
        ring.push(OP_NOP, -1, number)
    assert ring.unsubmitted == 4
    ring.submit()
    assert [user_data for user_data, _, _ in ring.completions()] == list(range(12))
    ring.close()


def test_more_completions_than_the_queue_holds_are_kept(ring: Uring) -> None:
    for number in range(200):
        ring.push(OP_NOP, -1, number)
    ring.submit()
    seen: list[int] = []
    while ring.has_completions or ring.needs_enter:
        seen += [user_data for user_data, _, _ in ring.completions()]
        ring.submit()
    assert seen == list(range(200))
    ring.close()


def test_waiting_ends_with_the_time_or_a_completion(ring: Uring) -> None:
    started = time.monotonic()
    ring.wait(0.02)
    assert 0.02 <= time.monotonic() - started < 1
    assert ring.completions() == []
    ring.push(OP_NOP, -1, 5)
    ring.wait(None)
    assert [user_data for user_data, _, _ in ring.completions()] == [5]
    ring.close()


def test_without_waitall_a_short_send_would_be_lost(ring: Uring) -> None:
    """Why the driver never skips the completion of a send without MSG_WAITALL; fails if the kernel changes."""
    ours, peer = socket.socketpair()
    with ours, peer:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        data = bytearray(1 << 20)
        anchor = (ctypes.c_char * len(data)).from_buffer(data)
        for extra, posts in ((0, 0), (socket.MSG_WAITALL, 1)):
            ring.push(
                abi.OP_SEND,
                ours.fileno(),
                1,
                address=ctypes.addressof(anchor),
                length=len(data),
                flags=abi.IOSQE_CQE_SKIP_SUCCESS,
                op_flags=socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL | extra,
            )
            ring.submit()
            assert len(ring.completions()) == posts
            peer.setblocking(False)
            try:
                while peer.recv(1 << 20):
                    pass
            except BlockingIOError:
                pass
    ring.close()


def test_a_ring_that_cannot_be_had_says_why() -> None:
    with pytest.raises(KernelError, match="cannot set up io_uring"):
        Uring(1 << 20, 1 << 21)
