"""The part of the kernel's io_uring interface that we use: numbers, layouts and the three system calls.

Source: include/uapi/linux/io_uring.h as of Linux 6.1, which is the oldest kernel that has all of it. These layouts are
kernel ABI: they hold on every architecture and do not change. The system calls go through libc by ctypes, twice:
once releasing the interpreter lock (waits, so that other threads run), once keeping it (a submit that cannot block).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, Final

SYS_IO_URING_SETUP: Final = 425  # the same three numbers on every architecture since Linux 5.1
SYS_IO_URING_ENTER: Final = 426
SYS_IO_URING_REGISTER: Final = 427

# io_uring_setup: flags, features, mmap offsets
SETUP_CQSIZE: Final = 1 << 3
SETUP_SUBMIT_ALL: Final = 1 << 7  # 5.18: go on after an SQE that failed
SETUP_TASKRUN_FLAG: Final = 1 << 9  # 5.19: tell in sq_flags that completions wait for an enter
SETUP_SINGLE_ISSUER: Final = 1 << 12  # 6.0
SETUP_DEFER_TASKRUN: Final = 1 << 13  # 6.1: completions are posted only inside our own enter
FEAT_SINGLE_MMAP: Final = 1 << 0
FEAT_NODROP: Final = 1 << 1
FEAT_EXT_ARG: Final = 1 << 8
OFF_SQ_RING: Final = 0
OFF_SQES: Final = 0x10000000
SQ_CQ_OVERFLOW: Final = 1 << 1
SQ_TASKRUN: Final = 1 << 2

ENTER_GETEVENTS: Final = 1 << 0
ENTER_EXT_ARG: Final = 1 << 3

REGISTER_PBUF_RING: Final = 22  # 5.19
UNREGISTER_PBUF_RING: Final = 23

OP_POLL_ADD: Final = 6
OP_POLL_REMOVE: Final = 7
OP_ACCEPT: Final = 13
OP_ASYNC_CANCEL: Final = 14
OP_SEND: Final = 26
OP_RECV: Final = 27

IOSQE_BUFFER_SELECT: Final = 1 << 5
IOSQE_CQE_SKIP_SUCCESS: Final = 1 << 6  # 5.17
ACCEPT_MULTISHOT: Final = 1 << 0  # 5.19
RECV_MULTISHOT: Final = 1 << 1  # 6.0

CQE_F_BUFFER: Final = 1 << 0
CQE_F_MORE: Final = 1 << 1
CQE_BUFFER_SHIFT: Final = 16

SQE_BYTES: Final = 64
CQE_BYTES: Final = 16
# opcode flags ioprio fd | off | addr | len op_flags | user_data | buf_group personality splice_fd | addr3 pad
SQE: Final = struct.Struct("=BBHiQQIIQHHiQQ")
SQE_FD_AT: Final = 4
SQE_ADDRESS_AT: Final = 16
SQE_LENGTH_AT: Final = 24
CQE: Final = struct.Struct("=QiI")  # user_data, res, flags
PBUF: Final = struct.Struct("=QIH")  # addr, len, bid; the ring's tail lies in the padding of entry 0
PBUF_BYTES: Final = 16
PBUF_TAIL: Final = 14
PBUF_REG: Final = struct.Struct("=QIHH3Q")  # ring_addr, ring_entries, bgid, flags, reserved

# sq_entries cq_entries flags sq_thread_cpu sq_thread_idle features wq_fd resv[3], then sq_off, then cq_off
PARAMS: Final = struct.Struct("=10I 8IQ 8IQ")
WAIT_ARGUMENT: Final = struct.Struct("=QIIQ qq")  # sigmask, size, pad, &timespec; then that timespec

_releasing = ctypes.CDLL(None, use_errno=True)
_keeping = ctypes.PyDLL(None, use_errno=True)


EnterFunction = Callable[[int, int, int, int, int, int | None, int], int]


def _enter_function(library: ctypes.CDLL) -> EnterFunction:
    function: Any = library["syscall"]
    function.restype = ctypes.c_long
    function.argtypes = (
        ctypes.c_long,
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_size_t,
    )
    typed: EnterFunction = function
    return typed


enter_waiting: Final = _enter_function(_releasing)
enter_holding: Final = _enter_function(_keeping)

_plain = _releasing["syscall"]
_plain.restype = ctypes.c_long


def setup(entries: int, params: ctypes.Array[ctypes.c_char]) -> int:
    """Return the descriptor of a new ring and fill in `params`; raises OSError."""
    fd: int = _plain(ctypes.c_long(SYS_IO_URING_SETUP), ctypes.c_uint(entries), params)
    if fd < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, "io_uring_setup")
    return fd


def register(fd: int, opcode: int, argument: ctypes.Array[ctypes.c_char], count: int) -> None:
    """Register something with a ring; raises OSError."""
    if _plain(ctypes.c_long(SYS_IO_URING_REGISTER), fd, ctypes.c_uint(opcode), argument, ctypes.c_uint(count)) < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"io_uring_register({opcode})")
