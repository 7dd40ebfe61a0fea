"""cuda.bpf.c with a stub of the CUDA driver library: what processes call is what is counted."""

from __future__ import annotations

import ctypes.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from support import observed

from seedance.bpf.observe import CudaUsage, Observer

observed.require_bpf()

STUB: Final = """
#include <stddef.h>
typedef unsigned long long CUdeviceptr;
static CUdeviceptr next = 4096;

__attribute__((noinline)) int cuMemAlloc_v2(CUdeviceptr *pointer, size_t size)
{
	if (size > ((size_t)1 << 40))
		return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
	*pointer = next;
	next += size;
	return 0;
}

__attribute__((noinline)) int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
	unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,
	void **extra)
{
	return 0;
}
"""

CALLS: Final = """
import ctypes, json, os, sys
library = ctypes.CDLL(sys.argv[1])
library.cuMemAlloc_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
pointer = ctypes.c_ulonglong()
for _ in range(int(sys.argv[2])):
    library.cuLaunchKernel(None, 1, 1, 1, 1, 1, 1, 0, None, None, None)
for size in map(int, sys.argv[3:]):
    library.cuMemAlloc_v2(ctypes.byref(pointer), size)
print(json.dumps(os.getpid()))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler (cc) for the stub library")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "stub.c").write_text(STUB)
    path = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", path, folder / "stub.c"], check=True)
    return path


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with observed.new_cgroup() as path:
        yield path


@pytest.fixture
def observer(cgroup: Path, library: Path) -> Iterator[Observer]:
    observer = Observer(cgroup=None, cuda_library=str(library))
    try:
        if not Path("/sys/bus/event_source/devices/uprobe").exists():
            # The truth about a kernel without them is a reason, and nothing else fails.
            assert observer.off["observe_cuda"].startswith("cannot ")
            assert "observe_cpu" not in observer.off
            pytest.skip("this kernel has no uprobes: " + observer.off["observe_cuda"])
        assert "observe_cuda" not in observer.off
        observer.tenants_changed({observed.cgroup_id(cgroup): 7})
        yield observer
    finally:
        observer.close()


def test_calls_are_counted_by_tenant_and_by_process(cgroup: Path, library: Path, observer: Observer) -> None:
    too_much = 1 << 41
    pid = observed.run_child(cgroup, CALLS, str(library), "100", "1000000", "234567", str(too_much))
    usage = observer.usage()[7]
    assert (usage.cuda_launches, usage.cuda_bytes) == (100, 1234567)
    counted = CudaUsage(launches=100, allocations=2, allocated_bytes=1234567, failed_allocations=1)
    assert observer.cuda_processes() == {pid: counted}


def test_a_size_beyond_32_bits_is_counted_whole(cgroup: Path, library: Path, observer: Observer) -> None:
    observed.run_child(cgroup, CALLS, str(library), "0", str(5 << 32))
    assert observer.usage()[7].cuda_bytes == 5 << 32


def test_processes_of_nobody_are_counted_but_not_as_a_tenant(library: Path, observer: Observer) -> None:
    with observed.new_cgroup() as elsewhere:
        pid = observed.run_child(elsewhere, CALLS, str(library), "3")
    assert observer.cuda_processes()[pid].launches == 3
    assert all(not usage.cuda_launches for usage in observer.usage().values())


def test_a_tenant_that_is_gone_is_forgotten(cgroup: Path, library: Path, observer: Observer) -> None:
    observed.run_child(cgroup, CALLS, str(library), "3")
    observer.tenants_changed({})
    assert 7 not in observer.usage()


def test_nothing_is_counted_after_close(cgroup: Path, library: Path, observer: Observer) -> None:
    observer.close()
    assert observed.run_child(cgroup, CALLS, str(library), "3") > 0
    assert observer.cuda_processes() == {}


@pytest.mark.parametrize("named", ["", "/no/such/libcuda.so.1", ctypes.util.find_library("c") or "libc.so.6"])
def test_a_library_without_the_functions_is_told_and_nothing_else_fails(named: str) -> None:
    observer = Observer(cgroup=None, cuda_library=named)
    try:
        assert named in observer.off["observe_cuda"]
        assert "observe_cpu" not in observer.off
        assert observer.cuda_processes() == {}
    finally:
        observer.close()
