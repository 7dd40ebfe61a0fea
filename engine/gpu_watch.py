"""What NVML says of the engine's GPU, asked again and again in a thread of its own: a driver may never answer.

Not seen on hardware: tested against a stand-in for NVML.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from seedance.qos.gpu import Gpu, Gpus, read

ASK_EVERY_S: Final = 2.0
_STALE_S: Final = 10.0


class GpuWatch:
    """The engine's GPU as it was a moment ago; where there is none the thread ends, and nothing is known.

    `device` is as in `GpuPart`; of a MIG instance nothing is known. `close` does not wait for NVML.
    """

    def __init__(self, device: str, ask: Callable[[], Gpus] = read) -> None:
        self._device = device
        self._ask = ask
        self._closed = threading.Event()
        self._seen: tuple[float, Gpu] | None = None
        self._thread = threading.Thread(target=self._run, name="seed-nvml", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def used(self, now_s: float) -> float | None:
        """Return the part of its memory that is in use, by whomever; `now_s` is on CLOCK_MONOTONIC."""
        gpu = self._fresh(now_s)
        if gpu is None or not gpu.memory_bytes or gpu.used_bytes is None:
            return None
        return gpu.used_bytes / gpu.memory_bytes

    def is_busy(self, now_s: float) -> bool | None:
        """Return whether it has run anything lately."""
        gpu = self._fresh(now_s)
        return None if gpu is None or gpu.busy is None else gpu.busy > 0

    def look(self) -> bool:
        """Ask once; False when there is no such GPU."""
        gpus = self._ask().gpus
        gpu = next((gpu for number, gpu in enumerate(gpus) if self._device in (str(number), gpu.uuid)), None)
        gpu = gpus[0] if gpus and not self._device else gpu
        self._seen = None if gpu is None else (time.monotonic(), gpu)
        return gpu is not None

    def _run(self) -> None:
        while self.look() and not self._closed.wait(ASK_EVERY_S):
            pass

    def _fresh(self, now_s: float) -> Gpu | None:
        seen = self._seen
        return seen[1] if seen is not None and now_s - seen[0] < _STALE_S else None
