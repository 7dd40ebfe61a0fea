"""BPF maps as typed dictionaries: keys and values are the ctypes types of `abi.py`, checked against the map's sizes."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, overload

from seedance.bpf import libbpf
from seedance.errors import KernelError

K = TypeVar("K")
V = TypeVar("V", bound="ctypes.Structure | ctypes._SimpleCData[int]")

_Number = ctypes._SimpleCData
"""The base of c_uint32 and its like."""


class Map:
    """An open map of any kind. It owns its descriptor unless it came from a loaded object."""

    def __init__(self, fd: int, *, owned: bool = True) -> None:
        info = libbpf.MapInfo()
        size = ctypes.c_uint32(ctypes.sizeof(info))
        libbpf.call("ask for a map", "bpf_obj_get_info_by_fd", fd, ctypes.byref(info), ctypes.byref(size))
        self.fd = fd
        self.id = info.id
        self.name = info.name.decode()
        """The kernel keeps the first 15 characters."""
        self.key_size = info.key_size
        self.value_size = info.value_size
        self.max_entries = info.max_entries
        self._owned = owned

    def pin(self, path: Path) -> None:
        """Give the map a name in a BPF file system, by which it lives on. Raises KernelError."""
        libbpf.call(f"pin map '{self.name}' as '{path}'", "bpf_obj_pin", self.fd, os.fsencode(path))

    def close(self) -> None:
        """Close the descriptor; a map that is pinned or in use by a program lives on."""
        if self._owned and self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_pinned(path: Path) -> Map:
    """Open a map by its name in a BPF file system. Raises KernelError where there is none."""
    return Map(libbpf.call(f"open the map '{path}'", "bpf_obj_get", os.fsencode(path)))


class HashMap(Generic[K, V]):
    """A map whose values are the same on every processor: a hash, LRU hash or array.

    A key is an int where its type is a number (`ctypes.c_uint32`), else an instance of its struct. Values handed out
    are copies; `set` replaces the whole value. Errors of the kernel raise KernelError, except "no such key".
    """

    @overload
    def __init__(self: HashMap[int, V], map: Map, key: type[_Number[int]], value: type[V]) -> None: ...
    @overload
    def __init__(self, map: Map, key: type[K], value: type[V]) -> None: ...
    def __init__(self, map: Map, key: type[Any], value: type[V]) -> None:
        self.map = map
        self._key_type = key
        self._value_type: Any = value
        self._numeric = issubclass(key, _Number)
        for what, size, right in (("keys", map.key_size, key), ("values", map.value_size, value)):
            if ctypes.sizeof(right) != size:
                raise KernelError(
                    f"use map '{map.name}': its {what} have {size} bytes, "
                    f"while {right.__name__} has {ctypes.sizeof(right)}; remove the map that an other version left",
                    errno.EINVAL,
                )

    def get(self, key: K) -> V | None:
        """Return the value of a key, None where there is none."""
        buffer = self._buffer()
        return self._decoded(buffer) if self._lookup(self._encoded(key), buffer) else None

    def set(self, key: K, value: V) -> None:
        """Write a value, whether there was one or not."""
        buffer = self._buffer()
        ctypes.memmove(buffer, ctypes.byref(value), ctypes.sizeof(value))
        what = f"write to map '{self.map.name}'"
        libbpf.call(what, "bpf_map_update_elem", self.map.fd, self._encoded(key), buffer, 0)

    def delete(self, key: K) -> bool:
        """Remove a key; return whether it was there."""
        return self._found(f"delete from map '{self.map.name}'", "bpf_map_delete_elem", self._encoded(key))

    def keys(self) -> Iterator[K]:
        """Yield the keys, each once; what programs add or remove meanwhile may be missing."""
        seen: set[bytes] = set()
        key, following = None, self._key_type()
        what = f"walk through map '{self.map.name}'"
        while self._found(what, "bpf_map_get_next_key", key, ctypes.byref(following)):
            # The walk starts anew where the key that it stands on was removed.
            if bytes(following) not in seen:
                seen.add(bytes(following))
                yield following.value if self._numeric else self._key_type.from_buffer_copy(following)
            elif len(seen) >= self.map.max_entries:
                return
            key, following = ctypes.byref(following), self._key_type.from_buffer_copy(following)

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield keys and values; see `keys`."""
        for key in self.keys():
            value = self.get(key)
            if value is not None:
                yield key, value

    def clear(self) -> None:
        """Remove every key that is there now."""
        for key in list(self.keys()):
            self.delete(key)

    def _buffer(self) -> ctypes.Array[ctypes.c_char]:
        return ctypes.create_string_buffer(ctypes.sizeof(self._value_type))

    def _decoded(self, buffer: ctypes.Array[ctypes.c_char]) -> V:
        return self._value_at(buffer, 0)

    def _value_at(self, buffer: ctypes.Array[ctypes.c_char], offset: int) -> V:
        value: V = self._value_type.from_buffer_copy(buffer, offset)
        return value

    def _encoded(self, key: Any) -> Any:
        return ctypes.byref(self._key_type(key) if self._numeric else key)

    def _lookup(self, key: object, buffer: ctypes.Array[ctypes.c_char]) -> bool:
        return self._found(f"read from map '{self.map.name}'", "bpf_map_lookup_elem", key, buffer)

    def _found(self, what: str, function: str, *arguments: object) -> bool:
        try:
            libbpf.call(what, function, self.map.fd, *arguments)
        except KernelError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True


class PerCpuHashMap(HashMap[K, V]):
    """A map with a value for each processor: `get` returns their sum, field by field, `set` makes the sum the value."""

    @functools.cached_property
    def _is_row_of_counts(self) -> bool:
        fields = getattr(self._value_type, "_fields_", ())
        return bool(fields) and all(field[1] is ctypes.c_uint64 for field in fields)

    def get_each(self, key: K) -> list[V] | None:
        """Return the values by processor, None where there is no such key."""
        buffer = self._buffer()
        return self._each(buffer) if self._lookup(self._encoded(key), buffer) else None

    def _stride(self) -> int:
        return (ctypes.sizeof(self._value_type) + 7) & ~7

    def _buffer(self) -> ctypes.Array[ctypes.c_char]:
        return ctypes.create_string_buffer(self._stride() * libbpf.possible_cpus())

    def _decoded(self, buffer: ctypes.Array[ctypes.c_char]) -> V:
        if self._is_row_of_counts:
            # Field by field through the whole buffer: a machine may have hundreds of processors.
            words, width = memoryview(buffer).cast("B").cast("Q"), self._stride() // 8
            total: V = self._value_type(*(sum(words[field::width]) for field in range(width)))
            return total
        total, *others = self._each(buffer)
        for other in others:
            add(total, other)
        return total

    def _each(self, buffer: ctypes.Array[ctypes.c_char]) -> list[V]:
        stride = self._stride()
        return [self._value_at(buffer, stride * processor) for processor in range(libbpf.possible_cpus())]


class ArrayMap(HashMap[int, V]):
    """An array: keys are 0 to `max_entries` - 1, and none can be deleted."""

    def __init__(self, map: Map, value: type[V]) -> None:
        super().__init__(map, ctypes.c_uint32, value)


class PerCpuArrayMap(PerCpuHashMap[int, V]):
    """An array with a value for each processor."""

    def __init__(self, map: Map, value: type[V]) -> None:
        super().__init__(map, ctypes.c_uint32, value)


def add(total: Any, other: Any) -> None:
    """Add `other` to `total` in place, field by field: numbers, arrays, and structs of these."""
    if isinstance(total, _Number):
        total.value += other.value
    elif isinstance(total, ctypes.Array):
        for index, value in enumerate(other):
            if isinstance(value, int):
                total[index] += value
            else:
                add(total[index], value)
    else:
        for field in total._fields_:
            mine, theirs = getattr(total, field[0]), getattr(other, field[0])
            if isinstance(mine, int):
                setattr(total, field[0], mine + theirs)
            elif isinstance(mine, (ctypes.Array, ctypes.Structure)):
                add(mine, theirs)
