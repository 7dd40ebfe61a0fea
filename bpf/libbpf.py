"""libbpf.so.1 as typed Python functions: what `loader`, `maps` and `btf` call, and no more.

libbpf 1.x returns a negative errno, or NULL with errno set. The functions here raise KernelError for either, so that
no caller looks at return values. Signatures and option structs are those of libbpf 1.1 (Debian 12); a library that is
newer reads the `sz` at the head of each option struct and takes what is not there as zero.
"""

from __future__ import annotations

import collections
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

from seedance.errors import KernelError

LIBRARY: Final = "libbpf.so.1"

_WARN: Final = 0
_VERIFIER_TAIL: Final = 40
_LINE_BYTES: Final = 1 << 24
"""A verifier's log is one line to libbpf, of up to 16 MiB; memory that is not written to is not taken."""

log: Final[collections.deque[str]] = collections.deque(maxlen=400)
"""The last lines of libbpf's warnings, the verifier's log among them."""

_Signature = tuple[Any, tuple[Any, ...]]

_INT: Final = ctypes.c_int
_U32: Final = ctypes.c_uint32
_SIZE: Final = ctypes.c_size_t
_P: Final = ctypes.c_void_p
_S: Final = ctypes.c_char_p


class ObjectOpenOptions(ctypes.Structure):
    """`struct bpf_object_open_opts`, as far as it is used."""

    _fields_ = (("sz", _SIZE), ("object_name", _S))


class UprobeOptions(ctypes.Structure):
    """`struct bpf_uprobe_opts`."""

    _fields_ = (
        ("sz", _SIZE),
        ("ref_ctr_offset", _SIZE),
        ("bpf_cookie", ctypes.c_uint64),
        ("retprobe", ctypes.c_bool),
        ("func_name", _S),
    )


class TestRunOptions(ctypes.Structure):
    """`struct bpf_test_run_opts`."""

    _fields_ = (
        ("sz", _SIZE),
        ("data_in", _P),
        ("data_out", _P),
        ("data_size_in", _U32),
        ("data_size_out", _U32),
        ("ctx_in", _P),
        ("ctx_out", _P),
        ("ctx_size_in", _U32),
        ("ctx_size_out", _U32),
        ("retval", _U32),
        ("repeat", _INT),
        ("duration", _U32),
        ("flags", _U32),
        ("cpu", _U32),
        ("batch_size", _U32),
    )
    data_size_out: int
    ctx_size_out: int
    retval: int


class ProgramInfo(ctypes.Structure):
    """`struct bpf_prog_info` (linux/bpf.h), as far as it is used."""

    _fields_ = (
        ("type", _U32),
        ("id", _U32),
        ("tag", ctypes.c_uint8 * 8),
        ("jited_prog_len", _U32),
        ("xlated_prog_len", _U32),
        ("unused", ctypes.c_uint8 * 40),
        ("name", ctypes.c_char * 16),
        ("unused_2", ctypes.c_uint8 * 136),
        ("verified_insns", _U32),
    )
    id: int
    name: bytes
    tag: ctypes.Array[ctypes.c_uint8]
    verified_insns: int


class MapInfo(ctypes.Structure):
    """`struct bpf_map_info` (linux/bpf.h), as far as it is used."""

    _fields_ = (
        ("type", _U32),
        ("id", _U32),
        ("key_size", _U32),
        ("value_size", _U32),
        ("max_entries", _U32),
        ("map_flags", _U32),
        ("name", ctypes.c_char * 16),
    )
    type: int
    id: int
    key_size: int
    value_size: int
    max_entries: int
    name: bytes


class BtfType(ctypes.Structure):
    """`struct btf_type` (linux/btf.h); what follows it in memory depends on its kind."""

    _fields_ = (("name_off", _U32), ("info", _U32), ("size_or_type", _U32))
    name_off: int
    info: int
    size_or_type: int


# fmt: off
_SIGNATURES: Final[dict[str, _Signature]] = {
    "bpf_link__destroy": (_INT, (_P,)),
    "bpf_link__disconnect": (None, (_P,)),
    "bpf_link__fd": (_INT, (_P,)),
    "bpf_link__open": (_P, (_S,)),
    "bpf_link__pin": (_INT, (_P, _S)),
    "bpf_link__update_program": (_INT, (_P, _P)),
    "bpf_map__fd": (_INT, (_P,)),
    "bpf_map__initial_value": (_P, (_P, ctypes.POINTER(_SIZE))),
    "bpf_map__is_internal": (ctypes.c_bool, (_P,)),
    "bpf_map__name": (_S, (_P,)),
    "bpf_map__reuse_fd": (_INT, (_P, _INT)),
    "bpf_map__set_max_entries": (_INT, (_P, _U32)),
    "bpf_map__set_pin_path": (_INT, (_P, _S)),
    "bpf_map_delete_elem": (_INT, (_INT, _P)),
    "bpf_map_get_next_key": (_INT, (_INT, _P, _P)),
    "bpf_map_lookup_elem": (_INT, (_INT, _P, _P)),
    "bpf_map_update_elem": (_INT, (_INT, _P, _P, ctypes.c_uint64)),
    "bpf_obj_get": (_INT, (_S,)),
    "bpf_obj_get_info_by_fd": (_INT, (_INT, _P, ctypes.POINTER(_U32))),
    "bpf_obj_pin": (_INT, (_INT, _S)),
    "bpf_object__btf": (_P, (_P,)),
    "bpf_object__close": (None, (_P,)),
    "bpf_object__load": (_INT, (_P,)),
    "bpf_object__next_map": (_P, (_P, _P)),
    "bpf_object__next_program": (_P, (_P, _P)),
    "bpf_object__open_mem": (_P, (_P, _SIZE, _P)),
    "bpf_prog_test_run_opts": (_INT, (_INT, _P)),
    "bpf_program__attach": (_P, (_P,)),
    "bpf_program__attach_cgroup": (_P, (_P, _INT)),
    "bpf_program__attach_uprobe_opts": (_P, (_P, _INT, _S, _SIZE, _P)),
    "bpf_program__fd": (_INT, (_P,)),
    "bpf_program__name": (_S, (_P,)),
    "bpf_program__set_autoload": (_INT, (_P, ctypes.c_bool)),
    "btf__find_by_name_kind": (_INT, (_P, _S, _U32)),
    "btf__free": (None, (_P,)),
    "btf__load_vmlinux_btf": (_P, ()),
    "btf__name_by_offset": (_S, (_P, _U32)),
    "btf__new": (_P, (_P, _U32)),
    "btf__parse_elf": (_P, (_S, _P)),
    "btf__resolve_size": (ctypes.c_int64, (_P, _U32)),
    "btf__type_by_id": (ctypes.POINTER(BtfType), (_P, _U32)),
    "libbpf_num_possible_cpus": (_INT, ()),
    "libbpf_set_print": (_P, (_P,)),
    "libbpf_version_string": (_S, ()),
}
# fmt: on


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, opened once. Raises OSError where it is not installed."""
    opened = ctypes.CDLL(LIBRARY, use_errno=True)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(opened, name)
        function.restype = result
        function.argtypes = arguments
    opened.libbpf_set_print(_printer)
    return opened


def call(what: str, name: str, *arguments: object) -> int:
    """Call a function that returns an int and return it. Raises KernelError("cannot <what>") where it is negative."""
    result = int(getattr(library(), name)(*arguments))
    if result < 0:
        # The wrappers of system calls return -1 in libbpf 0.x and -errno in 1.x; errno is set in both.
        raise KernelError(what, ctypes.get_errno() or -result)
    return result


def call_pointer(what: str, name: str, *arguments: object) -> int:
    """Call a function that returns a pointer and return its address. Raises KernelError where it is NULL."""
    result = getattr(library(), name)(*arguments)
    if not result:
        raise KernelError(what, ctypes.get_errno())
    return int(result)


def each(name: str, handle: int) -> Iterator[int]:
    """Yield the addresses that an iterating function such as `bpf_object__next_map` returns."""
    function: Callable[[int, int | None], int | None] = getattr(library(), name)
    found = function(handle, None)
    while found:
        yield found
        found = function(handle, found)


def text(name: str, *arguments: object) -> str:
    """Call a function that returns a C string."""
    result: bytes = getattr(library(), name)(*arguments)
    return result.decode(errors="replace")


def verifier_tail() -> str:
    """Return the last lines of the verifier's log, or of libbpf's own warnings where there is none."""
    return "\n".join(list(log)[-_VERIFIER_TAIL:])


@functools.cache
def possible_cpus() -> int:
    """Return for how many processors a per-CPU map has a value."""
    return call("count the processors", "libbpf_num_possible_cpus")


# A va_list reaches a callback as a pointer on x86-64 and aarch64, and that is what vsnprintf takes there.
_vsnprintf: Final = ctypes.CDLL(None).vsnprintf
_vsnprintf.argtypes = (_S, _SIZE, _S, _P)


def _print(level: int, template: bytes, arguments: int) -> int:
    if level == _WARN:
        line = ctypes.create_string_buffer(_LINE_BYTES)
        _vsnprintf(line, _LINE_BYTES, template, arguments)
        log.extend(line.value.decode(errors="replace").rstrip("\n").split("\n"))
    return 0


_printer: Final = ctypes.CFUNCTYPE(_INT, _INT, _S, _P)(_print)
