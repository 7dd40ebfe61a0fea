"""Offsets in the running kernel's structs; needs its BTF, no root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from seedance.bpf.offsets import KernelOffsets
from seedance.errors import KernelError

if not Path("/sys/kernel/btf/vmlinux").exists():
    pytest.skip("this kernel has no BTF", allow_module_level=True)


@pytest.fixture(scope="module")
def offsets() -> Iterator[KernelOffsets]:
    btf = KernelOffsets.of_kernel()
    yield btf
    btf.close()


def test_fields_of_a_plain_struct_are_where_c_puts_them(offsets: KernelOffsets) -> None:
    # struct list_head { struct list_head *next, *prev; }
    assert (offsets.offset("list_head", "next"), offsets.offset("list_head", "prev")) == (0, 8)


def test_fields_in_unnamed_unions_are_found(offsets: KernelOffsets) -> None:
    # struct sk_buff begins with a union of a struct { next, prev, … } and others.
    assert (offsets.offset("sk_buff", "next"), offsets.offset("sk_buff", "prev")) == (0, 8)


def test_offsets_in_a_struct_with_bit_fields_are_those_of_its_bytes(offsets: KernelOffsets) -> None:
    assert 0 < offsets.offset("sk_buff", "mark") < offsets.struct_size("sk_buff")
    assert 0 < offsets.offset("sock", "sk_mark") < offsets.struct_size("sock")


@pytest.mark.parametrize(("struct", "field"), [("sk_buff", "no_such_field"), ("no_such_struct", "mark")])
def test_what_is_not_there_is_told(offsets: KernelOffsets, struct: str, field: str) -> None:
    with pytest.raises(KernelError, match=f"cannot find .*'{struct}'"):
        offsets.offset(struct, field)
