"""Types as BTF describes them, read by way of libbpf: fields of structs, values of enums, variables of sections.

BTF comes from the object file before it is loaded (`BpfObject.btf`), from an ELF file, or from the running kernel.
Layouts: Documentation/bpf/btf.rst of the kernel; the kinds are those of Linux 6.1 and older.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator
from typing import NamedTuple, Self

from seedance.bpf import libbpf
from seedance.errors import KernelError


class Kind(enum.IntEnum):
    """`BTF_KIND_*`, those that are looked for."""

    INT = 1
    ARRAY = 3
    STRUCT = 4
    ENUM = 6
    VAR = 14
    DATASEC = 15


class Field(NamedTuple):
    """A field of a struct or a variable of a section; offset and size in bytes."""

    name: str
    offset: int
    size: int


class Btf:
    """Type information. It is freed by `close` unless it belongs to an open object."""

    def __init__(self, handle: int, *, owned: bool) -> None:
        self._handle = handle
        self._owned = owned

    @classmethod
    def of_file(cls, path: str) -> Self:
        """Read an ELF file's. Raises KernelError."""
        handle = libbpf.call_pointer(f"read BTF of '{path}'", "btf__parse_elf", path.encode(), None)
        return cls(handle, owned=True)

    @classmethod
    def of_kernel(cls) -> Self:
        """Read the running kernel's. Raises KernelError where it has none."""
        return cls(libbpf.call_pointer("read the kernel's BTF", "btf__load_vmlinux_btf"), owned=True)

    def close(self) -> None:
        """Free it; what was read stays valid."""
        if self._owned and self._handle:
            libbpf.library().btf__free(self._handle)
        self._handle = 0

    def struct(self, name: str) -> list[Field]:
        """Return the fields of a struct, without padding. Raises KernelError if it is absent."""
        return [
            Field(self._text(name_offset), offset_bits // 8, self._size(type_id))
            for name_offset, type_id, offset_bits in self._records(name, Kind.STRUCT)
        ]

    def struct_size(self, name: str) -> int:
        """Return the size of a struct in bytes. Raises KernelError if it is absent."""
        return self._size(self._find(name, Kind.STRUCT))

    def enum(self, name: str) -> dict[str, int]:
        """Return the values of an enum, as unsigned numbers of 32 bits. Raises KernelError if it is absent."""
        return {self._text(name_offset): value for name_offset, value in self._pairs(name, Kind.ENUM)}

    def section(self, name: str) -> list[Field]:
        """Return the variables of a section such as ".rodata". Raises KernelError if it is absent."""
        return [
            Field(self._text(self._type(type_id).contents.name_off), offset, size)
            for type_id, offset, size in self._records(name, Kind.DATASEC)
        ]

    def _records(self, name: str, kind: Kind) -> Iterator[tuple[int, int, int]]:
        numbers = self._numbers(name, kind, 3)
        return zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)

    def _pairs(self, name: str, kind: Kind) -> Iterator[tuple[int, int]]:
        numbers = self._numbers(name, kind, 2)
        return zip(numbers[::2], numbers[1::2], strict=True)

    def _numbers(self, name: str, kind: Kind, each: int) -> list[int]:
        """Return what follows a type: for each of its members so many numbers of 32 bits."""
        pointer = self._type(self._find(name, kind))
        count = (pointer.contents.info & 0xFFFF) * each
        start = ctypes.addressof(pointer.contents) + ctypes.sizeof(libbpf.BtfType)
        return list((ctypes.c_uint32 * count).from_address(start))

    def _find(self, name: str, kind: Kind) -> int:
        what = f"find {kind.name.lower()} '{name}' in the BTF"
        return libbpf.call(what, "btf__find_by_name_kind", self._handle, name.encode(), kind)

    def _type(self, type_id: int) -> ctypes._Pointer[libbpf.BtfType]:
        found: ctypes._Pointer[libbpf.BtfType] = libbpf.library().btf__type_by_id(self._handle, type_id)
        if not found:
            raise KernelError(f"find type {type_id} in the BTF", ctypes.get_errno())
        return found

    def _size(self, type_id: int) -> int:
        return libbpf.call(f"tell the size of type {type_id}", "btf__resolve_size", self._handle, type_id)

    def _text(self, offset: int) -> str:
        return libbpf.text("btf__name_by_offset", self._handle, offset)
