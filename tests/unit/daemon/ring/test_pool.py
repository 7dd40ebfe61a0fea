"""The life of a buffer, and every step out of order."""

from __future__ import annotations

import ctypes

import pytest

from seedance.daemon.ring.pool import BufferPool, BufferState


def test_a_buffer_goes_round() -> None:
    pool = BufferPool(1, 4096)
    buffer = pool.lend()
    assert buffer is not None and buffer.state is BufferState.LENT
    assert pool.lend() is None
    buffer.fill(b"hello")
    assert ctypes.string_at(buffer.address, 5) == b"hello"
    assert buffer.read(1, 4) == b"ell"
    pool.give_to_kernel(buffer, 3)
    pool.complete(buffer, 2)
    assert buffer.state is BufferState.IN_KERNEL and pool.free == 0
    pool.complete(buffer)
    assert (buffer.state, pool.free, pool.total) == (BufferState.FREE, 1, 1)
    pool.close()


def test_a_buffer_can_be_given_back_unused() -> None:
    pool = BufferPool(2, 4096)
    buffer = pool.lend()
    assert buffer is not None
    pool.give_back(buffer)
    assert pool.free == 2
    pool.close()


def test_steps_out_of_order_are_refused() -> None:
    pool = BufferPool(1, 16)
    buffer = pool.lend()
    assert buffer is not None
    with pytest.raises(AssertionError):
        buffer.fill(bytes(17))
    with pytest.raises(AssertionError):
        pool.complete(buffer)
    with pytest.raises(AssertionError):
        pool.close()
    pool.give_to_kernel(buffer, 1)
    for misuse in (
        lambda: buffer.fill(b"x"),
        lambda: pool.give_to_kernel(buffer, 1),
        lambda: pool.give_back(buffer),
        lambda: pool.complete(buffer, 2),
    ):
        with pytest.raises(AssertionError):
            misuse()
    pool.complete(buffer)
    for misuse in (lambda: pool.complete(buffer), lambda: pool.give_back(buffer), lambda: buffer.fill(b"")):
        with pytest.raises(AssertionError):
            misuse()
