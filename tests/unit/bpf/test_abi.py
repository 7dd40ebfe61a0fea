"""abi.py: what can be said of it without an object to compare it with."""

from __future__ import annotations

import ctypes

import pytest

from seedance.bpf import abi


@pytest.mark.parametrize("name", sorted(abi.STRUCTS))
def test_nothing_is_left_to_the_compiler(name: str) -> None:
    """Without padding of the compiler's own, no bytes of a value are ever undefined."""
    struct = abi.STRUCTS[name]
    end = 0
    for field in struct._fields_:
        member = getattr(struct, field[0])
        assert member.offset == end
        end += member.size
    assert end == ctypes.sizeof(struct)


def test_a_name_of_full_length_fits() -> None:
    name = b"a" * abi.TENANT_NAME_SIZE
    assert abi.TenantLimit(name, 1, 2).name == name


@pytest.mark.parametrize("index", [1, abi.TENANT_INDEX_MAX])
def test_a_mark_is_told_from_those_of_others(index: int) -> None:
    mark = abi.MARK_BASE | index
    assert mark & abi.MARK_MASK == abi.MARK_BASE
    assert mark & ~abi.MARK_MASK == index
