"""GPUs by a stand-in for NVML, and what CUDA is told of the part that an engine may have."""

from __future__ import annotations

import inspect
import shlex
import socket
from pathlib import Path

import msgspec
import pynvml
import pytest
from support.fake_nvml import FakeGpu, FakeInstance, FakeNvml
from support.mps import control_daemon

from seedance.qos.gpu import Gpu, GpuPart, Gpus, MigInstance, mps_command, mps_error, read

SIZE, USED = 80 << 30, 8 << 30


def test_gpus_of_every_kind_are_read() -> None:
    instances = (FakeInstance(uuid="MIG-1", memory_bytes=10), None, FakeInstance(uuid="MIG-2", memory_bytes=20))
    nvml = FakeNvml(
        FakeGpu(name="L4", uuid="GPU-1"),
        FakeGpu(name="H100", uuid="GPU-2", mig=False, instances=instances),
        FakeGpu(name="H200", uuid="GPU-3", mig=True, busy_percent=None, instances=instances),
    )
    found = read(nvml)
    assert (found.driver, found.error) == ("615.10", "")
    assert found.gpus == (
        Gpu(name="L4", uuid="GPU-1", busy=0.5, has_mig=None, memory_bytes=SIZE, used_bytes=USED),
        Gpu(name="H100", uuid="GPU-2", busy=0.5, has_mig=False, memory_bytes=SIZE, used_bytes=USED),
        Gpu(
            name="H200",
            uuid="GPU-3",
            busy=None,
            has_mig=True,
            instances=(MigInstance(uuid="MIG-1", memory_bytes=10), MigInstance(uuid="MIG-2", memory_bytes=20)),
            memory_bytes=SIZE,
            used_bytes=USED,
        ),
    )
    assert not nvml.is_open


def test_why_there_is_none() -> None:
    assert read(FakeNvml(error="Driver Not Loaded")) == Gpus(error="Driver Not Loaded")
    assert read(FakeNvml()) == Gpus(driver="615.10", error="the driver knows none")
    assert read(FakeNvml(uncounted="Unknown Error")) == Gpus(driver="615.10", error="Unknown Error")


def test_what_is_not_known_of_one_gpu_does_not_hide_the_rest() -> None:
    good = FakeGpu(name="L4", uuid="GPU-1")
    seen = Gpu(name="L4", uuid="GPU-1", busy=0.5, has_mig=None, memory_bytes=SIZE, used_bytes=USED)
    unified = FakeGpu(name="GB10", uuid="GPU-2", memory_bytes=None)
    found = read(FakeNvml(unified, good))
    assert (found.driver, found.error) == ("615.10", "")
    assert found.gpus == (
        msgspec.structs.replace(seen, name="GB10", uuid="GPU-2", memory_bytes=None, used_bytes=None),
        seen,
    )

    nvml = FakeNvml(FakeGpu(name="L4", uuid="GPU-3", lost="GPU is lost"), good, driver="")
    assert read(nvml) == Gpus(driver="", gpus=(seen,), error="GPU is lost")
    assert not nvml.is_open

    silent = FakeGpu(name="L4", uuid="GPU-4", silent=True)
    nothing = Gpu(name="", uuid="", busy=None, has_mig=None, memory_bytes=None, used_bytes=None)
    assert read(FakeNvml(silent, good)).gpus == (nothing, seen)


def test_of_a_mig_instance_too() -> None:
    instances = (FakeInstance(uuid="MIG-1", memory_bytes=None), FakeInstance(uuid="MIG-2", memory_bytes=20))
    (divided,) = read(FakeNvml(FakeGpu(name="H200", uuid="GPU-1", mig=True, instances=instances))).gpus
    assert divided.instances == (
        MigInstance(uuid="MIG-1", memory_bytes=None),
        MigInstance(uuid="MIG-2", memory_bytes=20),
    )


def test_a_library_that_cannot_be_closed_has_been_read_all_the_same() -> None:
    found = read(FakeNvml(FakeGpu(name="L4", uuid="GPU-1"), unclosed="Uninitialized"))
    assert (found.error, [gpu.name for gpu in found.gpus]) == ("", ["L4"])


def test_the_stand_in_has_what_the_library_has() -> None:
    for name, ours in inspect.getmembers(FakeNvml, inspect.isfunction):
        if name.startswith("nvml"):
            wanted = [parameter for parameter in inspect.signature(ours).parameters if parameter != "self"]
            theirs = inspect.signature(getattr(pynvml, name)).parameters.values()
            needed = [each for each in theirs if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
            assert len(needed) <= len(wanted) <= len(theirs), name
    assert issubclass(pynvml.NVMLError, Exception)


def test_a_part_of_a_gpu() -> None:
    assert GpuPart().environment() == {"CUDA_MPS_PIPE_DIRECTORY": "/run/nvidia-mps"}
    assert not GpuPart(device="0").needs_mps
    assert GpuPart(device="MIG-1").environment()["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    part = GpuPart(threads=0.125, memory_bytes=(1 << 20) + 5, mps_directory="/run/other")
    assert part.needs_mps
    assert part.environment() == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/other",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.5",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1M",
    }


def test_mps_is_there_while_its_control_daemon_listens(tmp_path: Path) -> None:
    directory = tmp_path / "mps"
    missing = f"no MPS control daemon can be reached at '{directory}/control': No such file or directory"
    assert mps_error(str(directory)) == missing
    directory.mkdir()
    assert mps_error(str(directory)) == missing
    with control_daemon(directory):
        assert mps_error(str(directory)) == ""
    assert mps_error(str(directory)).endswith(": Connection refused")  # its files outlive it


def test_mps_that_does_not_accept_is_there_and_nobody_waits(tmp_path: Path) -> None:
    with control_daemon(tmp_path) as listener:
        path = str(listener.getsockname())
        waiting = []
        with pytest.raises(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting[-1].setblocking(False)
                waiting[-1].connect(path)
        assert mps_error(str(tmp_path)) == ""
        for sock in waiting:
            sock.close()


def test_mps_may_speak_over_another_kind_of_socket(tmp_path: Path) -> None:
    with control_daemon(tmp_path, socket.SOCK_STREAM):
        assert mps_error(str(tmp_path)) == ""


def test_no_mps_is_where_no_socket_can_be() -> None:
    assert "path too long" in mps_error("/run/" + "x" * 200)


def test_the_command_that_starts_mps_names_the_directory_that_cuda_is_told() -> None:
    for directory in ("/run/other", "/run/a place"):
        told = GpuPart(mps_directory=directory).environment()["CUDA_MPS_PIPE_DIRECTORY"]
        make, start = mps_command(directory).split(" && ")
        assert shlex.split(make)[-1] == told
        assert shlex.split(start) == [f"CUDA_MPS_PIPE_DIRECTORY={told}", "nvidia-cuda-mps-control", "-d"]
