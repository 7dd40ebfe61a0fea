"""The life of a buffer, and every step out of order."""

from __future__ import annotations

import ctypes

import pytest

from seedance.daemon.ring.pool import Buffer, BufferPool, BufferState


def state_of(buffer: Buffer) -> BufferState:
    return buffer.state


def test_a_buffer_goes_round() -> None:
    pool = BufferPool(1, 4096)
    buffer = pool.lend()
    assert buffer is not None
    assert state_of(buffer) is BufferState.LENT
    assert pool.lend() is None
    buffer.fill(b"hello")
    assert ctypes.string_at(buffer.address, 5) == b"hello"
    assert buffer.read(1, 4) == b"ell"
    pool.give_to_kernel(buffer, 3)
    pool.complete(buffer, 2)
    assert (state_of(buffer), pool.free) == (BufferState.IN_KERNEL, 0)
    pool.complete(buffer)
    assert (state_of(buffer), pool.free, pool.total) == (BufferState.FREE, 1, 1)
    pool.close()


def test_a_loaded_buffer_is_the_kernels_at_once() -> None:
    pool = BufferPool(1, 8)
    for data, references in ((bytes(9), 1), (b"a", 0)):
        with pytest.raises(AssertionError):
            pool.load(data, references)
    buffer = pool.load(b"abc", 2)
    assert buffer is not None
    assert (state_of(buffer), pool.free, ctypes.string_at(buffer.address, 3)) == (BufferState.IN_KERNEL, 0, b"abc")
    assert pool.load(b"d", 1) is None
    pool.complete(buffer, 2)
    assert (state_of(buffer), pool.free) == (BufferState.FREE, 1)
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
    with pytest.raises(AssertionError):
        buffer.fill(b"x")
    with pytest.raises(AssertionError):
        pool.give_to_kernel(buffer, 1)
    with pytest.raises(AssertionError):
        pool.give_back(buffer)
    with pytest.raises(AssertionError):
        pool.complete(buffer, 2)
    pool.complete(buffer)
    with pytest.raises(AssertionError):
        pool.complete(buffer)
    with pytest.raises(AssertionError):
        pool.give_back(buffer)
    with pytest.raises(AssertionError):
        buffer.fill(b"")
