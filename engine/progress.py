"""Whether an engine that says nothing is at work or hangs: pure.

Its scheduler gives signs of life, in the ledger: some ten a second at work, one a second at rest. None for a while can
be a long step, as the reading of a long prompt is. What tells one from a hang is whether anything computes: a process
that uses the processor, or a GPU that is not idle. So there are three ways to hang:

* the process was stopped by a signal,
* nothing has computed for IDLE_S without a sign of life; GPU_S where the GPU is busy, which others may use, too,
* something computes without end: a step has taken STEP_S.

A machine so busy that the process does not get its turn, or waits for a disk, is no hang, nor is one on which we do not
get our turn: only time counts in which we looked.
"""

from __future__ import annotations

from typing import Final

import msgspec

STOPPED_S: Final = 3.0
IDLE_S: Final = 7.0
GPU_S: Final = 180.0
STEP_S: Final = 900.0
LOOK_EVERY_S: Final = 1.0
_LONGEST_LOOK_S: Final = 2 * LOOK_EVERY_S
# Of a processor: a process that waits for something still wakes up now and then.
_COMPUTING: Final = 0.02
_BUSY: Final = "RD"  # runs or would run, or waits for a disk
_STOPPED: Final = "T"


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What is seen of an engine at a time.

    `sign` changes with each sign of life; None when it could not be read. `cpu_s` is the processor time that its
    process has used, `process_state` the kernel's letter for its main thread. `gpu_busy` is None where nobody can say.
    """

    now_s: float
    sign: float | None
    cpu_s: float
    process_state: str
    gpu_busy: bool | None = None


class Progress:
    """The judgement of one engine's life; look at it every LOOK_EVERY_S."""

    def __init__(self) -> None:
        self._last: Sight | None = None
        self._stopped_s = self._idle_s = self._waits_s = self._silent_s = 0.0

    def look(self, sight: Sight) -> str:
        """Return how the engine hangs, or nothing."""
        last, self._last = self._last, sight
        if last is None:
            return ""
        passed_s = min(max(0.0, sight.now_s - last.now_s), _LONGEST_LOOK_S)
        self._stopped_s = self._stopped_s + passed_s if sight.process_state == _STOPPED else 0.0
        if sight.sign is None or sight.sign != last.sign:
            self._idle_s = self._waits_s = self._silent_s = 0.0
        else:
            self._silent_s += passed_s
            computes = _computes(last, sight)
            self._waits_s = 0.0 if computes else self._waits_s + passed_s
            self._idle_s = 0.0 if computes or sight.gpu_busy else self._idle_s + passed_s
        return self._verdict()

    def _verdict(self) -> str:
        if self._stopped_s >= STOPPED_S:
            return "its process was stopped by a signal"
        if self._idle_s >= IDLE_S or self._waits_s >= GPU_S:
            return f"it hangs: no sign of life for {self._silent_s:.0f} s, and nothing computes"
        if self._silent_s >= STEP_S:
            return f"it hangs: a step has taken {self._silent_s:.0f} s"
        return ""


def _computes(last: Sight, sight: Sight) -> bool:
    """Whether its process did between two sights, or would if it were let."""
    if sight.process_state in _BUSY:
        return True
    return sight.cpu_s - last.cpu_s > _COMPUTING * (sight.now_s - last.now_s)
