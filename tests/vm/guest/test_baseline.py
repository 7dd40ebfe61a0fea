"""The processor of this machine is the plainest x86-64 there is, and everything that we depend on runs on it."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import click
import jinja2
import msgspec
import pyroute2
import pytest
import rich
import tokenizers
import zmq

pytestmark = pytest.mark.skipif(os.environ.get("SEEDANCE_GUEST") != "1", reason="runs in a guest: make test-vm")

SYS_IO_URING_SETUP = 425
PARAMS_BYTES = 120  # struct io_uring_params


def test_the_processor_has_no_extension_beyond_the_first_level() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    assert "sse2" in flags
    assert not flags & {"ssse3", "sse4_1", "sse4_2", "avx", "avx2", "avx512f", "bmi1", "bmi2", "fma", "popcnt"}


def test_the_kernel_is_the_oldest_that_we_serve_or_newer() -> None:
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    assert (major, minor) >= (6, 1)


def test_the_kernel_makes_a_ring() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(PARAMS_BYTES)
    fd = libc.syscall(SYS_IO_URING_SETUP, 8, params)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    os.close(fd)


def test_every_library_of_the_daemon_works_here() -> None:
    """Import is not enough: an instruction that the processor lacks may stand in a function's fast path."""
    assert click.style("x", bold=True) and rich.get_console()
    numbers = list(range(1000))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(numbers)) == numbers
    assert msgspec.json.decode(msgspec.json.encode({"text": "ü" * 100})) == {"text": "ü" * 100}
    assert jinja2.Template("{{ a }}").render(a=1) == "1"
    model = tokenizers.models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])
    assert tokenizers.Tokenizer(model).encode("abab").ids == [2, 2]
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://pair")
        other.connect("inproc://pair")
        one.send(b"x" * 10_000)
        assert other.recv() == b"x" * 10_000
    with pyroute2.IPRoute() as netlink:
        assert netlink.get_links()
