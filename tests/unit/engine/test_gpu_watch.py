from __future__ import annotations

import functools
import threading
import time

from support.fake_nvml import FakeGpu, FakeNvml

from seedance.engine.gpu_watch import GpuWatch
from seedance.qos.gpu import Gpus, read

FULL = FakeGpu(name="A", uuid="GPU-a", memory_bytes=100, used_bytes=96, busy_percent=7)
IDLE = FakeGpu(name="B", uuid="GPU-b", memory_bytes=100, used_bytes=1, busy_percent=0)


def watch(device: str, *gpus: FakeGpu) -> GpuWatch:
    return GpuWatch(device, functools.partial(read, FakeNvml(*gpus)))


def test_the_engines_gpu_is_looked_at_and_no_other() -> None:
    for device, used, is_busy in (("", 0.96, True), ("0", 0.96, True), ("GPU-b", 0.01, False), ("1", 0.01, False)):
        looking = watch(device, FULL, IDLE)
        assert looking.look()
        now_s = time.monotonic()
        assert (looking.used(now_s), looking.is_busy(now_s)) == (used, is_busy)
        assert (looking.used(now_s + 60), looking.is_busy(now_s + 60)) == (None, None), "it is too old to count"


def test_where_there_is_none_nothing_is_known() -> None:
    for looking in (watch(""), watch("MIG-x", FULL), watch("7", FULL)):
        assert not looking.look()
        assert (looking.used(time.monotonic()), looking.is_busy(time.monotonic())) == (None, None)


def test_the_thread_ends_by_itself_or_when_it_is_closed() -> None:
    asked = threading.Event()

    def ask() -> Gpus:
        asked.set()
        return read(FakeNvml(FULL))

    for looking in (watch(""), GpuWatch("", ask)):
        looking.start()
        looking.close()
        looking._thread.join(10)
        assert not looking._thread.is_alive()
    assert asked.is_set()
