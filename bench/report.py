"""What all comparisons do with their figures: medians with their spread, the machine, files, a picture."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

BUILD: Final = Path("build/bench")
RESULT: Final = ".result.json"
QUARTILES: Final = "_quartiles"


class Spread(msgspec.Struct, frozen=True):
    """A median and the quartiles around it, of so many samples."""

    median: float
    low: float
    high: float
    samples: int


def spread(samples: Sequence[float]) -> Spread:
    """Return the median and the quartiles (by the inclusive method; of fewer than two samples, the sample itself)."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0], 1)
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(middle, low, high, len(samples))


def percentile(samples: Sequence[int], percent: float) -> int:
    """Return the smallest sample that at least `percent` % of the samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def rounded(value: float) -> float:
    """Return a figure with four significant digits, for people."""
    return float(f"{value:.4g}")


def machine() -> dict[str, Any]:
    """Return what a reader must know of the machine to compare figures."""
    cpu = ""
    match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    if match:
        cpu = match[1]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def turn(order: Sequence[str], number: int) -> list[str]:
    """Return the order of one round: each round begins with another contender."""
    at = number % len(order)
    return [*order[at:], *order[:at]]


def versions(names: Sequence[str]) -> dict[str, str | None]:
    """Return the installed version of each distribution, None where it is missing."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def save(path: Path, samples: Any) -> None:
    """Write raw samples as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(samples), indent=1))
    say(f"raw samples: {path}")


def say(text: str) -> None:
    """Tell people how it goes; the result is the last line of standard output, this is not."""
    print(text, file=sys.stderr, flush=True)


def add_ratio(result: dict[str, Any], key: str, at: Sequence[str], samples: Sequence[float]) -> None:
    """Put the median of a ratio into a result, below `key` and the names in `at`, and its quartiles beside."""
    figure = spread(samples)
    for name, value in (
        (key, rounded(figure.median)),
        (f"{key}{QUARTILES}", [rounded(figure.low), rounded(figure.high)]),
    ):
        place, path = result, [name, *at]
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value


def command_of(name: str, arguments: Sequence[str]) -> str:
    """Return how a person repeats a run."""
    words = shlex.join(arguments)
    return f'make bench-{name} BENCH_ARGS="{words}"' if words else f"make bench-{name}"


def publish(name: str, result: Mapping[str, Any], build: Path = BUILD) -> None:
    """Keep a result with its date and command where `page` finds it, and print it: one line of JSON for programs."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    whole = {"bench": name, "date": date, "command": command_of(name, sys.argv[1:]), **result}
    build.mkdir(parents=True, exist_ok=True)
    (build / f"{name}{RESULT}").write_text(json.dumps(whole, indent=1) + "\n")
    sys.stderr.flush()
    print(json.dumps(whole), flush=True)


def draw(path: Path, panels: Sequence[tuple[str, str, Mapping[str, Mapping[str, Spread]]]]) -> None:
    """Draw one panel of grouped bars each: (title, unit, group → bar → figure); left out without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        say("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(panels), figsize=(7 * len(panels), 5), squeeze=False)
    for axis, (title, unit, groups) in zip(axes[0], panels, strict=True):
        bars = list(dict.fromkeys(bar for figures in groups.values() for bar in figures))
        width = 0.8 / max(len(bars), 1)
        for number, bar in enumerate(bars):
            present = [(at, figures[bar]) for at, figures in enumerate(groups.values()) if bar in figures]
            places = [at + (number - (len(bars) - 1) / 2) * width for at, _ in present]
            heights = [one.median for _, one in present]
            errors = [[one.median - one.low for _, one in present], [one.high - one.median for _, one in present]]
            axis.bar(places, heights, width, yerr=errors, label=bar, capsize=2)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.set_title(title)
        axis.set_ylabel(unit)
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    say(f"picture: {path}")
