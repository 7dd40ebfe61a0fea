"""maps.py: adding up the values of processors, which needs no kernel."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from seedance.bpf.maps import add


class Inner(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint64),)


class Outer(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_uint64),
        ("histogram", ctypes.c_uint32 * 3),
        ("inner", Inner),
        ("inners", Inner * 2),
    )
    histogram: ctypes.Array[ctypes.c_uint32]
    inner: Any
    inners: Any
    total: int


def outer(factor: int) -> Outer:
    histogram = (ctypes.c_uint32 * 3)(*(factor * value for value in (1, 2, 3)))
    inners = (Inner * 2)(Inner(5 * factor), Inner(6 * factor))
    return Outer(7 * factor, histogram, Inner(4 * factor), inners)


def test_fields_are_added_each_to_its_own() -> None:
    total = outer(1)
    add(total, outer(10))
    assert bytes(total) == bytes(outer(11))


def test_the_other_value_stays() -> None:
    other = outer(10)
    add(outer(1), other)
    assert bytes(other) == bytes(outer(10))


@pytest.mark.parametrize("kind", [ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64])
def test_numbers_are_added(kind: type[ctypes._SimpleCData[int]]) -> None:
    total = kind(2)
    add(total, kind(3))
    assert total.value == 5


def test_counters_wrap_as_the_kernel_s_do() -> None:
    total = Inner((1 << 64) - 1)
    add(total, Inner(2))
    assert total.count == 1
