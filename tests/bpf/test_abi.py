"""abi.py against abi.h, by the BTF of the built objects; needs no root."""

from __future__ import annotations

import ctypes
import importlib.resources
from collections.abc import Iterator
from typing import Final

import pytest

from seedance.bpf import abi, libbpf
from seedance.bpf.btf import Btf, Field
from seedance.errors import KernelError

OBJECTS: Final = {
    "connection_counts": "connections",
    "source_pace": "connections",
    "source_prefix": "connections",
    "tenant_limit": "egress",
    "tenant_pace": "egress",
    "tenant_traffic": "ingress",
}
KERNEL_STRUCTS: Final = {"bpf_prog_info": libbpf.ProgramInfo, "bpf_map_info": libbpf.MapInfo}


def btf_of(name: str) -> Btf:
    path = importlib.resources.files("seedance.bpf") / f"{name}.bpf.o"
    if not path.is_file():
        pytest.skip("the BPF objects are not built: `make bpf`")
    return Btf.of_file(str(path))


@pytest.fixture
def kernel() -> Iterator[Btf]:
    try:
        btf = Btf.of_kernel()
    except (KernelError, OSError) as exc:
        pytest.skip(str(exc))
    yield btf
    btf.close()


def mirrored(struct: type[ctypes.Structure]) -> list[Field]:
    described = ((field[0], getattr(struct, field[0])) for field in struct._fields_)
    return [Field(name, member.offset, member.size) for name, member in described]


def test_every_struct_is_compared() -> None:
    assert OBJECTS.keys() == abi.STRUCTS.keys()


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_struct_is_the_same_in_c_and_python(name: str) -> None:
    btf, mirror = btf_of(OBJECTS[name]), abi.STRUCTS[name]
    try:
        assert mirrored(mirror) == btf.struct(name)
        assert ctypes.sizeof(mirror) == btf.struct_size(name)
    finally:
        btf.close()


@pytest.mark.parametrize("name", ["egress", "ingress"])
def test_marks_are_the_same_in_c_and_python(name: str) -> None:
    btf = btf_of(name)
    try:
        assert btf.enum("mark") == {"MARK_BASE": abi.MARK_BASE, "MARK_MASK": abi.MARK_MASK}
    finally:
        btf.close()


def test_indices_are_what_the_mask_leaves() -> None:
    assert abi.TENANT_INDEX_MAX == 0xFFFFFFFF ^ abi.MARK_MASK
    assert abi.MARK_BASE & abi.MARK_MASK == abi.MARK_BASE


def test_a_type_that_is_absent_is_an_error() -> None:
    btf = btf_of("egress")
    try:
        with pytest.raises(KernelError, match="cannot find struct 'tenant_share' in the BTF"):
            btf.struct("tenant_share")
    finally:
        btf.close()


@pytest.mark.parametrize("name", sorted(KERNEL_STRUCTS))
def test_what_the_kernel_tells_is_read_from_the_right_places(kernel: Btf, name: str) -> None:
    there = {field.name: field for field in kernel.struct(name)}
    for field in mirrored(KERNEL_STRUCTS[name]):
        if not field.name.startswith("unused"):
            assert there[field.name] == field
