"""GPUs by a stand-in for NVML, and what CUDA is told of the part that an engine may have."""

from __future__ import annotations

import inspect
from pathlib import Path

import pynvml
from support.fake_nvml import FakeGpu, FakeInstance, FakeNvml

from seedance.qos.gpu import Gpu, GpuPart, Gpus, MigInstance, mps_runs, read

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
    lost = FakeNvml(FakeGpu(name="L4", uuid="GPU-1"), lost="GPU is lost")
    assert read(lost) == Gpus(error="GPU is lost")
    assert not lost.is_open


def test_the_stand_in_has_what_the_library_has() -> None:
    for name, ours in inspect.getmembers(FakeNvml, inspect.isfunction):
        if name.startswith("nvml"):
            wanted = [parameter for parameter in inspect.signature(ours).parameters if parameter != "self"]
            theirs = inspect.signature(getattr(pynvml, name)).parameters.values()
            needed = [each for each in theirs if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
            assert len(needed) <= len(wanted) <= len(theirs), name
    assert issubclass(pynvml.NVMLError, Exception)


def test_a_part_of_a_gpu() -> None:
    assert GpuPart().environment() == {}
    assert not GpuPart(device="0").needs_mps
    assert GpuPart(device="MIG-1").environment() == {"CUDA_VISIBLE_DEVICES": "MIG-1"}
    part = GpuPart(threads=0.125, memory_bytes=(1 << 20) + 5)
    assert part.needs_mps
    assert part.environment() == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.5",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1M",
    }


def test_whether_mps_runs(tmp_path: Path) -> None:
    for pid, command in (("1", "init"), ("x", "nvidia-cuda-mps"), ("20", "nvidia-cuda-m")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "comm").write_text(f"{command}\n")
    assert not mps_runs(tmp_path)
    (tmp_path / "30").mkdir()
    (tmp_path / "30" / "comm").write_text("nvidia-cuda-mps\n")
    assert mps_runs(tmp_path)
