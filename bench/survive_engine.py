"""Deaths of real vLLM engines under greedy streams, for `bench.survive`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from support.engine_deaths import EngineDeaths, Streams, vllm_host
from support.stall import Stall

from bench.exactly_once import differences
from bench.report import say

ENGINE_DEATHS: Final = ("standby", "hang", "forkserver", "cpu")
"""The active engine killed, or stopped by a signal, with another one standing by; both killed; the fork server, too."""


class Sample(msgspec.Struct, frozen=True):
    """One death under all streams: how long they stood still, what was lost or came twice, and what was sent again."""

    death: str
    streams: int
    stall: Stall
    lost: int
    doubled: int
    frames_resent: int = 0

    def said(self) -> str:
        """Return it for people."""
        return (
            f"{self.death}: {self.streams} streams stood still for {self.stall.all_s:.2f} to {self.stall.one_s:.2f} s,"
            f" lost {self.lost}, doubled {self.doubled}, frames resent {self.frames_resent}"
        )


def sample_of(death: str, streams: Streams, whole: Mapping[int, list[int]]) -> Sample:
    """Compare what came with an undisturbed run. The streams of the engine on the processor are longer, and cut off."""
    lost = doubled = 0
    for stream, expected in whole.items():
        came = streams.worker.token_ids[stream]
        length = min(len(expected), len(came)) if death == "cpu" else None
        missing, beyond = differences(expected[:length], came[:length])
        lost, doubled = lost + missing, doubled + beyond
    return Sample(death, len(whole), streams.stall, lost, doubled)


async def engine_deaths(folder: Path, rounds: int, deaths: Sequence[str]) -> list[Sample]:
    """Run each death so many times, on one host."""
    samples = []
    async with vllm_host(folder) as host:
        running = EngineDeaths(host, folder)
        ways = {
            "standby": running.standby,
            "hang": running.hang,
            "forkserver": running.fork_server,
            "cpu": running.cpu,
        }
        whole = await running.undisturbed()
        for _ in range(rounds):
            for death in deaths:
                samples.append(sample_of(death, await ways[death](), whole))
                say(samples[-1].said())
    return samples
