"""The safetensors format: what the head of a file says of its tensors, and whether the file can hold them.

A file is the head's length (u64, little-endian), the head (a JSON object), and the data. Each tensor has its type, its
shape, and where it begins and ends in the data. The tensors fill the data without holes and without overlaps; that a
file ends where its last tensor does is how one that was cut off or appended to is known without reading it all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

LENGTH_BYTES: Final = 8
MAX_HEAD_BYTES: Final = 100_000_000
"""The library that reads them for an engine takes no longer heads."""

BITS: Final[Mapping[str, int]] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
}
"""The types and the bits of one number; those below a byte fill whole bytes together."""

_METADATA: Final = "__metadata__"
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Tensor(msgspec.Struct, frozen=True):
    """A tensor as the head describes it; `data_offsets` count from the end of the head."""

    dtype: str
    shape: list[_Count]
    data_offsets: tuple[_Count, _Count]

    @property
    def count(self) -> int:
        """Return how many numbers it has."""
        return math.prod(self.shape)


def head_bytes(first: bytes, file_bytes: int) -> int:
    """Return the length of the head from the first 8 bytes of a file. Raises ValueError when there cannot be one."""
    if len(first) < LENGTH_BYTES:
        raise ValueError(f"it has {len(first)} bytes, too few for a safetensors file")
    length = int.from_bytes(first, "little")
    if length > MAX_HEAD_BYTES:
        raise ValueError(f"it is no safetensors file: its head would have {length} bytes")
    if length > file_bytes - LENGTH_BYTES:
        raise ValueError(f"it is cut off: its head has {length} bytes, the file {file_bytes}")
    return length


def parse_head(head: bytes | memoryview, file_bytes: int) -> dict[str, Tensor]:
    """Return the tensors of a file of so many bytes, by name. Raises ValueError saying what is wrong."""
    try:
        entries: dict[str, Any] = msgspec.json.decode(head, type=dict[str, Any])
        entries.pop(_METADATA, None)
        tensors = msgspec.convert(entries, dict[str, Tensor])
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ValueError(f"its head cannot be read ({exc})") from exc
    data_bytes = file_bytes - LENGTH_BYTES - len(head)
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begins, ends = tensor.data_offsets
        if (reason := _misfit(tensor)) is not None:
            raise ValueError(f"tensor '{name}' {reason}")
        if begins != end:
            fault = "overlaps the one before it" if begins < end else "leaves a hole before it"
            raise ValueError(f"tensor '{name}' {fault}: it begins at {begins}, and {end} is where that ends")
        if ends > data_bytes:
            raise ValueError(f"it is cut off: tensor '{name}' ends at {ends} of the data, the file at {data_bytes}")
        end = ends
    if end != data_bytes:
        raise ValueError(f"{data_bytes - end} bytes of it belong to no tensor")
    return tensors


def _misfit(tensor: Tensor) -> str | None:
    """Say why a tensor cannot have the bytes that it names."""
    bits = BITS.get(tensor.dtype)
    if bits is None:
        return f"has the unknown type '{tensor.dtype}'"
    wanted_bytes, rest = divmod(tensor.count * bits, 8)
    begins, ends = tensor.data_offsets
    if rest or ends - begins != wanted_bytes:
        shape = "×".join(map(str, tensor.shape)) or "1"
        return f"has {ends - begins} bytes, and {shape} of {tensor.dtype} are {tensor.count * bits / 8:g}"
    return None
