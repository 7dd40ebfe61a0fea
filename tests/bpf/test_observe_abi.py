"""observe_abi.py against observe.h, by the BTF of the built objects; needs no root."""

from __future__ import annotations

import ctypes
import importlib.resources
from typing import Final

import pytest

from seedance.bpf import observe_abi
from seedance.bpf.btf import Btf, Field

OBJECTS: Final = {
    "cuda_calls": "cuda",
    "running_slice": "sched",
    "tenant_cpu": "sched",
    "tenant_network": "sockops",
}


def btf_of(name: str) -> Btf:
    path = importlib.resources.files("seedance.bpf") / f"{OBJECTS[name]}.bpf.o"
    if not path.is_file():
        pytest.skip("the BPF objects are not built: `make bpf`")
    return Btf.of_file(str(path))


def mirrored(struct: type[ctypes.Structure]) -> list[Field]:
    described = ((field[0], getattr(struct, field[0])) for field in struct._fields_)
    return [Field(name, member.offset, member.size) for name, member in described]


def test_every_struct_is_compared() -> None:
    assert OBJECTS.keys() == observe_abi.STRUCTS.keys()


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_struct_is_the_same_in_c_and_python(name: str) -> None:
    btf, mirror = btf_of(name), observe_abi.STRUCTS[name]
    try:
        assert mirrored(mirror) == btf.struct(name)
        assert ctypes.sizeof(mirror) == btf.struct_size(name)
    finally:
        btf.close()
