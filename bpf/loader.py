"""Load BPF objects that were built from the `*.bpf.c` beside this file, attach their programs, keep them pinned.

Maps that are pinned below the same folder are shared: the first object makes them, those that come later, in this
process or the next one, take what is there. A link that is pinned keeps its program attached without a process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, Self

from seedance.bpf import libbpf
from seedance.bpf.btf import Btf
from seedance.bpf.maps import Map
from seedance.errors import BpfLoadError, KernelError

_CTX_BYTES: Final = 192
"""Size of `struct __sk_buff` (linux/bpf.h), the context of the programs that take packets."""


class Link:
    """A program that is attached. It stays attached while the link is open or pinned."""

    def __init__(self, handle: int, what: str, *, pinned: bool = False) -> None:
        self._handle = handle
        self._what = what
        self._pinned = pinned

    @property
    def fd(self) -> int:
        """The link's descriptor."""
        return libbpf.call(f"use the link of {self._what}", "bpf_link__fd", self._handle)

    def pin(self, path: Path) -> None:
        """Give the link a name in a BPF file system, by which it outlives this process. Raises KernelError."""
        libbpf.call(f"pin the link of {self._what} as '{path}'", "bpf_link__pin", self._handle, os.fsencode(path))
        self._pinned = True

    def update(self, program: Program) -> None:
        """Put another program in its place: no packet passes by both or by neither. Raises KernelError."""
        what = f"replace {self._what} by '{program.name}'"
        libbpf.call(what, "bpf_link__update_program", self._handle, program.handle)

    def close(self) -> None:
        """Let go of the link, which detaches the program unless the link is pinned."""
        handle, self._handle = self._handle, 0
        if not handle:
            return
        if self._pinned:
            # Without this, libbpf would disable the event that a pinned uprobe's link still needs. The descriptor is
            # ours to close then.
            fd = libbpf.library().bpf_link__fd(handle)
            libbpf.library().bpf_link__disconnect(handle)
            os.close(fd)
        libbpf.library().bpf_link__destroy(handle)


def open_link(path: Path) -> Link:
    """Open a link that was pinned. Raises KernelError where there is none."""
    handle = libbpf.call_pointer(f"open the link '{path}'", "bpf_link__open", os.fsencode(path))
    return Link(handle, f"'{path.name}'", pinned=True)


class TestRun:
    """What a program did with a packet: its return value and the fields of `struct __sk_buff` that it left."""

    __test__ = False  # pytest takes the name for a test's

    def __init__(self, returned: int, data: bytes, context: bytes) -> None:
        self.returned = returned
        self.data = data
        self.context = context


class Program:
    """A program of a loaded object; it lives as long as its object, what it is attached to or its pin."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.name = libbpf.text("bpf_program__name", handle)

    @property
    def fd(self) -> int:
        """The program's descriptor, owned by the object. Raises KernelError where the program was not loaded."""
        return libbpf.call(f"use program '{self.name}'", "bpf_program__fd", self.handle)

    @property
    def id(self) -> int:
        """The number under which `bpftool prog show` lists it."""
        return self.info().id

    @property
    def tag(self) -> str:
        """Digest of the instructions: the same for the same program."""
        return bytes(self.info().tag).hex()

    @property
    def verified_insns(self) -> int:
        """How many instructions the verifier looked at."""
        return self.info().verified_insns

    def info(self) -> libbpf.ProgramInfo:
        """Ask the kernel about the program."""
        info = libbpf.ProgramInfo()
        size = ctypes.c_uint32(ctypes.sizeof(info))
        what = f"ask for program '{self.name}'"
        libbpf.call(what, "bpf_obj_get_info_by_fd", self.fd, ctypes.byref(info), ctypes.byref(size))
        return info

    def pin(self, path: Path) -> None:
        """Give the program a name in a BPF file system, by which it lives on. Raises KernelError."""
        libbpf.call(f"pin program '{self.name}' as '{path}'", "bpf_obj_pin", self.fd, os.fsencode(path))

    def attach(self) -> Link:
        """Attach to what the program's section names, such as a tracepoint. Raises KernelError."""
        what = f"attach program '{self.name}'"
        return self._link(libbpf.call_pointer(what, "bpf_program__attach", self.handle))

    def attach_cgroup(self, cgroup_fd: int) -> Link:
        """Attach to a cgroup v2 group, beside other programs, for it and all groups below. Raises KernelError."""
        what = f"attach program '{self.name}' to a cgroup"
        return self._link(libbpf.call_pointer(what, "bpf_program__attach_cgroup", self.handle, cgroup_fd))

    def attach_uprobe(
        self, path: str, symbol: str | None = None, *, offset: int = 0, retprobe: bool = False, cookie: int = 0
    ) -> Link:
        """Attach to a function of a library, for every process, present and to come. Raises KernelError.

        `offset` counts from the symbol, or from the file's start without one.
        """
        function = symbol.encode() if symbol is not None else None
        options = libbpf.UprobeOptions(ctypes.sizeof(libbpf.UprobeOptions), 0, cookie, retprobe, function)
        what = f"attach program '{self.name}' to '{symbol or offset}' of '{path}'"
        function_name = "bpf_program__attach_uprobe_opts"
        every_process = -1
        return self._link(
            libbpf.call_pointer(
                what, function_name, self.handle, every_process, os.fsencode(path), offset, ctypes.byref(options)
            )
        )

    def test_run(self, data: bytes, context: bytes | None = None, *, repeat: int = 1) -> TestRun:
        """Run the program on a packet, beginning with its Ethernet header, without sending it (BPF_PROG_TEST_RUN).

        `context` is a `struct __sk_buff` with the fields that the packet is to have. Raises KernelError.
        """
        data_out = ctypes.create_string_buffer(len(data) + 256)
        ctx_out = ctypes.create_string_buffer(_CTX_BYTES)
        options = libbpf.TestRunOptions(
            sz=ctypes.sizeof(libbpf.TestRunOptions),
            data_in=ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p),
            data_size_in=len(data),
            data_out=ctypes.addressof(data_out),
            data_size_out=len(data_out),
            ctx_out=ctypes.addressof(ctx_out),
            ctx_size_out=_CTX_BYTES,
            repeat=repeat,
        )
        if context is not None:
            options.ctx_in = ctypes.cast(ctypes.c_char_p(context), ctypes.c_void_p)
            options.ctx_size_in = len(context)
        libbpf.call(f"run program '{self.name}'", "bpf_prog_test_run_opts", self.fd, ctypes.byref(options))
        return TestRun(options.retval, data_out.raw[: options.data_size_out], ctx_out.raw[: options.ctx_size_out])

    def _link(self, handle: int) -> Link:
        return Link(handle, f"program '{self.name}'")


class BpfObject:
    """The programs and maps of one `<name>.bpf.o`, loaded.

    pins      folder in a BPF file system where its maps are pinned by their names, and taken from if they are there
    maps      by name, maps to take instead of making them
    entries   by name, how many entries a map has instead of what the source says
    rodata    values of `const volatile` variables, by name
    programs  names of those to load; all without it

    Raises BpfLoadError when the verifier refuses a program, KernelError for everything else.
    """

    def __init__(
        self,
        name: str,
        *,
        pins: Path | None = None,
        maps: Mapping[str, Map] = {},
        entries: Mapping[str, int] = {},
        rodata: Mapping[str, int] = {},
        programs: Collection[str] | None = None,
        path: Path | None = None,
    ) -> None:
        self.name = name
        self._handle = _open(name, _read(name, path))
        try:
            self._programs = {one.name: one for one in map(Program, self._each("program"))}
            self._maps = {libbpf.text("bpf_map__name", one): one for one in self._each("map")}
            self._choose_programs(programs)
            self._set_rodata(rodata)
            self._set_maps(pins, maps, entries)
            self._load()
        except BaseException:
            self.close()
            raise

    def program(self, name: str) -> Program:
        """Return a program by the name of its function. Raises KeyError."""
        return self._programs[name]

    def programs(self) -> list[Program]:
        """Return all programs, loaded or not."""
        return list(self._programs.values())

    def map(self, name: str) -> Map:
        """Return a map by its name; its descriptor stays the object's. Raises KeyError."""
        return Map(libbpf.call(f"use map '{name}'", "bpf_map__fd", self._maps[name]), owned=False)

    @property
    def btf(self) -> Btf:
        """Types of the object's file; valid while the object is open."""
        return Btf(libbpf.call_pointer(f"read BTF of '{self.name}'", "bpf_object__btf", self._handle), owned=False)

    def close(self) -> None:
        """Let go of programs and maps; what is attached or pinned stays."""
        handle, self._handle = self._handle, 0
        if handle:
            libbpf.library().bpf_object__close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(self, kind: str) -> list[int]:
        return list(libbpf.each(f"bpf_object__next_{kind}", self._handle))

    def _choose_programs(self, names: Collection[str] | None) -> None:
        for program in self._programs.values() if names is not None else ():
            load = program.name in (names or ())
            libbpf.call(f"choose '{program.name}'", "bpf_program__set_autoload", program.handle, load)

    def _set_rodata(self, values: Mapping[str, int]) -> None:
        if not values:
            return
        size = ctypes.c_size_t()
        (section,) = [handle for name, handle in self._maps.items() if name.endswith(".rodata")]
        start = libbpf.call_pointer(
            f"set values of '{self.name}'", "bpf_map__initial_value", section, ctypes.byref(size)
        )
        variables = {variable.name: variable for variable in self.btf.section(".rodata")}
        for name, value in values.items():
            variable = variables[name]
            ctypes.memmove(start + variable.offset, value.to_bytes(variable.size, "little"), variable.size)

    def _set_maps(self, pins: Path | None, shared: Mapping[str, Map], entries: Mapping[str, int]) -> None:
        for name, handle in self._maps.items():
            if name in entries:
                libbpf.call(f"size map '{name}'", "bpf_map__set_max_entries", handle, entries[name])
            if name in shared:
                libbpf.call(f"share map '{name}'", "bpf_map__reuse_fd", handle, shared[name].fd)
            elif pins is not None and not libbpf.library().bpf_map__is_internal(handle):
                pin = os.fsencode(pins / name)
                libbpf.call(f"pin map '{name}'", "bpf_map__set_pin_path", handle, pin)

    def _load(self) -> None:
        libbpf.log.clear()
        try:
            libbpf.call(f"load '{self.name}.bpf.o'", "bpf_object__load", self._handle)
        except KernelError as error:
            tail = libbpf.verifier_tail()
            refused = next((one for one in self._programs if f"'{one}': failed to load" in tail), None)
            if refused is not None:
                raise BpfLoadError(refused, error.errno, tail) from error
            raise KernelError(f"{error.what} ({_reason(tail)})", error.errno) from error


def _reason(tail: str) -> str:
    """Return libbpf's first line about a failed load: the ones that follow are its consequences."""
    return tail.partition("\n")[0].removeprefix("libbpf: ")


def _read(name: str, path: Path | None) -> bytes:
    """Read the object's file: the installed one, or one below `path`."""
    try:
        folder = path if path is not None else importlib.resources.files("seedance.bpf")
        return (folder / f"{name}.bpf.o").read_bytes()
    except OSError as error:
        what = f"read the BPF object '{name}.bpf.o' (`make bpf` builds it; a wheel has it)"
        raise KernelError(what, error.errno or 0) from error


def _open(name: str, data: bytes) -> int:
    try:
        libbpf.library()
    except OSError as error:
        raise KernelError(f"open {libbpf.LIBRARY} (Debian's package is libbpf1): {error}", error.errno or 2) from error
    options = libbpf.ObjectOpenOptions(ctypes.sizeof(libbpf.ObjectOpenOptions), name.encode())
    what = f"open '{name}.bpf.o'"
    return libbpf.call_pointer(what, "bpf_object__open_mem", data, len(data), ctypes.byref(options))


@functools.cache
def supported() -> str:
    """Return "" where BPF programs can be loaded, else why not: it loads one with its maps and runs it on a packet."""
    try:
        with BpfObject("egress", programs=("egress_police",)) as loaded:
            loaded.program("egress_police").test_run(bytes(64))
    except KernelError as error:
        return str(error)
    return ""
