"""Where fields of the running kernel's structs are, for programs that are compiled here and so have no CO-RE."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator

from seedance.bpf import libbpf
from seedance.bpf.btf import Btf, Kind
from seedance.errors import KernelError

_HAS_BITFIELDS = 1 << 31
"""In the info of a struct: offsets of members hold 24 bits only, and above them the size of a bit-field."""


class KernelOffsets(Btf):
    """The running kernel's BTF, asked for fields; `of_kernel` opens it."""

    def offset(self, struct: str, field: str) -> int:
        """Return a field's offset in bytes; it may be in an unnamed struct or union inside. Raises KernelError."""
        found = self._offset(self._find(struct, Kind.STRUCT), field)
        if found is None:
            raise KernelError(f"find field '{field}' of the kernel's struct '{struct}'", errno.ENOENT)
        return found

    def _offset(self, type_id: int, field: str) -> int | None:
        for name, member_type, offset in self._members(type_id):
            if name == field:
                return offset
            inner = self._offset(member_type, field) if not name else None
            if inner is not None:
                return offset + inner
        return None

    def _members(self, type_id: int) -> Iterator[tuple[str, int, int]]:
        """Yield name, type and offset in bytes of each member of a struct or union."""
        described = self._type(type_id).contents
        start = ctypes.addressof(described) + ctypes.sizeof(libbpf.BtfType)
        count = described.info & 0xFFFF
        numbers = (ctypes.c_uint32 * (3 * count)).from_address(start)
        mask = 0xFFFFFF if described.info & _HAS_BITFIELDS else 0xFFFFFFFF
        for index in range(count):
            name, member_type, offset_bits = numbers[3 * index : 3 * index + 3]
            yield self._text(name), member_type, (offset_bits & mask) // 8
